"""Where does a page live, and when does it move? One file an algorithm."""

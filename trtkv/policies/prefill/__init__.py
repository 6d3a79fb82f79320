"""Which blocks of keys does a block of a prompt's queries read? One file an algorithm."""

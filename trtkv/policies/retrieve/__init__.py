"""Which stored tokens or pages does a decode query read? One file an algorithm."""

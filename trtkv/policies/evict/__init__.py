"""Which stored tokens go for good? One file an algorithm."""

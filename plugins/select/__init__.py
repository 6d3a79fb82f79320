"""Selection: score what an index stores, choose exactly the best units."""

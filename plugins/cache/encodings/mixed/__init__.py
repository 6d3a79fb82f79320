"""Full precision and codes in one sequence: what eviction demotes is encoded, in pages of the same pool."""

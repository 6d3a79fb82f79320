"""Column sums of a prompt's attention: how much every stored token receives from a chunk of queries, from the log-sum-exp of the library's attention.

One pass recomputes the products of queries and keys tile by tile; memory is linear in the tokens, and no sum is shared between blocks, so results
are the same in every run.
"""

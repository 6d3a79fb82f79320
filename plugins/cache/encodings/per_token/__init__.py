"""Codes of single tokens, of which a decode step's takes the place of an evicted one, once as many are stored as the budget allows.

A token's four-bit codes depend on that token alone, attention on no order: so nothing moves and no length changes. The newest token lies in
full precision beside the pages while its step attends; after the last layer's attention two launches serve all layers: `mass_kernel` counts what
the step's queries paid, `exchange_kernel` finds the least token of every head and encodes the newest in its place.
"""

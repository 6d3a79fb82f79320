"""KV heads that store different numbers of tokens: every KV head of every layer has its own pages, all from one pool.

A head of a sequence is its own row for append, attention and compaction: it has its length and its page numbers. `ledger.py` knows all lengths
in integers, `compactor.py` runs after each step.
"""

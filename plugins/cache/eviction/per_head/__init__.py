"""KV heads that keep different numbers of tokens: every KV head of every layer has pages of its own, all from one pool.

A head of a sequence is a row of its own for append, attention and compaction: it has its length and its page numbers. `ledger.py` knows all lengths
in integers, `compactor.py` runs behind each step.
"""

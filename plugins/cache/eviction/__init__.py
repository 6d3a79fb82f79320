"""Evicting from pages: the tokens that stay move together, in order, and whole pages become free for others.

Keys are stored after rotation, so attention over the remaining tokens is plain dense attention over a shorter row of pages: KvAppend and KvAttend run
unchanged. `ledger.py` knows all lengths in integers, `compactor.py` runs after each step. Roles of which each step drops one token, or a page
once in so many, move nothing but what takes its place (`exchange.py`, `raas.py`): positions then say what is newest.
"""

"""How many tokens are stored, in integers that the host knows; one file a kind of ledger."""

"""What roles need of each other and of the runtime, by name."""

# What a role may find in `needs`, `gives` and `takes`; the runtime itself gives the ones that are True here.
CAPABILITIES: dict[str, tuple[bool, str]] = {
    "attention_mass": (True, "the attention that every stored token received so far"),
    "attention_newest": (True, "the newest query's attention to every stored token"),
    "last_queries": (True, "the newest queries"),
    "output_projection": (True, "the matrix that a layer's attention output is multiplied by"),
    "dense_decode": (True, "decode queries that attend to every stored token"),
    "equal_heads": (True, "equally many tokens in every KV head"),
    "stable_groups": (True, "stored tokens that stay in their group or page while the model decodes"),
    "settled_prefix": (True, "leading tokens that are never evicted"),
    "precision_classes": (False, "an evict role that says which kept tokens are encoded"),
    "pages_chosen": (False, "a retrieve role that reads whole pages"),
    "token_scores": (False, "an evict role that scores every stored token"),
    "free_tokens": (False, "an evict role with a budget to distribute"),
    "precise_share": (False, "an allocate role that says how many tokens stay in full precision"),
}

# What the runtime observes for the evict role that asks for it.
OBSERVED = frozenset({"attention_mass", "attention_newest", "last_queries", "output_projection"})

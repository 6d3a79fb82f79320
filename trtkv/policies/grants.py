"""What an allocate role distributes, and what heads may keep then."""

from __future__ import annotations

from typing import NamedTuple


class Ask(NamedTuple):
    """What is to be distributed: `free` tokens for each KV head on average, beyond `fixed` ones, for a prompt of so many tokens."""

    num_layers: int
    num_kv_heads: int
    free: float
    fixed: int
    prompt: int


class Grants(NamedTuple):
    """Tokens that each KV head of each layer keeps, sink and window included, and how many of them in full precision: [L][Hk] or None."""

    tokens: tuple[tuple[int, ...], ...] | None
    precise: tuple[tuple[int, ...], ...] | None

"""What the launches of the append kernels are given: new tokens, where they go, and the summaries of their groups."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of B sequences: qkv [T, (Hq + 2 Hk) D], their positions [T], the first row of each sequence starts [B + 1], both int32.

    rope [S, D] fp32 rotates them; norms are the weights [D] of the norms of queries and keys before that, with their eps.
    """

    qkv: Tensor
    positions: Tensor
    starts: Tensor
    rope: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where new tokens go: pools keys and values [P, Hk, N, D], stored tokens lens [B] with the new ones, and pages table [B, M] in the pools.

    homes [B, M] names the pages of the summaries where they are not those of table. heads says how many KV heads there are where each has its own
    length and pages: lens [Hk, B], table [Hk, B, M], keys and values [P, 1, N, D]. rings [Z, Hk, 2] with slots [B] and sink says that some of them
    store their newest tokens in rings.
    """

    keys: Tensor
    values: Tensor
    lens: Tensor
    table: Tensor
    homes: Tensor | None = None
    heads: int | None = None
    slots: Tensor | None = None
    rings: Tensor | None = None
    sink: int = -1


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Tokens of a group, the kind of its summary as `kernel.py` numbers them, and the buffers of its two parts as kernels take them.

    A group is a power of two that divides the page. bits may be None where the summary has only meta, both where it is NONE.
    """

    group: int
    kind: int
    bits: Tensor | None = None
    meta: Tensor | None = None

"""The two shapes that one engine serves: decode, one token of every sequence, and prefill, a chunk."""

from __future__ import annotations

from trtkv.config import Limits
from trtkv.engine.tensorrt import Profile
from trtkv.graph.decoder import STEP_INPUTS
from trtkv.plan import CachePlan

Range = tuple[int, int, int]


def profiles(plan: CachePlan, limits: Limits) -> list[Profile]:
    """Return the decode and the prefill profile with the range of every dynamic step input."""
    batch, pages = limits.max_batch_size, plan.pages(limits.max_seq_len)
    tokens = limits.max_chunk_tokens
    decode: Range = (1, batch, batch)
    prefill: Range = (1, tokens, tokens)
    return [_profile("decode", decode, batch, pages, plan), _profile("prefill", prefill, batch, pages, plan)]


def _profile(name: str, tokens: Range, batch: int, pages: int, plan: CachePlan) -> Profile:
    sequences: Range = (1, batch, batch)
    ranges: dict[str, Range] = {
        "T": tokens,
        "B": sequences,
        "B1": (2, batch + 1, batch + 1),
        "R": sequences,
        "M": (1, pages, pages),
        "Y": (plan.num_page_groups,) * 3,
    }
    shapes = {}
    for tensor, (_, letters) in STEP_INPUTS.items():
        if not set(letters) <= {"X", "D", "A"}:
            low, usual, high = (tuple(ranges[letter][index] for letter in letters) for index in range(3))
            shapes[tensor] = (low, usual, high)
    return Profile(name, shapes)

"""Column sums, one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def column_sums(query: Tensor, keys: Tensor, scale: float, window: int = 0) -> Tensor:
    """Sum what each of S tokens receives from queries [n, Hq, D], the newest n tokens, over keys [Hk, S, D]: [Hq, S] fp64.

    Query i sees all but the last n - 1 - i tokens; with a window only the last so many queries count.
    """
    count, heads, stored = query.shape[0], query.shape[1], keys.shape[1]
    total = torch.zeros(heads, stored, dtype=torch.float64)
    for i in range(count - (window or count), count):
        seen = stored - count + i + 1
        for head in range(heads):
            own = keys[head // (heads // keys.shape[0]), :seen].double()
            total[head, :seen] += (own @ query[i, head].double() * scale).softmax(0)
    return total

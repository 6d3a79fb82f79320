"""MiniKV-Pyramid: shares of heavy hitters that fall linearly with depth (arXiv 2411.18077, section 3.1).

With a mean share x the first layer gets 2 x - x / d and the last x / d. The paper's text has it the other way round, against its own sentence that
lower layers keep more; this is the released code's direction. Only heavy hitters are shared out, the recent share is the same in all layers.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from trtkv.policies.base import ROUND_OFF, Allocate, Ask, Floats, Ints


class MiniKVPyramid(Allocate):
    """Give low layers more heavy hitters.

    depth: the mean share over the last layer's (d).
    """

    source: ClassVar[str] = "MiniKV, arXiv 2411.18077"
    depth: float = Field(7.0, ge=1.0)

    def budgets(self, ask: Ask, measures: Floats | None) -> Ints:
        """Return the heavy hitters of every layer [L, Hk]."""
        last = ask.free / self.depth
        layers = np.linspace(2 * ask.free - last, last, ask.num_layers) if ask.num_layers > 1 else np.array([ask.free])
        return np.repeat((layers + ROUND_OFF).astype(np.int64)[:, None], ask.num_kv_heads, 1)

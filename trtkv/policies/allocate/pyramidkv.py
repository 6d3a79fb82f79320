"""PyramidKV: budgets that fall linearly with depth (arXiv 2406.02069, section 4.1, as released).

With b tokens a layer beside the window, the last layer gets b / beta, the first 2 b minus that, the ones between in equal integer steps; short
prompts are not shared out unevenly.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from trtkv.policies.base import Allocate, Ask, Floats, Ints


class PyramidKV(Allocate):
    """Give low layers more, high layers less.

    beta: the mean budget over the last layer's.
    """

    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069"
    beta: int = Field(20, ge=1)

    def budgets(self, ask: Ask, measures: Floats | None) -> Ints:
        """Return the tokens beside the window [L, Hk]."""
        mean = int(ask.free)
        if ask.prompt < 2 * mean or ask.num_layers == 1:
            return np.full((ask.num_layers, ask.num_kv_heads), mean, np.int64)
        lowest = mean // self.beta
        highest = 2 * mean - lowest
        if highest >= ask.prompt - ask.fixed:
            highest = ask.prompt - ask.fixed
            lowest = 2 * mean - highest
        step = (highest - lowest) // (ask.num_layers - 1)
        layers = highest - step * np.arange(ask.num_layers)
        return np.repeat(layers[:, None], ask.num_kv_heads, 1)

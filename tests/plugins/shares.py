"""An allocate role in the manner of AdaKV: the heads of a layer share its budget by what their keys are worth, so that all keep different numbers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor

from trtkv.plan import CacheView
from trtkv.policies.base import Allocate, Ask, Evict, Floats, Ints


class Shares(Allocate):
    """Share a layer's budget out by the spread of the heads' keys, a fifth of it in equal parts."""

    takes: ClassVar[frozenset[str]] = frozenset({"equal_heads"})

    @property
    def measured(self) -> bool:
        return True

    def measure(self, view: CacheView, evict: Evict) -> Tensor:
        return view.keys.var(1).mean(1)

    def budgets(self, ask: Ask, measures: Floats | None) -> Ints:
        assert measures is not None
        weight = measures.astype(np.float64) ** 2
        share = 0.2 / ask.num_kv_heads + 0.8 * weight / weight.sum(1, keepdims=True)
        return (share * ask.free * ask.num_kv_heads).astype(np.int64)

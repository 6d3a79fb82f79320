"""KeyDiff: tokens whose keys differ most from the mean key (arXiv 2504.15364).

A token's score is minus the cosine between its key and the mean of all stored keys' directions; attention is not needed. The paper evicts in
blocks while a prompt streams in; here a prompt is evicted from once at its end and decode whenever `interval` tokens are over the budget.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trtkv.lazy import F, Tensor
from trtkv.plan import CacheView
from trtkv.policies.budgeted import Budgeted


class KeyDiff(Budgeted):
    """Keep the most distinctive keys.

    sink and window: first and last tokens that always stay; interval: tokens over the budget that gather in decode before the next eviction.
    """

    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364"
    takes_layers: ClassVar[bool] = True
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)
    interval: int = Field(128, ge=1)

    @property
    def slack(self) -> int:
        """One less than the interval."""
        return self.interval - 1

    def reserved(self, prompt: int) -> tuple[int, int]:
        """Sink and window."""
        return self.sink, self.window

    def scores(self, view: CacheView) -> Tensor:
        """Return minus the cosine to the mean direction [Hk, S]."""
        anchor = F.normalize(view.keys, dim=-1).mean(1, keepdim=True)
        return -F.cosine_similarity(view.keys, anchor, dim=-1)

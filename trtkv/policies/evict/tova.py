"""TOVA: the tokens that the newest query attends to (arXiv 2401.06104, section 3).

All heads of a layer keep the same set, by the mean of the newest query's attention over all query heads. The paper does not protect the newest
token; here it always stays.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trtkv import rules
from trtkv.lazy import Tensor
from trtkv.plan import CacheView
from trtkv.policies.budgeted import Budgeted
from trtkv.ranking import group_mean


class Tova(Budgeted):
    """Keep what the newest query attends to, in every step.

    shared: all KV heads of a layer keep the same tokens, as in the paper; else each selects alone.
    """

    source: ClassVar[str] = "TOVA, arXiv 2401.06104"
    takes_layers: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"attention_newest", "dense_decode"})
    budget: int = Field(512, gt=0)
    shared: bool = True

    @property
    def joins_heads(self) -> bool:
        """Where all heads keep the same tokens."""
        return self.shared

    def reserved(self, prompt: int) -> tuple[int, int]:
        """The newest token."""
        return 0, 1

    def rule(self) -> rules.Exchange:
        """The token that the newest query attends to least is evicted."""
        return rules.Exchange(self.budget, 0, 1, "newest", shared=self.shared)

    def scores(self, view: CacheView) -> Tensor:
        """Return the newest query's attention [Hk, S], mean over the layer or the group."""
        assert view.newest is not None
        heads = len(view.at.lengths)
        if not self.shared:
            return group_mean(view.newest, heads)
        return group_mean(view.newest, view.num_layers).repeat_interleave(heads // view.num_layers, 0)

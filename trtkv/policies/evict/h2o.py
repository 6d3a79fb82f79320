"""H2O: heavy hitters by accumulated attention, and the newest tokens (arXiv 2306.14048, algorithm 1).

A token's score is the attention probability that it received from all queries so far, prompt and generated; scores stay with the tokens that
stay. The released code evicts per query head with repeated keys; here a group's query heads share one set, by the mean of their scores.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trtkv import rules
from trtkv.lazy import Tensor
from trtkv.plan import CacheView
from trtkv.policies.budgeted import Budgeted
from trtkv.ranking import group_mean


class H2O(Budgeted):
    """Keep the most attended tokens and the newest ones, in every step.

    recent: share of the budget for the newest tokens; the paper's 10% + 10% is a budget of a fifth of the prompt; pooling: how the scores of a
    group's query heads become one.
    """

    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    takes_layers: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"attention_mass", "dense_decode"})
    recent: float = Field(0.5, ge=0.0, lt=1.0)
    pooling: Literal["mean", "max"] = "mean"

    def reserved(self, prompt: int) -> tuple[int, int]:
        """The recent share, at least the newest token."""
        return 0, max(1, int(self.budget * self.recent))

    def rule(self) -> rules.Exchange:
        """The least attended token is evicted."""
        return rules.Exchange(self.budget, 0, self.reserved(0)[1], "mass", pool_max=self.pooling == "max")

    def scores(self, view: CacheView) -> Tensor:
        """Return the mean accumulated attention of the group [Hk, S]."""
        assert view.mass is not None
        return group_mean(view.mass, len(view.at.lengths), self.pooling)

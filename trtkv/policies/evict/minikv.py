"""MiniKV: persistent heavy hitters and the end of the prompt, chosen once (arXiv 2411.18077, section 3.1).

The heavy hitters are the prompt tokens that received most attention from all prompt queries; what is chosen at the end of the prompt stays for the
whole generation, and generated tokens are never evicted, so that codes can be written once. The released code selects per query head and repeats
the cache; here a group's query heads share one set, by the mean of their scores.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trtkv.errors import ConfigError
from trtkv.lazy import Tensor
from trtkv.plan import CacheView
from trtkv.policies.base import ROUND_OFF
from trtkv.policies.budgeted import Ranked
from trtkv.ranking import group_mean


class MiniKV(Ranked):
    """Keep heavy hitters and the newest tokens of the prompt.

    heavy and recent: shares of the prompt; budget: so many tokens in all instead, half of them recent; pooling: how the scores of a group's query
    heads become one.
    """

    source: ClassVar[str] = "MiniKV, arXiv 2411.18077"
    takes_layers: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"attention_mass"})
    takes: ClassVar[frozenset[str]] = frozenset()
    prompt_only: ClassVar[bool] = True
    budget: int | None = Field(None, gt=1)
    heavy: float = Field(0.25, ge=0.0, lt=1.0)
    recent: float = Field(0.25, ge=0.0, lt=1.0)
    pooling: Literal["mean", "max"] = "mean"

    def reserved(self, prompt: int) -> tuple[int, int]:
        """The recent share of the prompt."""
        return 0, self.budget // 2 if self.budget else int(prompt * self.recent + ROUND_OFF)

    def free(self, prompt: int) -> float:
        """The heavy share of the prompt."""
        return self.budget - self.budget // 2 if self.budget else prompt * self.heavy

    def scores(self, view: CacheView) -> Tensor:
        """Return the accumulated attention of the prompt's queries, mean over the group [Hk, S]."""
        assert view.mass is not None
        return group_mean(view.mass, len(view.at.lengths), self.pooling)

    def check(self, policy: str) -> None:
        """Raise ConfigError when nothing would stay."""
        if not self.budget and self.heavy + self.recent == 0:
            raise ConfigError(f"evict.heavy and evict.recent of '{policy}' are both 0, so nothing would stay", "Raise one of them.")

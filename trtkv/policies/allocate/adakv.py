"""AdaKV: the heads of a layer share its budget by where its best tokens are (arXiv 2407.11550, section 3, as in kvpress).

The tokens of all KV heads of a layer are ranked together by the evict role's scores, and a head keeps as many as it has among the best, which
together are the layer's budget; or those of all layers are, as KVzip has it (arXiv 2505.23416). Every head keeps its best share of `safeguard` in any
case, which the paper's algorithm has as a mixture with equal budgets instead.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from trtkv.lazy import Tensor, torch
from trtkv.plan import CacheView
from trtkv.policies.base import ROUND_OFF, Allocate, Ask, Evict, Floats, Ints
from trtkv.policies.budgeted import Ranked
from trtkv.ranking import best


class AdaKV(Allocate):
    """Give heads more whose tokens score higher than those of others.

    safeguard: share of its budget, sink and window included, that every head keeps in any case; across: whose heads share a budget, those of a layer
    or those of the whole model.
    """

    source: ClassVar[str] = "AdaKV, arXiv 2407.11550"
    needs: ClassVar[frozenset[str]] = frozenset({"free_tokens", "token_scores"})
    takes: ClassVar[frozenset[str]] = frozenset({"equal_heads"})
    safeguard: float = Field(0.2, ge=0.0, le=1.0)
    across: Literal["layer", "model"] = "layer"

    @property
    def measured(self) -> bool:
        """Always."""
        return True

    def measure(self, view: CacheView, evict: Evict) -> Tensor:
        """Return a layer's shares [Hk], across layers the scores [Hk, S] that they follow from; ones [Hk] where nothing is evicted."""
        assert isinstance(evict, Ranked)
        heads, stored, free = len(view.at.lengths), view.at.stored, evict.free(view.at.prompt)
        assert free is not None, "the role gives free_tokens"
        (sink, window), count = evict.reserved(view.at.prompt), int(free + ROUND_OFF)
        if not 0 < count < stored - sink - window:
            return torch.ones(heads, device=view.keys.device)
        scores = evict.scores(view)[:, sink : stored - window]
        safe = max(0, int(self.safeguard * (count + sink + window) + ROUND_OFF) - sink - window)
        scores = scores.scatter(1, best(scores, safe), torch.inf)
        return scores if self.across == "model" else _shares(scores, count)

    def shares(self, ask: Ask, measures: Tensor) -> Tensor:
        """Return the shares of all layers [L, Hk]."""
        return measures if measures.dim() == 2 else _shares(measures.flatten(0, 1), int(ask.free + ROUND_OFF)).view(measures.shape[:2])

    def budgets(self, ask: Ask, measures: Floats | None) -> Ints:
        """Return the tokens beside sink and window [L, Hk]."""
        assert measures is not None, "AdaKV shares out after the heads have been measured"
        return (measures.astype(np.float64) * int(ask.free + ROUND_OFF) + 0.5).astype(np.int64)


def _shares(scores: Tensor, count: int) -> Tensor:
    """Return how many of the best scores [H, S], `count` a head, each head has, over that count: [H]."""
    heads = len(scores)
    chosen = best(scores.flatten()[None], count * heads)[0] // scores.shape[1]
    return torch.zeros(heads, device=scores.device).index_add_(0, chosen, torch.ones(len(chosen), device=scores.device)) / count

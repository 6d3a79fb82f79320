"""ARKV's ratio of original to quantized tokens, from three statistics of a layer's attention (Lei and Ilager, eq. 2 to 8).

The attention of the prompt's last W queries to the tokens before them gives entropy, variance and kurtosis; a layer's share of full precision is its
score over the highest of all layers. `statistics = "paper"` takes them of the normalized mass per token as printed; "code" as released: of the raw
slice, variance and kurtosis along the queries and summed, which gives other shares.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from trtkv.lazy import Tensor, torch
from trtkv.plan import CacheView
from trtkv.policies.base import ROUND_OFF, Allocate, Ask, Evict, Floats, Ints
from trtkv.policies.observed import window_attention, window_sums


class ArkvRatio(Allocate):
    """Give layers whose attention is spread and peaked more full precision.

    window: queries that are observed; entropy, variance, kurtosis: the temperatures tau 1 to 3; statistics: as the paper
    prints them, or as its code computes them.
    """

    source: ClassVar[str] = "ARKV, Lei and Ilager"
    needs: ClassVar[frozenset[str]] = frozenset({"free_tokens", "precision_classes", "last_queries"})
    splits: ClassVar[Literal["tokens", "precise"]] = "precise"
    window: int = Field(32, ge=1)
    entropy: float = Field(7.774380648611771, gt=0.0)
    variance: float = Field(5.407015096778621, gt=0.0)
    kurtosis: float = Field(5.527702582901318, gt=0.0)
    statistics: Literal["paper", "code"] = "paper"

    @property
    def measured(self) -> bool:
        """Always."""
        return True

    @property
    def observe_window(self) -> int:
        """The window."""
        return self.window

    def measure(self, view: CacheView, evict: Evict) -> Tensor:
        """Return the layer's score q (eq. 6), the same for all its heads; zero for prompts no longer than the window."""
        heads, past = len(view.at.lengths), view.at.stored - self.window
        if past <= 0:
            return torch.zeros(heads, device=view.positions.device)
        if self.statistics == "paper":
            h, v, k = _paper_statistics(window_sums(view, self.window)[:, :past])
        else:
            h, v, k = _code_statistics(window_attention(view, self.window)[:, :, :past])
        score = h.clamp(min=0) ** (1 / self.entropy) * v ** (1 / self.variance) * k ** (1 / self.kurtosis)
        return score.expand(heads)

    def budgets(self, ask: Ask, measures: Floats | None) -> Ints:
        """Return the tokens in full precision beside the window [L, Hk] (eq. 8 and algorithm 1)."""
        assert measures is not None, "ARKV shares out after the layers have been measured"
        highest = measures.max()
        ratio = measures / highest if highest > 0 else np.ones_like(measures)
        return (ratio.astype(np.float64) * ask.free + 0.5 - ROUND_OFF).astype(np.int64)


def _paper_statistics(received: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, variance and kurtosis over tokens of the normalized mass of attention that they received [Hq, K]."""
    mass = received.double().sum(0)
    share = mass / mass.sum().clamp(min=1e-300)
    centred = share - share.mean()
    variance = centred.square().mean()
    kurtosis = (centred**4).mean() / variance.square() if variance > 0 else variance
    return -torch.xlogy(share, share).sum(), variance, kurtosis


def _code_statistics(seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums that the released code takes instead, of attention [Hq, W, K]."""
    entropy = -(seen * (seen + 1e-10).log()).sum()
    variance = seen.var(1, correction=min(1, seen.shape[1] - 1)).sum()
    centred = seen - seen.mean(1, keepdim=True)
    second = centred.square().mean(1).clamp(min=1e-8)
    return entropy, variance, ((centred**4).mean(1) / second.square()).sum()

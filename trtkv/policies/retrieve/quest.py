"""Quest: pages by the bounds of their keys (arXiv 2406.10774, algorithm 1).

A page's score is the highest product that the query has with any key inside the page's channel-wise bounds. The paper selects per query head of a
multi-head model; here a group agrees by the maximum of its scores, as FreeKV's evaluation does, or not at all (`pooling = "none"`). An open page is
always read.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trtkv import rules
from trtkv.config import ModelConfig
from trtkv.lazy import Tensor
from trtkv.plan import BufferSpec, Pooling
from trtkv.policies.bounds import box_score, page_boxes
from trtkv.policies.paged import PagedRetrieve


class Quest(PagedRetrieve):
    """Read the pages whose bounds allow the highest scores."""

    source: ClassVar[str] = "Quest, arXiv 2406.10774"
    page: int = Field(16, ge=1)
    dense_layers: int = Field(2, ge=0)
    pooling: Pooling = "max"

    def rule(self) -> rules.Box:
        """Extremes."""
        return rules.Box()

    def summarize(self, keys: Tensor) -> dict[str, Tensor]:
        """Bound the keys [Hk, S, D] of every page: low and high [Hk, M, D] in the keys' dtype."""
        low, high = page_boxes(keys, self.page)
        return {"low": low, "high": high}

    def score(self, query: Tensor, summary: dict[str, Tensor]) -> Tensor:
        """Score pages by the highest product inside their bounds [Hq, M]."""
        return box_score(query, summary["low"], summary["high"])

    def buffers(self, model: ModelConfig, page_size: int, layers: tuple[int, ...]) -> tuple[BufferSpec, ...]:
        """The two bounds of every page."""
        shape = ("P", model.num_kv_heads, page_size // self.page, 2, model.head_dim)
        return (BufferSpec("page_bounds", shape, "P Hk N/p 2 D", model.dtype, layers, tokens_per_entry=self.page),)

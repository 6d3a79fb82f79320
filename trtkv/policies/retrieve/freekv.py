"""FreeKV: pages chosen with the previous step's query, corrected where the query has moved (arXiv 2505.13109, section 4).

Pages are bounded as Quest's; a group agrees by the mean of its softmaxed scores. Step i reads what the query of step i - 1 selects, so that pages can
travel while the model computes; a KV head whose queries' mean cosine to the previous step falls below tau selects again with its own query. As the
paper says min and max; the released system stores "cuboid-mean" digests and pools raw scores, the accuracy code leaves the scores unscaled:
`digest` and `pooling` offer the first two, scores are softmaxed with attention's scale in fp32 throughout. Pages count from token 0, sink and window
are part of the budget, the first decode step uses its own query, and the previous query scores the current summaries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from trtkv import rules
from trtkv.config import ModelConfig
from trtkv.lazy import Tensor, torch
from trtkv.plan import BufferSpec, SelectPlan
from trtkv.policies.bounds import box_score, mean_boxes, page_boxes
from trtkv.policies.paged import PagedRetrieve


class FreeKV(PagedRetrieve):
    """Read the pages that the previous query chose, corrected per KV head.

    tau: mean cosine below which a head selects with the current query (0: hardly ever, 1: always); digest: a page's bounds, its extremes or
    "cuboid-mean".
    """

    source: ClassVar[str] = "FreeKV, arXiv 2505.13109"
    budget: int = Field(2048, gt=0)
    sink: int = Field(128, ge=0)
    window: int = Field(128, ge=1)
    dense_layers: int = Field(1, ge=0)
    tau: float = Field(0.8, ge=-1.0, le=1.0)
    digest: Literal["minmax", "cuboid-mean"] = "minmax"

    def rule(self) -> rules.Box:
        """The digest."""
        return rules.Box(mean=self.digest == "cuboid-mean")

    def select_plan(self) -> SelectPlan:
        """Lower tau with what every selection has."""
        return replace(super().select_plan(), tau=self.tau)

    def summarize(self, keys: Tensor) -> dict[str, Tensor]:
        """Bound the keys [Hk, S, D] of every page: low and high [Hk, M, D] in the keys' dtype."""
        low, high = (page_boxes if self.digest == "minmax" else mean_boxes)(keys, self.page)
        return {"low": low.to(keys.dtype), "high": high.to(keys.dtype)}

    def score(self, query: Tensor, summary: dict[str, Tensor]) -> Tensor:
        """Score pages by the highest product inside their bounds [Hq, M]."""
        return box_score(query, summary["low"], summary["high"])

    def corrected(self, query: Tensor, previous: Tensor, num_kv_heads: int) -> Tensor:
        """Return the KV heads [Hk] bool whose mean cosine between query and previous query [Hq, D] is below tau (fp32)."""
        cosine = torch.cosine_similarity(query.float(), previous.float(), dim=-1)
        return torch.unflatten(cosine, 0, (num_kv_heads, -1)).mean(1) < self.tau

    def buffers(self, model: ModelConfig, page_size: int, layers: tuple[int, ...]) -> tuple[BufferSpec, ...]:
        """The two bounds of every page, and the previous step's query."""
        bounds = ("P", model.num_kv_heads, page_size // self.page, 2, model.head_dim)
        return (
            BufferSpec("page_bounds", bounds, "P Hk N/p 2 D", model.dtype, layers, tokens_per_entry=self.page),
            BufferSpec("previous_query", ("Z", model.num_q_heads, model.head_dim), "Z Hq D", model.dtype, layers),
        )

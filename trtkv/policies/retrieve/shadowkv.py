"""ShadowKV's selection: chunks by the mean of their keys, with outlier chunks always read (arXiv 2410.21465, algorithm 2).

A chunk's landmark is the mean of its rotated keys; the chunks with a key least like their landmark (by the cosine to it) are outliers. A group
agrees by the maximum of its softmaxed scores. Here sink, window and outliers are part of the budget, and outliers are chosen again as chunks close,
so that long generation is covered (the paper fixes them at the end of the prompt). The paper also rebuilds keys from a rank-160 factorization of
the keys before rotation, which the cache of this project does not hold: keys are read as they are stored.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trtkv import rules
from trtkv.config import ModelConfig
from trtkv.lazy import Tensor, torch
from trtkv.plan import BufferSpec, Pooling
from trtkv.policies.base import Retrieve
from trtkv.ranking import best


class ShadowKV(Retrieve):
    """Read the chunks whose mean key scores best, and the ones that a mean describes worst.

    chunk: tokens that are read together; outliers: chunks that every query reads.
    """

    source: ClassVar[str] = "ShadowKV, arXiv 2410.21465"
    gives: ClassVar[frozenset[str]] = frozenset({"pages_chosen"})
    budget: int = Field(2048, gt=0)
    window: int = Field(32, ge=1)
    pooling: Pooling = "softmax-max"
    chunk: int = Field(8, ge=1)
    outliers: int = Field(48, ge=0)

    @property
    def unit(self) -> int:
        """The chunk."""
        return self.chunk

    @property
    def summary_group(self) -> int:
        """The chunk."""
        return self.chunk

    @property
    def forced_tokens(self) -> int:
        """The tokens of the outlier chunks."""
        return self.outliers * self.chunk

    def rule(self) -> rules.Mean:
        """Landmarks and likeness."""
        return rules.Mean()

    def summarize(self, keys: Tensor) -> dict[str, Tensor]:
        """Average the keys [Hk, S, D] of every chunk: landmark [Hk, U, D] in their dtype; likeness [Hk, U] fp32, a key's lowest cosine to it."""
        chunks = torch.unflatten(keys.float(), 1, (-1, self.chunk))
        landmark = chunks.mean(2)
        likeness = torch.cosine_similarity(chunks, landmark[:, :, None], dim=-1).amin(2)
        return {"landmark": landmark.to(keys.dtype), "likeness": likeness}

    def score(self, query: Tensor, summary: dict[str, Tensor]) -> Tensor:
        """Score chunks by the query's product with their landmarks [Hq, U]."""
        landmark = summary["landmark"].float()
        return (torch.unflatten(query.float(), 0, (landmark.shape[0], -1)) @ landmark.transpose(1, 2)).flatten(0, 1)

    def forced(self, summary: dict[str, Tensor]) -> Tensor:
        """Return the outlier chunks [Hk, U] bool."""
        likeness = summary["likeness"]
        chosen = best(-likeness, self.outliers)
        return torch.zeros_like(likeness, dtype=torch.bool).scatter(1, chosen, True)

    def buffers(self, model: ModelConfig, page_size: int, layers: tuple[int, ...]) -> tuple[BufferSpec, ...]:
        """The landmark of every chunk and how well it describes it."""
        row = ("P", model.num_kv_heads, page_size // self.chunk)
        return (
            BufferSpec("landmarks", (*row, model.head_dim), "P Hk N/c D", model.dtype, layers, tokens_per_entry=self.chunk),
            BufferSpec("likeness", row, "P Hk N/c", "float32", layers, tokens_per_entry=self.chunk),
        )

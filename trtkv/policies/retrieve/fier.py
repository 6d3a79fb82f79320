"""FIER: fine-grained retrieval with one-bit keys (arXiv 2508.08256, section 4, algorithm 1).

Every channel of every group of consecutive keys is reduced to one bit a token between the group's two extremes; a query scores all tokens
from the bits and attends to the best with full-precision keys and values. The extremes are stored instead of scale and zero point, because
they are exact in the key's dtype. The paper selects per query head of a multi-head model and leaves grouped queries open: here the
query heads of a group agree by the mean of their softmaxed scores (`pooling`). The paper does not say what happens to an unfinished group: here
its tokens are always attended and closed groups are never quantized again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from trtkv import rules
from trtkv.config import ModelConfig
from trtkv.plan import BufferSpec
from trtkv.policies.base import Retrieve

if TYPE_CHECKING:
    from torch import Tensor


class Fier(Retrieve):
    """Read the tokens whose one-bit keys score best.

    group: tokens that share their extremes, per channel.
    """

    source: ClassVar[str] = "FIER, arXiv 2508.08256"
    group: Literal[32, 64, 128, 256] = 32
    dense_layers: int = Field(2, ge=0)

    @property
    def summary_group(self) -> int:
        """Tokens that share their extremes."""
        return self.group

    def rule(self) -> rules.OneBit:
        """One-bit keys."""
        return rules.OneBit()

    def summarize(self, keys: Tensor) -> dict[str, Tensor]:
        """Quantize keys [Hk, S, D] to bits bool [Hk, S, D] and the groups' low and high [Hk, S / group, D] in the keys' dtype.

        A bit is set where the key is at or above the middle of its group's range, compared in fp32.
        """
        heads, stored, dim = keys.shape
        groups = keys.reshape(heads, stored // self.group, self.group, dim)
        low, high = groups.amin(2), groups.amax(2)
        middle = (low.float() + high.float()) / 2
        bits = groups.float() >= middle[:, :, None]
        return {"bits": bits.reshape(heads, stored, dim), "low": low, "high": high}

    def score(self, query: Tensor, summary: dict[str, Tensor]) -> Tensor:
        """Score query [Hq, D] against the keys that the bits represent: [Hq, S] fp32 (eq. 6, without softmax or scale)."""
        low = summary["low"].float().repeat_interleave(self.group, 1)
        high = summary["high"].float().repeat_interleave(self.group, 1)
        keys = low.where(~summary["bits"], high)
        heads = keys.shape[0]
        grouped = query.float().reshape(heads, -1, query.shape[-1])
        return (grouped @ keys.transpose(1, 2)).reshape(query.shape[0], -1)

    def buffers(self, model: ModelConfig, page_size: int, layers: tuple[int, ...]) -> tuple[BufferSpec, ...]:
        """Packed bits, eight channels a byte, and the two extremes of every group."""
        heads, dim = model.num_kv_heads, model.head_dim
        return (
            BufferSpec("fier_bits", ("P", heads, page_size, dim // 8), "P Hk N D/8", "uint8", layers),
            BufferSpec("fier_range", ("P", heads, page_size // self.group, 2, dim), "P Hk N/g 2 D", model.dtype, layers, tokens_per_entry=self.group),
        )

"""Q-Hitter's storage: four bits a number with one scale and one integer zero point a token and head (MLSys 2024).

Every token is encoded after the attention of the step that appends it. The range is widened to hold zero (see `packing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from trtkv import rules
from trtkv.config import ModelConfig
from trtkv.lazy import Tensor
from trtkv.plan import BufferSpec, Occupancy
from trtkv.policies.base import Part, Quantize
from trtkv.policies.packing import decode_integer_zero, encode_integer_zero, pack, unpack


class QHitterBits(Quantize):
    """Round each token of each head over its channels.

    bits: of a code.
    """

    source: ClassVar[str] = "Q-Hitter, MLSys 2024"
    token_granular: ClassVar[bool] = True
    bits: Literal[2, 4, 8] = 4

    def rule(self) -> rules.PerToken:
        """A scale and a zero point a token."""
        return rules.PerToken(self.bits)

    def flush(self, at: Occupancy, encoded: tuple[int, int]) -> tuple[int, int]:
        """Encode everything once the prompt is complete."""
        return (at.stored, at.stored) if at.complete else encoded

    def encode(self, x: Tensor, part: Part) -> dict[str, Tensor]:
        """Encode keys or values [Hk, S, D] to codes [Hk, S, D bits / 8] and metadata [Hk, S]."""
        codes, scale, zero = encode_integer_zero(x, self.bits)
        return {"codes": pack(codes, self.bits), "scale": scale, "zero": zero}

    def decode(self, codes: Mapping[str, Tensor], part: Part) -> Tensor:
        """Decode keys or values to [Hk, S, D] fp32."""
        return decode_integer_zero(unpack(codes["codes"], self.bits), codes["scale"], codes["zero"])

    def buffers(self, model: ModelConfig, page_size: int, layers: tuple[int, ...]) -> tuple[BufferSpec, ...]:
        """Codes, scale and zero point of keys and values, in pages of encoded tokens."""
        row = ("P", model.num_kv_heads, page_size)
        codes = (*row, model.head_dim * self.bits // 8)
        return tuple(
            spec
            for part in ("key", "value")
            for spec in (
                BufferSpec(f"{part}_codes", codes, "P Hk N D*bits/8", "uint8", layers, pool="encoded"),
                BufferSpec(f"{part}_scale", row, "P Hk N", model.dtype, layers, pool="encoded"),
                BufferSpec(f"{part}_zero", row, "P Hk N", model.dtype, layers, pool="encoded"),
            )
        )

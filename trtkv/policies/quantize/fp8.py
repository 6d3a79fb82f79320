"""ARKV's middle state: eight-bit floats (e4m3) with one scale a token and head (Lei and Ilager, section IV-F).

The paper says "per-token scale"; the released code shares a scale between all heads of a slot, whose tokens differ, so here it is one a token and
head. Encoded are the tokens that the evict role marks; one that is promoted again gets the numbers that its code decodes to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trtkv import rules
from trtkv.config import ModelConfig
from trtkv.lazy import Tensor, torch
from trtkv.plan import BufferSpec
from trtkv.policies.base import Part, Quantize

LARGEST = 448.0  # the greatest number that e4m3 holds


class Fp8(Quantize):
    """Store the tokens that the evict role demotes in eight-bit floats."""

    source: ClassVar[str] = "ARKV, Lei and Ilager"
    needs: ClassVar[frozenset[str]] = frozenset({"precision_classes"})
    token_granular: ClassVar[bool] = True
    demoted_only: ClassVar[bool] = True
    bytewise: ClassVar[bool] = True

    def rule(self) -> rules.Encoding:
        """Eight-bit floats."""
        return rules.Float8()

    def encode(self, x: Tensor, part: Part) -> dict[str, Tensor]:
        """Encode keys or values [Hk, S, D] to e4m3 bytes uint8 [Hk, S, D] and a scale [Hk, S] in the dtype of x."""
        scale = (x.abs().amax(-1).float() / LARGEST).to(x.dtype)
        scale = scale.where(scale > 0, torch.ones_like(scale))
        codes = (x.float() / scale.float()[..., None]).clamp(-LARGEST, LARGEST)
        return {"codes": codes.to(torch.float8_e4m3fn).view(torch.uint8), "scale": scale}

    def decode(self, codes: Mapping[str, Tensor], part: Part) -> Tensor:
        """Decode keys or values to [Hk, S, D] fp32."""
        return codes["codes"].view(torch.float8_e4m3fn).float() * codes["scale"].float()[..., None]

    def buffers(self, model: ModelConfig, page_size: int, layers: tuple[int, ...]) -> tuple[BufferSpec, ...]:
        """Codes and scale of keys and values, in pages of encoded tokens."""
        row = ("P", model.num_kv_heads, page_size)
        return tuple(
            spec
            for part in ("key", "value")
            for spec in (
                BufferSpec(f"{part}_codes", (*row, model.head_dim), "P Hk N D", "uint8", layers, pool="encoded"),
                BufferSpec(f"{part}_scale", row, "P Hk N", model.dtype, layers, pool="encoded"),
            )
        )

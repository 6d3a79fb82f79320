"""A cache in eight-bit integers with one scale a token and head: the bytes of `float8`, and codes that round the largest channels finer.

What attends errs most where a channel is large. e4m3 rounds such a channel to a sixteenth of itself, an integer to 1/254 of the token's largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trtkv import rules
from trtkv.hadamard import rotate
from trtkv.lazy import Tensor, torch
from trtkv.policies.base import Part
from trtkv.policies.quantize.float8 import Float8

LARGEST = 127
ZERO = 128  # the code of zero: codes are not negative


class Int8(Float8):
    """Store every token in eight-bit integers.

    rotated: whether the channels of every head are rotated before, as in `rotated`, which spreads a large channel over all.
    """

    source: ClassVar[str] = "LLM.int8(), arXiv 2208.07339"
    rotated: bool = False

    def rule(self) -> rules.Encoding:
        """Eight-bit integers."""
        return rules.Int8(self.rotated)

    def encode(self, x: Tensor, part: Part) -> dict[str, Tensor]:
        """Encode keys or values [Hk, S, D] to codes uint8 [Hk, S, D] and a scale [Hk, S] in the dtype of x."""
        x = rotate(x).to(x.dtype) if self.rotated else x
        scale = (x.abs().amax(-1).float() / LARGEST).to(x.dtype)
        scale = scale.where(scale > 0, torch.ones_like(scale))
        codes = (x.float() / scale.float()[..., None]).clamp(-LARGEST, LARGEST).round() + ZERO
        return {"codes": codes.to(torch.uint8), "scale": scale}

    def decode(self, codes: Mapping[str, Tensor], part: Part) -> Tensor:
        """Decode keys or values to [Hk, S, D] fp32."""
        x = (codes["codes"].float() - ZERO) * codes["scale"].float()[..., None]
        return rotate(x) if self.rotated else x

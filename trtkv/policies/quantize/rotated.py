"""Keys and values rotated before they are rounded, keys to four bits and values to two, in KIVI's groups and schedule.

A Hadamard rotation of a head's channels spreads outliers over all of them, as in TurboQuant (arXiv 2504.19874) and KVarN (vLLM pull request 46812),
which has four bits for keys and two for values. Here the rotation is fixed where TurboQuant's is random, groups of tokens share the scale of a
key's channel, and there is neither TurboQuant's codebook nor KVarN's normalisation by variances. The rotation follows RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from trtkv.lazy import Tensor, torch
from trtkv.policies.base import Part
from trtkv.policies.quantize.kivi import Kivi


class Rotated(Kivi):
    """Rotate the channels of every head, then round keys to four bits and values to two.

    value_bits: of a value's code.
    """

    source: ClassVar[str] = "TurboQuant, arXiv 2504.19874"
    bits: Literal[2, 4] = 4
    value_bits: Literal[2, 4] = 2
    group: int = Field(64, ge=4)
    residual: int = Field(64, ge=4)

    def bits_of(self, part: Part) -> int:
        """Keys have `bits`."""
        return self.bits if part == "keys" else self.value_bits

    def encode(self, x: Tensor, part: Part) -> dict[str, Tensor]:
        """Encode keys or values [Hk, S, D] after the rotation."""
        most = torch.finfo(x.dtype).max
        return super().encode((x.float() @ hadamard(x)).clamp(-most, most).to(x.dtype), part)

    def decode(self, codes: Mapping[str, Tensor], part: Part) -> Tensor:
        """Decode keys or values to [Hk, S, D] fp32, rotated back."""
        rotated = super().decode(codes, part)
        return rotated @ hadamard(rotated)


def hadamard(like: Tensor) -> Tensor:
    """Return the rotation [D, D] fp32 of the last axis of a tensor, its own inverse: blocks of the largest power of two that divides D."""
    dim = like.shape[-1]
    size, block = dim & -dim, torch.ones(1, 1, device=like.device)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    rotation: Tensor = torch.block_diag(*[block * size**-0.5] * (dim // size))
    return rotation

"""Keys and values rotated before they are rounded to four bits, in KIVI's groups and schedule, all but the first tokens.

A Hadamard rotation of a head's channels spreads outliers over all of them, as in TurboQuant (arXiv 2504.19874) and KVarN (vLLM pull request 46812),
which gives values two bits (`value_bits`). Here the rotation is fixed where TurboQuant's is random, groups of tokens share the scale of a
key's channel, and there is neither TurboQuant's codebook nor KVarN's normalisation by variances. The rotation follows RoPE. The first tokens, whose
keys are unlike all others and would widen their group's steps, stay in full precision; groups begin after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from trtkv.lazy import Tensor, torch
from trtkv.plan import Occupancy
from trtkv.policies.base import Part
from trtkv.policies.quantize.kivi import Kivi


class Rotated(Kivi):
    """Rotate the channels of every head, then round keys and values; the first tokens stay exact.

    value_bits: of a value's code; sink: first tokens in full precision.
    """

    source: ClassVar[str] = "TurboQuant, arXiv 2504.19874"
    bits: Literal[2, 4] = 4
    value_bits: Literal[2, 4] = 4
    group: int = Field(64, ge=4)
    residual: int = Field(64, ge=4)
    sink: int = Field(4, ge=0)

    @property
    def exact_first(self) -> int:
        """The sink."""
        return self.sink

    def flush(self, at: Occupancy, encoded: tuple[int, int]) -> tuple[int, int]:
        """Encode what KIVI would if the sink were not there."""
        lengths = tuple(max(0, length - self.sink) for length in at.lengths)
        return super().flush(replace(at, lengths=lengths, settled=max(0, at.settled - self.sink)), encoded)

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

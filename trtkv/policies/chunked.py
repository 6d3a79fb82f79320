"""What encodings share that may encode a prompt while it is read."""

from __future__ import annotations

from dataclasses import replace

from trtkv.plan import Occupancy, QuantizePlan
from trtkv.policies.base import Quantize


class Chunked(Quantize):
    """Encode a prompt when it is complete, or after each of its chunks.

    by_chunk: encode after each chunk, so that later chunks attend to codes and no prompt is stored in full precision.
    """

    by_chunk: bool = False

    def waits(self, at: Occupancy) -> bool:
        """Return whether nothing is encoded yet."""
        return not (at.complete or self.by_chunk)

    def plan(self) -> QuantizePlan:
        """Lower the role to its schedule."""
        return replace(super().plan(), by_chunk=self.by_chunk)

"""What a decode step asks for before the products that read it run.

A short kernel that waits for others, such as a selection or a norm, leaves the memory idle; weights that are read next can come into the second-level
cache meanwhile. A product in front of a selection asks for what is read behind the attention, attention over everything asks with its last keys and
values, a product asks for the first rows of the next one, and a norm or activation alone for those of the product behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Matrices = list[tuple[Tensor, bool]]  # what products read, in their order, and whether it is gate and up stacked
# Bytes asked for in front of a selection, at the end of attention over everything, at the end of a product, and by a norm or an activation; an H200
# has 50 MB of second-level cache.
SELECTING_BYTES, ATTENDING_BYTES, CHAINING_BYTES, SHORT_BYTES = 32 << 20, 24 << 20, 4 << 20, 16 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """Contiguous tensors that a product and what stands around it ask for.

    later is asked for by a product that is a kernel of the package; where the library multiplies, the norm in front asks for own, the activation
    behind it for next.
    """

    later: tuple[Tensor, ...] = ()
    own: tuple[Tensor, ...] = ()
    next: tuple[Tensor, ...] = ()


NOTHING = Asked()


def spans(matrices: Matrices, room_bytes: int) -> tuple[Tensor, ...]:
    """Cut from matrices [N, K], in the order in which they are read, what fits the room: whole rows; of gate and up as many of each."""
    cuts: list[Tensor] = []
    for matrix, gated in matrices:
        width = len(matrix) // 2 if gated else len(matrix)
        rows = min(width, room_bytes // (matrix[0].nbytes * (1 + gated)))
        parts = [matrix[:rows], matrix[width : width + rows]] if gated else [matrix[:rows]]
        cuts += [part for part in parts if rows]
        room_bytes -= sum(part.nbytes for part in parts)
    return tuple(cuts)

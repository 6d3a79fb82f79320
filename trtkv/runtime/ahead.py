"""Which weights a decode step asks for before their products run: what a layer reads behind its attention.

A short kernel that waits for others, such as a selection, leaves the memory idle; what later products read can come into the second-level cache
meanwhile. A product in front of a selection asks for it, attention over everything asks with its last keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trtkv.runtime.program import Node
from trtkv.runtime.weights import Weight

# Bytes asked for in front of a selection, and at the end of attention over everything: of 50 MB of second-level cache on an H200.
SELECTING_BYTES, ATTENDING_BYTES = 32 << 20, 24 << 20
_PRODUCTS = {"Gemm": 1, "Product": 3}  # where a product's matrix stands among its inputs


def behind_attention(nodes: Sequence[Node], weights: Mapping[str, object]) -> dict[int, list[tuple[Tensor, bool]]]:
    """Return by layer the matrices of the two products behind its attention, with whether they are gate and up stacked; only of GPUs."""
    found: dict[int, list[tuple[Tensor, bool]]] = {}
    for index, node in enumerate(nodes):
        if node.kind != "KvAttend":
            continue
        products = [one for one in nodes[index + 1 : index + 5] if one.kind in _PRODUCTS][:2]
        own = [(weights[one.inputs[_PRODUCTS[one.kind]]], bool(one.attributes.get("gated"))) for one in products]
        found[node.attributes["call"].layer] = [
            (weight.whole, gated) for weight, gated in own if isinstance(weight, Weight) and len(weight.parts) == 1 and weight.whole.is_cuda
        ]
    return found


def spans(matrices: Sequence[tuple[Tensor, bool]], room_bytes: int) -> list[Tensor]:
    """Cut from matrices [N, K], in the order in which they are read, what fits the room: whole rows; of gate and up as many of each."""
    cuts: list[Tensor] = []
    for matrix, gated in matrices:
        width = len(matrix) // 2 if gated else len(matrix)
        rows = min(width, room_bytes // (matrix[0].nbytes * (1 + gated)))
        parts = [matrix[:rows], matrix[width : width + rows]] if gated else [matrix[:rows]]
        cuts += [part for part in parts if rows]
        room_bytes -= sum(part.nbytes for part in parts)
    return cuts

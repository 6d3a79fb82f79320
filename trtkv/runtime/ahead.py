"""Which weights a decode step asks for before their products run: what a layer reads behind its attention.

A short kernel that waits for others, such as a selection, leaves the memory idle; what later products read can come into the second-level cache
meanwhile. A product in front of a selection asks for it, attention over everything asks with its last keys and values, and a product asks for the
first rows of the next one, which cannot begin before all of this one have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from trtkv.runtime.program import Node
from trtkv.runtime.weights import Weight

# Bytes asked for in front of a selection, at the end of attention over everything, and at the end of a product: of 50 MB of second-level cache.
SELECTING_BYTES, ATTENDING_BYTES, CHAINING_BYTES = 32 << 20, 24 << 20, 4 << 20
_PRODUCTS = {"Gemm": 1, "Product": 3}  # where a product's matrix stands among its inputs


Matrices = list[tuple[Tensor, bool]]  # what products read, in their order, and whether it is gate and up stacked


def matrix_of(node: Node, weights: Mapping[str, object]) -> Matrices:
    """Return what a product reads; nothing for other nodes, and where a weight does not lie on a GPU as one tensor."""
    weight = weights[node.inputs[_PRODUCTS[node.kind]]] if node.kind in _PRODUCTS else None
    one = isinstance(weight, Weight) and len(weight.parts) == 1 and weight.whole.is_cuda
    return [(weight.whole, bool(node.attributes.get("gated")))] if one else []  # type: ignore[attr-defined, union-attr]


def behind_attention(nodes: Sequence[Node], weights: Mapping[str, object]) -> dict[int, Matrices]:
    """Return by layer what the two products behind its attention read."""
    found: dict[int, Matrices] = {}
    for index, node in enumerate(nodes):
        if node.kind == "KvAttend":
            found[node.attributes["call"].layer] = [one for near in nodes[index + 1 : index + 5] for one in matrix_of(near, weights)][:2]
    return found


def behind_products(nodes: Sequence[Node], weights: Mapping[str, object]) -> dict[str, Matrices]:
    """Return by the output of a product what the next node reads, where that is a product too."""
    pairs = ((node, matrix_of(after, weights)) for node, after in itertools.pairwise(nodes) if node.kind in _PRODUCTS)
    return {node.output: matrices for node, matrices in pairs if matrices}


def spans(matrices: Matrices, room_bytes: int) -> list[Tensor]:
    """Cut from matrices [N, K], in the order in which they are read, what fits the room: whole rows; of gate and up as many of each."""
    cuts: list[Tensor] = []
    for matrix, gated in matrices:
        width = len(matrix) // 2 if gated else len(matrix)
        rows = min(width, room_bytes // (matrix[0].nbytes * (1 + gated)))
        parts = [matrix[:rows], matrix[width : width + rows]] if gated else [matrix[:rows]]
        cuts += [part for part in parts if rows]
        room_bytes -= sum(part.nbytes for part in parts)
    return cuts

"""Which product of a graph asks for which weights (see `trtkv.plugins.linear.ahead`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from trtkv.plugins.linear import ahead
from trtkv.plugins.linear.ahead import Asked, Matrices, spans
from trtkv.runtime.program import Node
from trtkv.runtime.weights import Weight

_PRODUCTS = {"Gemm": 1, "Product": 3}  # where a product's matrix stands among its inputs


def asked_by_products(nodes: Sequence[Node], weights: Mapping[str, object]) -> dict[str, Asked]:
    """Return what every product asks for, by its output."""
    found = {}
    for node, after in itertools.pairwise([*nodes, None]):
        if node is not None and node.kind in _PRODUCTS:
            own, behind = _matrix(node, weights), _matrix(after, weights)
            found[node.output] = Asked(spans(behind, ahead.CHAINING_BYTES), spans(own, ahead.SHORT_BYTES), spans(behind, ahead.SHORT_BYTES))
    return found


def asked_in_front_of_selections(nodes: Sequence[Node], weights: Mapping[str, object], selects: Sequence[object | None]) -> dict[str, Asked]:
    """Return what products in front of layers that select ask for instead where a selection is made; selects holds None for other layers."""
    found, asked, behind = {}, asked_by_products(nodes, weights), _behind_attention(nodes, weights)
    for node in nodes:
        layer = node.attributes["call"].layer if node.kind == "KvAppend" else -1
        if layer in behind and node.inputs[0] in asked and selects[layer] is not None:
            found[node.inputs[0]] = replace(asked[node.inputs[0]], later=spans(behind[layer], ahead.SELECTING_BYTES))
    return found


def asked_by_attention(nodes: Sequence[Node], weights: Mapping[str, object]) -> dict[int, Tensor]:
    """Return by layer what attention over everything asks for: the matrix that is read next."""
    cuts = {layer: spans(matrices[:1], ahead.ATTENDING_BYTES) for layer, matrices in _behind_attention(nodes, weights).items()}
    return {layer: cut[0] for layer, cut in cuts.items() if cut}


def _behind_attention(nodes: Sequence[Node], weights: Mapping[str, object]) -> dict[int, Matrices]:
    """Return by layer what the two products behind its attention read."""
    places = [(index, node.attributes["call"].layer) for index, node in enumerate(nodes) if node.kind == "KvAttend"]
    return {layer: [one for near in nodes[index + 1 : index + 5] for one in _matrix(near, weights)][:2] for index, layer in places}


def _matrix(node: Node | None, weights: Mapping[str, object]) -> Matrices:
    """Return what a product reads; nothing for other nodes, and where a weight does not lie on a GPU as one tensor."""
    weight = weights.get(node.inputs[_PRODUCTS[node.kind]]) if node is not None and node.kind in _PRODUCTS else None
    if node is None or not isinstance(weight, Weight) or len(weight.parts) > 1 or not weight.whole.is_cuda:
        return []
    return [(weight.whole, bool(node.attributes.get("gated")))]

"""A layer's reference cache as plain data and tensors by name, and the same again elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plugins.cache.reference.layer import LayerCache
from plugins.cache.reference.store import PARTS

FACTS = ("encoded", "settled", "granted", "seen", "new", "prompt", "summarized")


def tensors(layer: LayerCache) -> dict[str, Tensor]:
    """Return all that a layer stores of a sequence between two steps, contiguous, by names that say where."""
    found = {name: one for name, one in (("queries", layer.queries), ("previous", layer.previous)) if one is not None}
    found |= {f"summary.{name}": one for name, one in layer.summary.items()}
    for head, store in enumerate(layer.heads):
        found |= {f"{head}.positions": store.positions, f"{head}.mass": store.mass, f"{head}.newest": store.newest}
        found |= {f"{head}.state.{name}": one for name, one in store.state.items()}
        for kind in PARTS:
            part = store.parts[kind]
            found |= {f"{head}.{kind}.{name}": getattr(part, name) for name in ("plain", "exact", "coded")}
            found |= {f"{head}.{kind}.codes.{name}": one for name, one in part.codes.items()}
    return {name: one.contiguous() for name, one in found.items()}


def note(layer: LayerCache) -> dict[str, Any]:
    """Return the numbers of a layer, and what its tensors are."""
    shapes = {name: [str(one.dtype).removeprefix("torch."), *one.shape] for name, one in tensors(layer).items()}
    return {**{name: getattr(layer, name) for name in FACTS}, "counts": [store.counts for store in layer.heads], "tensors": shapes}


def adopt(layer: LayerCache, told: Mapping[str, Any], device: torch.device) -> None:
    """Let an empty layer be as `note` has told, with tensors that are still to be filled."""
    for name in FACTS:
        setattr(layer, name, told[name])
    layer.encoded = [(keys, values) for keys, values in told["encoded"]]
    tokens, precise = (None if one is None else tuple(tuple(own) for own in one) for one in told["granted"])
    layer.granted = (tokens, precise)
    for store, counts in zip(layer.heads, told["counts"], strict=True):
        store.counts = counts
    for name, (kind, *shape) in told["tensors"].items():
        _put(layer, name.split("."), torch.empty(shape, dtype=getattr(torch, kind), device=device))


def _put(layer: LayerCache, path: list[str], data: Tensor) -> None:
    first, *rest = path
    if not rest:
        setattr(layer, first, data)
    elif first == "summary":
        layer.summary[rest[0]] = data
    elif rest[0] == "state":
        layer.heads[int(first)].state[rest[1]] = data
    elif len(rest) == 1:
        setattr(layer.heads[int(first)], rest[0], data)
    else:
        part = next(own for kind, own in layer.heads[int(first)].parts.items() if kind == rest[0])
        if rest[1] == "codes":
            part.codes[rest[2]] = data
        else:
            setattr(part, rest[1], data)

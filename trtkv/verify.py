"""Compares an engine's graph, run by ONNX's own reference evaluator with the ops' reference forms, with the executor, value by value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from trtkv.plan import CachePlan, SelectPlan
from trtkv.plugins.face import DOMAIN, OpConfig
from trtkv.plugins.kv_append import reference as append_reference
from trtkv.plugins.kv_attend import reference as attend_reference
from trtkv.plugins.kv_select import reference as select_reference
from trtkv.plugins.roles import load_role


@dataclass(slots=True)
class ReferenceCache:
    """Keys and values as plain tensors [Hk, S, D] by (layer, slot), without pages or summaries."""

    plan: CachePlan
    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def append(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values [n, Hk, D] behind what is there."""
        for store, new in ((self.keys, keys), (self.values, values)):
            parts = [store[layer, slot]] if (layer, slot) in store else []
            store[layer, slot] = torch.cat([*parts, new.transpose(0, 1)], 1)

    def choose(self, layer: int, slot: int, query: Tensor, config: OpConfig) -> list[list[int]] | None:
        """Return the units that query [Hq, D] reads in this layer, or None for all."""
        plan = self.plan.select[layer]
        assert plan is not None, f"layer {layer} selects nothing"
        keys = self.keys[layer, slot]
        if keys.shape[1] <= plan.budget:
            return None
        role = load_role(plan.meaning)
        closed = keys.shape[1] // plan.group * plan.group
        scores = role.score(query, role.summarize(keys[:, :closed]))
        return select_reference.select(scores, keys.shape[1], plan, config)


class ReferenceGraph:
    """A graph under ONNX's reference evaluator, with a cache of its own."""

    def __init__(self, graph: Path | onnx.ModelProto, plan: CachePlan) -> None:
        model = onnx.load(str(graph)) if isinstance(graph, Path) else graph
        self.cache = ReferenceCache(plan)
        self._evaluator = ReferenceEvaluator(model, new_ops=[_op(kind, run, self.cache) for kind, run in _RUNS.items()])

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one step and return every value that the graph computes, by name."""
        return self._evaluator.run(None, dict(inputs), intermediate=True)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Convert a tensor for the evaluator; bfloat16 becomes ml_dtypes' bfloat16."""
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def as_tensor(array: np.ndarray) -> Tensor:
    """Convert a value of the evaluator back."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def _op(kind: str, run: Any, cache: ReferenceCache) -> type[OpRun]:
    def _run(self: OpRun, *arrays: np.ndarray, layer: int, cfg: str, plugin_namespace: str, plugin_version: str) -> tuple[np.ndarray]:
        return (as_numpy(run(cache, layer, OpConfig.from_json(cfg), [as_tensor(one) for one in arrays]).contiguous()),)

    return type(kind, (OpRun,), {"op_domain": DOMAIN, "_run": _run})


def _rows(starts: Tensor, seq_lens: Tensor, slots: Tensor) -> Sequence[tuple[int, int, int, int]]:
    ends = starts.tolist()
    return list(zip(ends[:-1], ends[1:], seq_lens.tolist(), slots.tolist(), strict=True))


def _append(cache: ReferenceCache, layer: int, config: OpConfig, inputs: list[Tensor]) -> Tensor:
    qkv, positions, starts, seq_lens, _, slots, _, rope = inputs[:8]
    norms = (inputs[9], inputs[10]) if len(inputs) > 9 else None
    query, keys, values = append_reference.append(qkv, positions, rope, config, norms)
    for start, end, total, slot in _rows(starts, seq_lens, slots):
        if total == end - start:
            cache.keys.pop((layer, slot), None), cache.values.pop((layer, slot), None)
        cache.append(layer, slot, keys[start:end], values[start:end])
    return query.flatten(1)


def _select(cache: ReferenceCache, layer: int, config: OpConfig, inputs: list[Tensor]) -> Tensor:
    query, starts, seq_lens, _, slots = inputs[:5]
    out = torch.full((len(slots), config.select_heads, config.select_width + 1), -1, dtype=torch.int32)
    for b, (start, end, _, slot) in enumerate(_rows(starts, seq_lens, slots)):
        if end - start != 1:
            continue
        chosen = cache.choose(layer, slot, query[start].unflatten(0, (config.num_q_heads, -1)), config)
        for head, units in enumerate(chosen or []):
            out[b, head, : len(units)] = torch.tensor(units, dtype=torch.int32)
            out[b, head, -1] = len(units)
    return out


def _attend(cache: ReferenceCache, layer: int, config: OpConfig, inputs: list[Tensor]) -> Tensor:
    query, starts, seq_lens, _, slots = inputs[:5]
    out = torch.empty_like(query)
    for b, (start, end, total, slot) in enumerate(_rows(starts, seq_lens, slots)):
        for token in range(start, end):
            visible = total - (end - 1 - token)
            chosen = None
            if len(inputs) > 7 and inputs[7][b, 0, -1] >= 0:
                plan = cache.plan.select[layer]
                assert plan is not None, f"layer {layer} selects nothing"
                chosen = [_tokens(row, plan, visible) for row in inputs[7][b].tolist()]
            keys, values = cache.keys[layer, slot][:, :visible], cache.values[layer, slot][:, :visible]
            heads = query[token].unflatten(0, (config.num_q_heads, -1))
            out[token] = attend_reference.attend(heads, keys, values, config, chosen).flatten().to(query.dtype)
    return out


def _tokens(row: list[int], plan: SelectPlan, visible: int) -> list[int]:
    return [token for unit in row[: row[-1]] for token in range(unit * plan.unit, (unit + 1) * plan.unit) if token < visible]


_RUNS = {"KvAppend": _append, "KvSelect": _select, "KvAttend": _attend}

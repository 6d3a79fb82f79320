"""The graph through ONNX's reference evaluator and the ops' reference forms, against the executor, value by value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import make_rig, make_tiny
from trtkv.runtime.step import StepRow
from trtkv.verify import ReferenceGraph, as_numpy


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("policy", ["full", "fier"])
def test_every_layer_agrees(kind: str, policy: str, tmp_path: Path) -> None:
    tiny = make_tiny(kind, tmp_path / "model")
    rig = make_rig(tiny, policy, tmp_path, sets=("retrieve.budget=64",) if policy == "fier" else (), slots=2)
    reference = ReferenceGraph(rig.graph, rig.plan)
    weights = {
        name: np.concatenate([as_numpy(part) for part in one.parts], one.parts[0].dim() - 1 if "bias" in name else 0)
        for name, one in bound(rig).items()
    }
    weights = {name: value.reshape(1, -1) if name.endswith("bias") else value for name, value in weights.items()}
    tokens = torch.randint(0, 256, (2, 80), generator=torch.Generator().manual_seed(0)).tolist()
    steps = [[(0, 0, 50), (1, 0, 7)], [(0, 50, 76), (1, 7, 8)], [(0, 76, 77), (1, 8, 9)], [(0, 77, 78), (1, 9, 80)]]
    for step in steps:
        rows = [StepRow(tokens[slot][start:end], start, slot, rig.pages(slot), (end - start - 1,)) for slot, start, end in step]
        rig.executor.taps = {}
        fed: dict[str, torch.Tensor] = {}
        original = rig.executor.run
        rig.stepper.executor = Spy(original, fed)  # type: ignore[assignment]
        rig.stepper.run(rows)
        expected = reference.run({**weights, **{name: as_numpy(tensor) for name, tensor in fed.items()}})
        compared = 0
        for name, ours in rig.executor.taps.items():
            theirs = expected[name]
            if ours.dtype == torch.int32:
                assert np.array_equal(ours.numpy(), theirs), name
            else:
                np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-4, atol=2e-4, err_msg=name)
            compared += 1
        assert compared == sum(1 + (node.also is not None) for node in rig.executor._nodes)


class Spy:
    name = "spy"

    def __init__(self, run: object, fed: dict[str, torch.Tensor]) -> None:
        self._run, self._fed = run, fed

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self._fed.update(inputs)
        return self._run(inputs)  # type: ignore[operator]


def bound(rig: object) -> dict:
    return {name: value for name, value in rig.executor._bound.items() if hasattr(value, "parts")}  # type: ignore[attr-defined]

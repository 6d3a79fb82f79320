"""A step's time by what it is spent on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import TinyModel
from trtkv.api import build
from trtkv.bench.load import Load, Work
from trtkv.bench.split import PARTS, kind_of, kv_bytes_read, largest_gap, least_times, split_step, weight_bytes
from trtkv.runtime.loading import Options, open_engine

KERNELS = {
    "nvjet_tst_128x64": "weights", "gemv": "weights", "attend_list": "attention", "flash_fwd_splitkv": "attention", "attend_encoded": "attention",
    "fier_score": "selection", "select_units": "selection", "recall_pages": "recall", "append_kernel": "append", "append_encoded": "append",
    "move_kernel": "append", "rms_norm": "norms", "silu_gate": "norms", "sample": "sampling", "fetch": "sampling", "indexSelectSmallIndex": "rest",
}  # fmt: skip
LAYER = (("gemv", 4.0), ("append_kernel", 1.0), ("attend_dense", 3.0), ("gemv", 2.0), ("gemv", 8.0), ("gemv", 5.0))


def spans(layers: int, steps: int) -> list[tuple[float, float, str]]:
    """Kernels end to end, each begun a microsecond before the one before it ends."""
    made, at = [], 0.0
    for name, took in [one for _ in range(steps) for one in (("fetch", 1.0), *LAYER * layers, ("gemv", 9.0), ("sample", 2.0))]:
        made.append((at - 1.0, at + took, name))
        at += took
    return made


def test_kernels_by_what_they_are_for() -> None:
    assert {name: kind_of(name) for name in KERNELS} == KERNELS


def test_a_step_is_split_by_part_and_product() -> None:
    split = split_step(spans(3, 2), 2, 3)
    assert split["weights_us"] == 3 * 19 + 9 and split["attention_us"] == 9 and split["append_us"] == 3
    assert [split[f"{name}_us"] for name in ("qkv", "o", "gate_up", "down", "head")] == [12, 6, 24, 15, 9]
    assert split["sampling_us"] == pytest.approx(3.5, abs=0.6)  # the first kernel has none before it
    assert "qkv_us" not in split_step(spans(3, 2), 2, 4)  # other kernels than one a product
    took = sum(split[f"{part}_us"] for part in PARTS)
    found = largest_gap(split, {"weights_least_us": 60.0, "attention_least_us": 1.0}, 100.0)
    assert found == {"idle_us": pytest.approx(100 - took), "largest_gap": "idle", "largest_gap_us": found["idle_us"]}
    assert largest_gap(split, {"weights_least_us": 60.0}, took)["largest_gap"] == "attention"
    assert largest_gap({}, {}, 1.0) == {}


@pytest.mark.parametrize("policy", ["full", "fier"])
def test_parts_have_at_least_the_bytes_that_they_move(policy: str, tiny_llama: TinyModel, tmp_path: Path) -> None:
    limits = {"max_seq_len": 256, "max_batch_size": 2, "max_chunk_tokens": 64}
    sets = ("retrieve.budget=64", "retrieve.dense_layers=0") if policy == "fier" else ()
    path = build(str(tiny_llama.path), policy, sets=sets, out=tmp_path / "engine", backend="none", sms=["none"], **limits)
    engine = open_engine(path, Options(None, "cpu"))
    load = Load(engine, Work(200, 2, 64, 4))
    load.fill(lambda fraction: None)
    load.decode(lambda fraction: None)
    least = least_times(engine, 1e6)  # a byte a microsecond
    attended, index = kv_bytes_read(engine)
    assert least["weights_least_us"] == weight_bytes(engine.manifest) and least["attention_least_us"] == attended
    assert attended == 2 * (64 if policy == "fier" else 195) * 2 * 2 * 16 * 3 * 4
    # Of each head one bit a channel and token, and the two extremes of every 32 tokens.
    assert index == (2 * 3 * 2 * (195 * 16 // 8 + 6 * 2 * 16 * 4) if policy == "fier" else 0) == least["selection_least_us"]
    model = engine.manifest.model
    products = sum(least[f"{name}_least_us"] for name in ("qkv", "o", "gate_up", "down", "head"))
    norms = (2 * model.num_layers + 1) * model.hidden_size * 4
    assert least["weights_least_us"] == products + norms

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PLACE = {"machine": "NVIDIA H200", "driver": "1", "torch": "2", "cuda": "13", "date": "2026-11-21T00:00:00+00:00"}


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance_steps", ROOT / "build_scripts" / "performance_steps.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(policy: str, itl_ms: float, **changes: Any) -> dict[str, Any]:
    return {
        "benchmark": "step", "status": "ok", "model": "llama-2-7b", "policy": policy, "budget": None, "sets": [], "batch": 1, "context": 32768,
        "itl_p50_ms": itl_ms, "decode_tokens_per_s": 1e3 / itl_ms, "kv_bytes": 1 << 30, "bandwidth_share": 0.8, "copy_GBps": 4200.0, "commit": "abc",
        "environment": PLACE, **changes,
    }  # fmt: skip


def test_goals_are_compared_with_full_of_the_same_load(writer: ModuleType, tmp_path: Path) -> None:
    rows = [record("full", 5.0), record("full", 10.0), record("fier", 6.0), record("quest", 11.0), record("fier", 1.0, context=65536)]
    text = writer.section(rows, tmp_path)
    assert "| llama-2-7b | 1 x 32k | fier | 6.00 |" in text and "1.67 times full, goal 1.80" in text
    assert "full: 1.25 times the least, goal 1.15" in text and "quest: slower than full" in text
    assert (tmp_path / "steps.svg").stat().st_size > 1000
    assert "No goal is missed" in writer.section([record("full", 9.0, bandwidth_share=0.9), record("fier", 5.0)], tmp_path)


def test_largest_batches_are_compared_as_a_whole(writer: ModuleType, tmp_path: Path) -> None:
    one = {"model": "llama-3.1-8b", "largest": True}
    full = record("full", 30.0, batch=27, decode_tokens_per_s=900.0, **one)
    mini = record("minikv", 40.0, batch=108, decode_tokens_per_s=2340.0, **one)
    older = record("minikv", 40.0, batch=107, decode_tokens_per_s=2000.0, **one)
    text = writer.section([full, older, mini, record("minikv", 5.0, batch=27, model="llama-3.1-8b")], tmp_path)
    assert "108 x 32k, the most" in text and "107 x 32k" not in text
    assert "minikv: 2.60 times full, goal 3.00" in text and "minikv: 4.00 times the sequences of full, goal 5.00" in text
    mini |= {"batch": 140, "decode_tokens_per_s": 2800.0}
    assert "times the sequences" not in writer.section([full, mini], tmp_path)


def test_what_was_not_measured_is_not_there(writer: ModuleType, tmp_path: Path) -> None:
    assert writer.section([{"benchmark": "kernel", "status": "ok"}, record("full", 1.0, status="wrong")], tmp_path) == ""
    busy = {
        "benchmark": "busy", "status": "ok", "model": "m", "policy": "full", "streams": 32, "prompt_tokens": 8, "answer_tokens": 10,
        "busy_share": 0.97,
        "between_steps_p50_us": 12.0, "commit": "abc", "environment": PLACE,
    }  # fmt: skip
    assert "works 97.0% of the time" in writer.section([busy], tmp_path)
    soak = {
        "benchmark": "soak", "status": "ok", "requests": 9, "overload": 1.5, "capacity_per_s": 3, "answered": 9, "cancelled": 0, "vanished": 0,
        "memory_rise_bytes": -5, "commit": "abc", "environment": PLACE,
    }  # fmt: skip
    assert "0 refused" in writer.section([soak], tmp_path)

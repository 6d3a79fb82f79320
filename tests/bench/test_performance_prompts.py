"""The section of docs/performance.md on what eviction adds to a prompt."""

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
    spec = importlib.util.spec_from_file_location("performance_prompts", ROOT / "build_scripts" / "performance_prompts.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(op: str, **changes: Any) -> dict[str, Any]:
    figures = {"attention_us": 900.0, "cudnn_us": 910.0, "sums_us": 500.0, "with_sums_per_fastest": 1.56}
    if op == "lag":
        figures = {"compress_us": 50.0, "attention_us": 4000.0, "products_us": 2000.0, "compress_percent_of_prefill": 0.8}
    return {
        "benchmark": "kernel", "status": "ok", "op": op, "geometry": "llama-3.1-8b", "context": 8192, "new_tokens": 8192, "commit": "abc",
        "environment": PLACE, **figures, **changes,
    }  # fmt: skip


def test_the_newest_record_of_a_row_is_shown_with_every_commit(writer: ModuleType) -> None:
    text = writer.section([record("prefill-sums", sums_us=777.0), record("prefill-sums"), record("lag", commit="def")])
    assert "commit abc, def" in text and "| llama-3.1-8b | 8k | 900.0 |" in text and "777" not in text
    assert "No goal is missed." in text


def test_missed_goals_are_named(writer: ModuleType) -> None:
    text = writer.section([record("prefill-sums", with_sums_per_fastest=1.75), record("lag", compress_percent_of_prefill=1.2)])
    assert "1.75 times the fastest attention, goal 1.6" in text and "1.20% of the prefill, goal 1%" in text


def test_nothing_is_said_without_a_gpus_records(writer: ModuleType) -> None:
    assert writer.section([record("prefill-sums", status="wrong")]) == ""
    here = {name: value for name, value in PLACE.items() if name != "driver"}
    assert writer.section([record("prefill-sums", environment=here)]) == ""

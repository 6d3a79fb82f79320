from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PLACE = {"machine": "NVIDIA H200", "driver": "1", "torch": "2", "date": "2026-11-21T00:00:00+00:00"}
COMMON = {"status": "ok", "bus_GBps": 55.0, "commit": "abc", "environment": PLACE}


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance_offload", ROOT / "build_scripts" / "performance_offload.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(pages: int, share: float) -> dict[str, Any]:
    row = {"benchmark": "kernel", "op": "recall", "geometry": "llama-3.1-8b", "batch": 1, "page": 32, "pages": pages, "order": "heads"}
    return {**COMMON, **row, "dtype": "bfloat16", "recall_us": 100.0, "GBps": 55 * share, "share": share}


def step(recall: str, itl_ms: float, policy: str = "freekv", **changes: Any) -> dict[str, Any]:
    row = {"benchmark": "step", "model": "llama-3.1-8b", "policy": policy, "budget": 2048, "batch": 1, "context": 32768, "recall": recall}
    pages = {} if recall == "resident" else {"pages_in_front": 1.5, "pages_ahead": 8.5}
    return {**COMMON, **row, "miss_pages": 10.0, "itl_p50_ms": itl_ms, "itl_p90_ms": itl_ms, "device_kv_bytes": 1 << 30, **pages, **changes}


def test_goals_are_compared_with_rows_of_the_same_load(writer: ModuleType, tmp_path: Path) -> None:
    rows = [launch(64, 0.7), launch(64, 0.9), launch(2, 0.4), step("resident", 5.0), step("ahead", 6.0, x_resident=1.2)]
    rows += [step("page by page tokens first", 60.0), step("ahead", 5.0, context=65536), step("resident", 4.0, "full", context=65536)]
    text = writer.section([*rows, step("ahead", 5.0, context=1 << 20, kv_peak_bytes=25 << 30)], tmp_path)
    assert "| llama-3.1-8b | 1 x 32k | freekv, ahead | 10.00 | 6.00 |" in text
    assert "1.20 times resident, goal 1.10" in text and "10.00 times as fast as page by page tokens first, goal 13.00" in text
    assert "1 x 64k, freekv: slower than full" in text and "25.0 GiB beside the weights, goal 24.0 GiB" in text
    assert "of the bus, goal" not in text
    assert "70% of the bus, goal 85%" in writer.section([launch(64, 0.7)], tmp_path)
    assert "No goal is missed" in writer.section(
        [launch(64, 0.9), step("ahead", 5.0, x_resident=1.05), step("page by page tokens first", 66.0)], tmp_path
    )


def answer(recall: str, seconds: float, **changes: Any) -> dict[str, Any]:
    row = {"benchmark": "answer", "model": "llama-3.1-8b", "policy": "freekv", "budget": 2048, "batch": 4, "context": 600, "answer": 16384}
    times = {"answer_s": seconds, "whole_s": seconds + 1, "decode_tokens_per_s": 100.0, "x_resident": seconds / 100, "ttft_ms": 1000.0}
    return {**COMMON, **row, **times, "drift": 0.05, "recall": recall, "kv_begin_bytes": 1 << 30, "kv_end_bytes": 2 << 30, **changes}


def test_whole_answers_are_shown_and_compared_with_their_goals(writer: ModuleType, tmp_path: Path) -> None:
    rows = [answer("resident", 100.0), answer("ahead", 105.0), answer("page by page", 1050.0, sampled=5), answer(writer.BASELINE, 1260.0)]
    text = writer.section(rows, tmp_path)
    assert "| llama-3.1-8b | 4 x 600 | freekv, ahead | 16384 | 1.00 | 105.0 | 106.0 | 100.0 | 1.05 | 10.00 | 1.0 GiB | 2.0 GiB |  |" in text
    assert "to 16384 tokens, freekv: 12.00 times as fast as page by page tokens first, goal 13.00" in text and "times resident, goal" not in text
    assert "1.30 times resident, goal 1.10" in writer.section([rows[0], answer("ahead", 130.0)], tmp_path)
    assert "No goal is missed" in writer.section([rows[0], answer("ahead", 80.0), *rows[2:]], tmp_path)


def test_launches_of_codes_stand_beside_those_of_numbers(writer: ModuleType, tmp_path: Path) -> None:
    rows = [launch(64, 0.9), {**launch(64, 0.95), "store": "int2"}, {**launch(64, 0.8), "store": "fp8"}, {**launch(64, 0.97), "store": "bf16"}]
    text = writer.section(rows, tmp_path)
    assert [text.count(f"| 1 | {store} | 64 |") for store in ("bf16", "int2", "fp8")] == [1, 1, 1] and "| 0.97 |" in text
    assert "64 pages a head, fp8: 80% of the bus, goal 85%" in text


def test_what_was_chosen_is_said(writer: ModuleType, tmp_path: Path) -> None:
    took = {"step_kernel_us": 31.2, "step_copies_us": 400.0, "bulk_kernel_us": 350.0, "bulk_copies_us": 320.0, "pages": 10, "run_pages": 256}
    choice = {"step": "kernel", "bulk": "copies", "ahead": True, "measured": took}
    text = writer.section([step("resident", 5.0), step("auto", 5.2, choice=choice)], tmp_path)
    assert "- llama-3.1-8b 1 x 32k, freekv: steps by kernel (kernel 31 us, copies 400 us for 10 pages of every head), prompts by copies" in text


def test_what_was_not_measured_is_not_there(writer: ModuleType, tmp_path: Path) -> None:
    assert writer.section([{"benchmark": "kernel", "status": "ok"}, {**launch(64, 0.9), "status": "wrong"}], tmp_path) == ""


def test_launches_that_miss_little_of_a_selection_have_a_table_of_their_own(writer: ModuleType, tmp_path: Path) -> None:
    few = {**launch(2, 0.1), "selected": 64, "pages": 0.3, "recall_us": 8.0}
    text = writer.section([launch(64, 0.9), few], tmp_path)
    assert "| llama-3.1-8b | 1 | 64 | 0.30 | 8.00 |" in text and text.count("| llama-3.1-8b |") == 2
    assert "No goal is missed" in writer.section([launch(64, 0.9), {**few, "pages": 64, "share": 0.2}], tmp_path)  # a bus that waits for planning


def test_traced_steps_are_described_and_shown(writer: ModuleType, tmp_path: Path) -> None:
    times = {"step_us": 5000.0, "recall_in_front_us": 90.0, "beside_us": 700.0, "hidden_us": 650.0}
    rows = [step("resident", 5.0), step("ahead", 5.3), step("ahead", 5.2, timeline=times)]
    text = writer.section(rows, tmp_path)
    assert "- llama-3.1-8b 1 x 32k, freekv, ahead: 5000.0 us, recall in front of attention 90.00 us, beside 700.0 us, of which 650.0 us" in text
    assert "![" not in text and "| 5.30 |" in text and "| 5.20 |" not in text
    (tmp_path / "offload-step.svg").touch()
    assert "](offload-step.svg)" in writer.section(rows, tmp_path)
    assert "Traced" not in writer.section(rows[:2], tmp_path)

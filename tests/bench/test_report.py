"""Tables and plots of records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtkv.bench.report import cell, notes, plot, table
from trtkv.errors import ConfigError


def record(policy: str = "fier", context: int = 32768, **changes: Any) -> dict[str, Any]:
    own = {
        "benchmark": "kernel", "status": "ok", "correct": True, "op": "retrieve", "geometry": "qwen2.5-7b", "kv_heads": 4, "batch": 1,
        "context": context, "policy": policy, "dtype": "bfloat16", "runs": 20, "timing": "CUDA graph",
        "append_us": 2.0, "attend_us": 5.0, "whole_us": 20.0,
        "dense_us": 30.0, "dense": "sdpa", "ratio": 1.5, "bound_us": 1.25, "times_bound": 16.0, "achieved_GBps": 1234.5, "copy_GBps": 4300.0,
        "moved_bytes": 10**7, "spread_percent": 1.5, "commit": "abc",
        "environment": {"machine": "NVIDIA H200", "driver": "1", "torch": "2", "cuda": "13", "date": "2026-11-21T00:00:00+00:00"},
    }  # fmt: skip
    if policy != "full":
        own |= {"pooling": "softmax-mean", "unit": 1, "budget": 1024, "select_us": 13.5, "dense_route_us": 31.0}
        own |= {"select_kernels_us": {"fier_score": 6.0, "select_units": 7.0}}
    return {**own, **changes}


def test_a_table_has_the_columns_that_are_filled() -> None:
    columns, rows = table([record(), record("full"), record("quest", status="wrong") | {"whole_us": None}])
    assert columns[:4] == ["geometry", "batch", "context", "policy"]
    assert {"append us", "select us", "dense route us", "ratio", "x bound"} <= set(columns)
    whole, select = columns.index("whole us"), columns.index("select us")
    assert [row[whole].strip() for row in rows] == ["20.00", "20.00", "-"] and rows[1][select].strip() == "-"
    assert [row[columns.index("status")].strip() for row in rows] == ["ok", "ok", "wrong"]
    assert not {"select us", "status"} & set(table([record("full")])[0])


def test_a_selection_alone_is_shown_by_kernel() -> None:
    columns, rows = table([record(op="select")])
    assert columns[-1] == "by kernel" and rows[0][-1] == "fier_score 6.00, select_units 7.00"


@pytest.mark.parametrize(("value", "text"), [(None, ""), (12, "12"), (1.234, "1.23"), (123.45, "123.5"), ("sdpa", "sdpa")])
def test_cells(value: Any, text: str) -> None:
    assert cell(value) == text


def test_notes_name_machine_bandwidth_and_spread() -> None:
    text = " ".join(notes([record(), record(spread_percent=2.5)]))
    assert "NVIDIA H200" in text and "4300 GB/s" in text and "2.5 %" in text and "No GPU" not in text
    here = record(environment={"machine": "x86_64 CPU, 2 threads"})
    assert "No GPU" in " ".join(notes([here])) and notes([record(status="wrong")]) == []


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_a_plot_is_drawn(name: str, tmp_path: Path) -> None:
    rows = [record(policy, context, whole_us=whole) for policy in ("fier", "full") for context, whole in ((8192, 10.0), (32768, 20.0))]
    plot([*rows, record(geometry="llama-2-7b"), record(op="select", status="wrong")], tmp_path / "made" / name)
    data = (tmp_path / "made" / name).read_bytes()
    assert len(data) > 5000 and data[:4] in (b"\x89PNG", b"<?xm") and [one.name for one in (tmp_path / "made").iterdir()] == [name]


def test_a_plot_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plot"):
        plot([record()], tmp_path / "plot.xyz")
    assert list(tmp_path.iterdir()) == []

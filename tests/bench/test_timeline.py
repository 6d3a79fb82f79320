"""Timelines of decode steps from traces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.console import Capture, complaint
from trtkv.bench.timeline import Span, Timeline, read, trace_events, write
from trtkv.errors import ConfigError

# Spans (start, end, name, stream) in the order and form of a trace of two layers of an offloaded step; lengths were made up.
TRACE = Path(__file__).parent / "data" / "step_trace.json"


@pytest.fixture
def line() -> Timeline:
    return Timeline.of("ahead", [tuple(one) for one in json.loads(TRACE.read_text())])


def test_spans_are_distinguished_by_stream_and_kind(line: Timeline) -> None:
    assert line.main == 7
    rows = {row: [one.name for one in line.spans if line.row(one) == row] for row in ("compute", "recall in front", "beside")}
    assert rows["recall in front"] == ["recall", "recall", "Memcpy DtoH"]
    assert rows["beside"] == ["page_scores", "select_units", "recall"] * 2
    assert rows["compute"].count("attend_list") == 2 and len(rows["compute"]) == 16
    assert {one.name: one.kind for one in line.spans}["attend_list"] == "attention"


def test_a_kernel_begins_when_the_one_before_it_on_its_stream_has_ended(line: Timeline) -> None:
    spans = [one for one in line.spans if one.stream == 7]
    assert all(later.start_us >= one.end_us - 1e-9 for one, later in itertools.pairwise(spans))
    assert line.spans[0].start_us == 0


def test_figures_are_lengths_of_times_and_what_they_share() -> None:
    traced = [(10.0, 20.0, "gemv", 1), (20.0, 24.0, "recall", 1), (24.0, 40.0, "attend", 1), (22.0, 30.0, "recall", 2), (38.0, 44.0, "select", 2)]
    assert Timeline.of("x", traced).figures() == {"step_us": 34.0, "recall_in_front_us": 4.0, "beside_us": 14.0, "hidden_us": 8.0}
    assert Timeline.of("x", []).figures() == {"step_us": 0.0, "recall_in_front_us": 0.0, "beside_us": 0.0, "hidden_us": 0.0}


def test_events_can_be_read_again(line: Timeline) -> None:
    other = Timeline("resident", (Span("gemv", 0.0, 2.0, 3),))
    events = json.loads(json.dumps(trace_events([line, other])))
    again = read(events)
    assert [one.label for one in again] == ["ahead", "resident"]
    assert again[0].figures() == line.figures()
    assert {event["args"]["row"] for event in events if event["ph"] == "X" and event["pid"] == 0} == {"compute", "recall in front", "beside"}


def test_a_picture_and_its_events_are_written_whole_or_not_at_all(line: Timeline, tmp_path: Path) -> None:
    write([line, line], tmp_path / "new" / "step.png")
    assert (tmp_path / "new" / "step.png").stat().st_size > 10_000
    assert len(json.loads((tmp_path / "new" / "step.json").read_text())["traceEvents"]) == 2 * (1 + len(line.spans))
    with pytest.raises(ConfigError, match="cannot be written"):
        write([line], tmp_path / "step.nothing")
    (tmp_path / "other.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write([line], tmp_path / "other.png")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["new", "other.json", "other.png"]


def test_what_cannot_be_drawn_is_said_before_anything_runs(capsys: Capture) -> None:
    words = ("bench", "step", "--model", "llama-3.1-8b", "--policy", "freekv", "--weights", "random", "--device", "cpu", "--timeline")
    assert "nothing is offloaded" in complaint(capsys, *words, "step.png")
    assert "these are 2" in complaint(capsys, *words, "step.png", "--offload", "--batch", "1,2")
    assert "no GPU is used" in complaint(capsys, *words, "step.png", "--offload")
    assert "is to be a picture" in complaint(capsys, *words, "step.json", "--offload")


@pytest.mark.gpu
def test_a_traced_step_shows_both_branches(tmp_path: Path) -> None:
    from trtkv.bench.recall import Cell, run_cells

    lines: list[Timeline] = []
    cell = Cell("qwen2.5-7b", "freekv", 1024, (), 4096, 1, "random", None, 2048, 8, 0.5, ("resident", "ahead"))
    rows = {row["recall"]: row for row in run_cells([cell], torch.device("cuda"), timelines=lines)}
    assert {one.label for one in lines} == set(rows) == {"resident", "ahead"}
    found = {one.label: one.figures() for one in lines}
    assert found["resident"]["recall_in_front_us"] == 0
    assert found["ahead"]["recall_in_front_us"] > 0
    assert found["ahead"]["beside_us"] >= found["ahead"]["hidden_us"] > 0
    assert rows["ahead"]["timeline"] == found["ahead"]
    write(lines, tmp_path / "step.png")

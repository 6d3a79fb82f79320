"""`trtkv bench step --offload` as a user types it, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.console import Capture, complaint, printed
from tests.tiny import TinyModel
from trtkv.bench.recall import VARIANTS, Cell, run_cells

SETS = ("--set", "retrieve.sink=16", "--set", "retrieve.window=16", "--set", "retrieve.page=16", "--budget", 96)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTKV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_every_way_of_recall_beside_the_resident_engine(tiny_llama: TinyModel, tmp_path: Path, capsys: Capture) -> None:
    words = ("--policy", "freekv", "--weights", "random", "--context", 260, "--batch", 2, "--steps", 8, "--chunk", 50, *SETS)
    lines = printed(capsys, "bench", "step", "--model", tiny_llama.path, "--offload", *words, "--json", "--output", tmp_path / "rows").splitlines()
    records = {record["recall"]: record for record in map(json.loads, lines)}
    assert next(iter(records)) == "resident"
    assert set(records) == {"resident", *VARIANTS}
    assert all(record["status"] == "ok" for record in records.values())
    assert "host_kv_bytes" not in records["resident"]
    for name, recall in VARIANTS.items():
        row = records[name]
        assert (row["pages_ahead"] > 0) == recall.ahead
        assert row["device_kv_bytes"] < records["resident"]["device_kv_bytes"]
        assert row["host_kv_bytes"] == records["ahead"]["host_kv_bytes"]
    assert records["in front"]["pages_in_front"] < records["without reuse"]["pages_in_front"]
    assert records["resident"]["command"] in (tmp_path / "rows").read_text()
    assert "--offload" in records["resident"]["command"]


def test_less_drift_leaves_queries_more_alike(tiny_llama: TinyModel) -> None:
    sets, alike = tuple(word for word in SETS if str(word).startswith("retrieve.")), []
    for drift in (0.05, 0.4, 1.0):
        cell = Cell(str(tiny_llama.path), "freekv", 96, sets, 160, 1, "random", None, 150, 8, drift, ())
        alike += [row["query_cosine"] for row in run_cells([cell], torch.device("cpu"))]
    assert len(alike) == 3
    assert alike == sorted(alike, reverse=True)


@pytest.mark.parametrize(("words", "says"), [(("--drift", "0"), "drift 0.0 is outside"), (("--policy", "fier"), "cannot be offloaded")])
def test_what_cannot_be_measured_is_said(words: tuple[str, ...], says: str, tiny_llama: TinyModel, capsys: Capture) -> None:
    policy = () if "--policy" in words else ("--policy", "freekv", *SETS)
    common = ("--weights", "random", "--context", 100, "--steps", 2, "--chunk", 50)
    assert says in complaint(capsys, "bench", "step", "--model", tiny_llama.path, "--offload", *policy, *common, *words)

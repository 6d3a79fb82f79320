"""Records: complete, appended whole, and without a speed where the result was wrong."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from trtkv.bench import records
from trtkv.bench.records import append_records, environment, make_record, read_records
from trtkv.errors import ConfigError

CPU = torch.device("cpu")


def test_a_record_says_what_ran_where_and_how_right() -> None:
    record = make_record("kernel", "trtkv bench kernel", CPU, {"passed": True, "attend_error": 0.001}, {"batch": 8}, {"whole_us": 3.5})
    assert (record["benchmark"], record["status"], record["correct"], record["batch"], record["whole_us"]) == ("kernel", "ok", True, 8, 3.5)
    assert record["check"] == {"passed": True, "attend_error": 0.001} and record["command"] == "trtkv bench kernel"
    assert {"machine", "torch", "python", "trtkv", "date"} <= set(record["environment"]) and "commit" in record
    assert "CPU" in environment(CPU)["machine"]
    json.dumps(record)


def test_a_wrong_result_has_no_speed() -> None:
    record = make_record("kernel", "", CPU, {"passed": False}, {"batch": 8}, {"whole_us": 3.5})
    assert record["status"] == "wrong" and not record["correct"] and "whole_us" not in record


def test_the_commit_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    records.commit.cache_clear()
    monkeypatch.setenv("TRTKV_COMMIT", "abc123")
    assert records.commit() == "abc123"
    records.commit.cache_clear()


def test_appends_from_many_threads_stay_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append_records(file, [{"n": n, "text": "é" * 5000}, {"n": -n, "text": ""}]), range(1, 41)))
    found = [record["n"] for record in read_records(file)]
    assert sorted(found) == sorted([*range(1, 41), *range(-40, 0)])
    assert all(found[index + 1] == -found[index] for index in range(0, 80, 2)), "the records of one call are adjacent"


def test_a_file_that_ends_without_a_newline_is_not_corrupted(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"n": 1}')
    append_records(file, [{"n": 2}])
    assert read_records(file) == [{"n": 1}, {"n": 2}]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.jsonl"
    append_records(file, [{"n": 1}])
    before, write = file.read_bytes(), os.write
    monkeypatch.setattr(records.os, "write", lambda handle, data: write(handle, data[: len(data) // 2]))
    with pytest.raises(ConfigError, match="cannot be appended"):
        append_records(file, [{"n": 2}])
    assert file.read_bytes() == before


def test_a_folder_is_no_file_for_records(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be appended"):
        append_records(tmp_path, [{"n": 1}])

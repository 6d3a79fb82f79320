"""The results file: whole lines only, whatever happens to its writers, and one process a cell."""

from __future__ import annotations

import errno
import json
import multiprocessing
from pathlib import Path

import pytest

from trtkv.errors import ConfigError
from trtkv.eval.results import Results


def test_records_are_found_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "deep" / "out")
    results.add({"key": "a", "value": 1})
    results.add({"key": "b", "value": "π"})
    assert results.finished()["b"]["value"] == "π"
    assert dict(Results(tmp_path / "deep" / "out").finished()) == dict(results.finished())


def test_the_first_record_of_a_key_counts(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add({"key": "a", "value": 1})
    results.add({"key": "a", "value": 2})
    assert results.finished()["a"]["value"] == 1


def test_an_unfinished_line_is_no_record_and_harms_none(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add({"key": "a", "value": 1})
    with results.file.open("ab") as stream:
        stream.write(b'{"key": "b", "val')
    assert list(results.finished()) == ["a"]
    results.add({"key": "c", "value": 3})
    assert list(results.finished()) == ["a", "c"] == list(Results(tmp_path).finished())
    lines = results.file.read_bytes().split(b"\n")
    assert len(lines) == 4 and json.loads(lines[2])["key"] == "c"


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.file.write_bytes(b'[1]\n{"value": 2}\nnull\n{"key": "a", "value": 1}\n')
    assert list(results.finished()) == ["a"]


def test_a_claimed_cell_is_not_claimed_again(tmp_path: Path) -> None:
    mine, theirs = Results(tmp_path), Results(tmp_path)
    with mine.claim("a") as first:
        assert first
        with theirs.claim("a") as second, theirs.claim("b") as other:
            assert not second and other
    with theirs.claim("a") as again:
        assert again
        theirs.add({"key": "a"})
    with mine.claim("a") as late:
        assert not late
    assert [one.name for one in (tmp_path / ".claims").iterdir() if one.name == "a.lock"] == []


def test_a_claim_ends_with_its_block(tmp_path: Path) -> None:
    results = Results(tmp_path)
    with pytest.raises(KeyboardInterrupt), results.claim("a"):
        raise KeyboardInterrupt
    with Results(tmp_path).claim("a") as again:
        assert again


def add_many(directory: Path, name: str) -> None:
    results = Results(directory)
    for index in range(50):
        results.add({"key": f"{name}{index}", "filler": "x" * 5000})


def test_processes_add_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=add_many, args=(tmp_path, name)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(Results(tmp_path).finished()) == sorted(f"{name}{index}" for name in "abc" for index in range(50))
    assert all(len(json.loads(line)["filler"]) == 5000 for line in (tmp_path / "results.jsonl").read_text().splitlines())


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*--output"):
        Results(tmp_path / "file" / "out")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trtkv.eval.results.os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        results.add({"key": "a"})

"""docs/quality.md is what the records in engines/ say."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def doc(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "build_scripts")
    return importlib.import_module("quality_doc")


def test_the_committed_page_is_what_the_records_say(doc: ModuleType) -> None:
    records = doc.Records(ROOT / "engines" / "quality.jsonl")
    assert (ROOT / "docs" / "quality.md").read_text(encoding="utf-8") == doc.page(records, ROOT / "engines")


def test_differences_are_paired(doc: ModuleType) -> None:
    mean, error = doc.difference({"each": {"exact": "1101"}}, {"each": {"exact": "1000"}})
    assert mean == 0.5 and error == pytest.approx((1 / 3) ** 0.5 / 2)


def test_the_newest_record_of_a_cell_counts(doc: ModuleType, tmp_path: Path) -> None:
    cell = '{{"task": "needle", "preset": "fier", "sets": [], "percent": 11, "length": 2048, "blind": true, "seed": 0, "exact": {}}}\n'
    (tmp_path / "some.jsonl").write_text(cell.format(0.5) + cell.format(0.75))
    records = doc.Records(tmp_path / "some.jsonl")
    assert records.find("needle", "fier", 11)["exact"] == 0.75 and records.find("needle", "fier retrieve.sink=4", 11) is None

"""Files given by path: a mistake is reported with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from trtkv.errors import ConfigError
from trtkv.eval.files import read_json, read_rows, read_text


class Line(BaseModel):
    a: int


@pytest.mark.parametrize("content", ['{"a": 1}\n\n{"a": 2}\n', '[{"a": 1},\n {"a": 2}]'])
def test_rows_by_line_or_in_a_list(content: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(content)
    assert read_rows(tmp_path / "rows", Line) == [Line(a=1), Line(a=2)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"a": 1}\n{"a": ', "line 2: Invalid JSON"),
        ('{"a": 1}\n\n[1]\n', "line 3: Input should be an object"),
        ('{"a": 1}\n{"b": 1}\n', "line 2: 'a' Field required"),
        ('[{"a": 1}, {"a": "x"}]', "row 2: 'a' Input should be a valid integer"),
        ("[]", "has no row"),
    ],
)
def test_malformed_rows(content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_rows(tmp_path / "rows", Line)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_or_json(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 3\)"):
        read_text(tmp_path / "latin")
    (tmp_path / "cut.json").write_text('{\n"a": [1,\n')
    with pytest.raises(ConfigError, match="line 3"):
        read_json(tmp_path / "cut.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text(tmp_path)

"""Files given by path: a mistake is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtkv.errors import ConfigError
from trtkv.eval.files import read_json, read_jsonl, read_text


def test_lines_are_numbered(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(read_jsonl(file, ("a",))) == [(1, {"a": 1}), (3, {"a": 2})]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"a": 1}\n{"a": ', "line 2 is no JSON"),
        ('{"a": 1}\n\n[1]\n', "line 3 is no JSON object"),
        ('{"a": 1}\n{"b": 1}\n', "line 2 has no 'a'"),
    ],
)
def test_malformed_lines(content: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        list(read_jsonl(file, ("a",)))


def test_what_is_no_text_or_json(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 3\)"):
        read_text(tmp_path / "latin")
    (tmp_path / "cut.json").write_text('{\n"a": [1,\n')
    with pytest.raises(ConfigError, match="line 3"):
        read_json(tmp_path / "cut.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text(tmp_path)

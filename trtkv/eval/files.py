"""Files that tasks read, with messages that name the file and the line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtkv.errors import ConfigError


def need_file(path: Path | None, task: str, what: str) -> Path:
    """Return the file that a task reads; raises ConfigError when none was given or it is not there."""
    if path is None:
        raise ConfigError(f"the task '{task}' reads {what}, and no file was given", f"Give it with --data {task}=FILE.")
    if not path.is_file():
        raise ConfigError(f"the file '{path}' of task '{task}' does not exist", "Check its name.")
    return path


def read_text(path: Path) -> str:
    """Read a UTF-8 text; raises ConfigError with the place of a byte that is not."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{path}' is not UTF-8 text (byte {error.start})", "Convert it first.") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror or error}", "Check its name and rights.") from None


def read_json(path: Path) -> Any:
    """Read one JSON value; raises ConfigError with the line of a mistake."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"'{path}' is no JSON: line {error.lineno}, column {error.colno}: {error.msg}", "Mend the file.") from None


def read_jsonl(path: Path, fields: tuple[str, ...] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of every line that is not empty; raises ConfigError for a line that is no object or lacks one of the fields."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"'{path}' line {number} is no JSON: {error.msg} at column {error.colno}", "Mend or remove the line.") from None
        if not isinstance(row, dict):
            raise ConfigError(f"'{path}' line {number} is no JSON object", "Every line holds one object.")
        missing = [name for name in fields if name not in row]
        if missing:
            raise ConfigError(f"'{path}' line {number} has no '{missing[0]}'", f"Every line needs: {', '.join(fields)}.")
        yield number, row


def checksum(path: Path) -> str:
    """Twelve hex digits of a file's content, for `Task.identity`."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]

"""Commands typed in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trtkv.cli import main

Capture = pytest.CaptureFixture[str]


def call(*words: object) -> int:
    """Run a command and return its exit code."""
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def printed(capsys: Capture, *words: object) -> str:
    """Run a command that works and return its standard output."""
    capsys.readouterr()
    assert call(*words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def output(capsys: Capture, *words: object) -> Any:
    """Run a command that works and return what `--json` prints last."""
    return json.loads(printed(capsys, *words, "--json").splitlines()[-1])


def complaint(capsys: Capture, *words: object, code: int = 1) -> str:
    """Run a command that the user got wrong and return its one line."""
    capsys.readouterr()
    assert call(*words) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1 and "Traceback" not in lines[0]
    return lines[0]

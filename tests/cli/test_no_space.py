"""Disks that are full: one line, exit code 1, nothing half-written."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import TinyModel
from trtkv.api import build

MOST = 2000  # bytes that a file may have


def run(*words: object, stdout: object = subprocess.PIPE) -> tuple[int, str]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, MOST))

    command = [sys.executable, "-m", "trtkv", *map(str, words)]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, preexec_fn=limit)  # type: ignore[call-overload]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert "Traceback" not in done.stderr and len(lines[-1]) < 300
    return done.returncode, lines[-1]


def test_a_repository_that_does_not_fit(tiny_llama: TinyModel, tmp_path: Path) -> None:
    engine = build(str(tiny_llama.path), out=tmp_path / "engine", backend="none", max_seq_len=64, sms=["none"])
    code, line = run("export-triton", engine, "--out", tmp_path / "repository")
    assert code == 1 and "cannot be written: File too large. Choose another --out." in line
    assert not list((tmp_path / "repository").iterdir())


def test_an_engine_that_does_not_fit(tiny_llama: TinyModel, tmp_path: Path) -> None:
    code, line = run("build", "--model", tiny_llama.path, "--out", tmp_path / "engines" / "one", "--backend", "none", "--sm", "none")
    assert code == 1 and "File too large" in line
    assert not [one for one in tmp_path.rglob("*") if one.is_file()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("words", ["models", "models --json", "plan --model qwen2.5-7b --context 4096"])
def test_output_that_goes_nowhere(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, line = run(*words.split(), stdout=full)
    assert code == 1 and line.startswith("trtkv: the output cannot be written: No space left on device.")

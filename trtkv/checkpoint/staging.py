"""Directories that are written whole or not at all, by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def staging(out: Path, waits: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Give an empty directory beside `out` for what is to take its place; the block moves it there by `replace_directory`.

    Another process that writes the same `out` is waited for, after a call of `waits`; what a killed one left is removed. Raises OSError.
    """
    stage, locks = out.parent / f".{out.name}.partial", list[int]()
    try:
        _own(stage, locks, waits)
        for left in stage.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        shutil.rmtree(_old(stage), ignore_errors=True)
        yield stage
    finally:
        _leave(stage, locks)


def replace_directory(stage: Path, out: Path) -> None:
    """Put a finished directory in the place of `out`."""
    old = _old(stage)
    with suppress(FileNotFoundError):
        out.replace(old)
    stage.replace(out)
    shutil.rmtree(old, ignore_errors=True)


def _own(stage: Path, locks: list[int], waits: Callable[[], None]) -> None:
    """Make a directory and lock it: the lock, which locks takes, ends with the process and is the directory's, wherever it is moved."""
    while True:
        stage.mkdir(parents=True, exist_ok=True)
        try:
            locks.append(os.open(stage, os.O_RDONLY))
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(locks[-1], fcntl.LOCK_EX)
        if _is_ours(stage, locks[-1]):
            return
        os.close(locks.pop())


def _leave(stage: Path, locks: list[int]) -> None:
    """Remove a directory that is ours: locked, or made by `_own` and not locked yet when it was interrupted."""
    with suppress(OSError):  # it was moved, or is another's
        if not locks:
            locks.append(os.open(stage, os.O_RDONLY))
        fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_ours(stage, locks[-1]):
            shutil.rmtree(stage, ignore_errors=True)
    for lock in locks:
        os.close(lock)


def _is_ours(stage: Path, lock: int) -> bool:
    """Whether a name still means the locked directory: who held it before may have moved or removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(stage.stat(), os.fstat(lock))
    return False


def _old(stage: Path) -> Path:
    return stage.with_name(f"{stage.name}.old")

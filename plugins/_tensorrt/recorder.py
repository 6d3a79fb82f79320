"""Keeps what goes wrong inside TensorRT's callbacks, where an exception is printed, swallowed or fatal, until it can be raised."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trtkv.errors import TrtkvError

_scope = threading.local()


class Recorder:
    """The exceptions of one build or one loaded engine, in the order in which they happened; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[tuple[str, BaseException]] = []

    def add(self, where: str, error: BaseException) -> None:
        """Keep an exception; where says what was being done."""
        with self._lock:
            self._errors.append((where, error))

    def __bool__(self) -> bool:
        return bool(self._errors)

    def check(self, kind: type[TrtkvError]) -> None:
        """Raise the first exception kept: an interrupt or a TrtkvError as it is, another one as `kind` with where it happened."""
        with self._lock:
            kept, self._errors = self._errors, []
        if not kept:
            return
        for _, error in kept:
            if isinstance(error, KeyboardInterrupt):
                raise error
        where, error = kept[0]
        if isinstance(error, TrtkvError):
            raise error
        text = " ".join(str(error).split())
        raise kind(f"{where} failed: {type(error).__name__}{f': {text}' if text else ''}", "This is a defect of trtkv: please report it.") from error


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let the plugins that this thread creates, and their clones on any thread, keep their exceptions in a recorder."""
    before = getattr(_scope, "recorder", None)
    _scope.recorder = recorder
    try:
        yield
    finally:
        _scope.recorder = before


def active() -> Recorder:
    """Return the recorder of this thread's innermost `recording`, or a new one that nobody reads."""
    return getattr(_scope, "recorder", None) or Recorder()

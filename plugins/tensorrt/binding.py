"""Which cache the plugins of an execution context use: the one that is bound while the context is created."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from plugins.cache.cache import Cache

_current: ContextVar[Cache | None] = ContextVar("cache", default=None)


@contextmanager
def bind(cache: Cache) -> Iterator[Cache]:
    """Make a cache the one that plugins attach to while an execution context is created."""
    token = _current.set(cache)
    try:
        yield cache
    finally:
        _current.reset(token)


def current() -> Cache | None:
    """Return the cache that plugins attach to now, or None during an engine build."""
    return _current.get()

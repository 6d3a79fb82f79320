"""Roles that a plan names by import path, so that this package needs no policies."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from trtkv.plan import Meaning


def load_role(meaning: Meaning) -> Any:
    """Return the role that a plan names, with its fields."""
    fields = tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in meaning.fields.items()))
    return _load(meaning.role, fields)


@lru_cache(maxsize=256)
def _load(path: str, fields: tuple[tuple[str, Any], ...]) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(**dict(fields))

"""Roles that a plan names by import path, so that this package needs no policies."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from trtkv.plan import Meaning


def load_role(meaning: Meaning) -> Any:
    """Return the role that a plan names, with its fields."""
    return _load(meaning.role, tuple(sorted((key, _frozen(value)) for key, value in meaning.fields.items())))


def _frozen(value: Any) -> Any:
    """Return tuples for lists, however deep: pairs such as (layer, head) are lists within a list."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _load(path: str, fields: tuple[tuple[str, Any], ...]) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(**dict(fields))

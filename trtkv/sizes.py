"""Sizes in bytes, as people read and write them."""

from __future__ import annotations

import re

from trtkv.errors import ConfigError

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str) -> int:
    """Read a size such as 24GiB, 80GB or 1000000; raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]{0,20}\.?[0-9]{1,20})\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise ConfigError(f"size '{text}' is not understood", "Write a number with a unit, such as 24GiB.")
    return int(float(match[1]) * UNITS[match[2].lower()])


def readable(size: float) -> str:
    """Write bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError

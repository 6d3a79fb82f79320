"""Values as typed: every kind of number with its range, lists joined by commas, and devices."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from trtkv.errors import ConfigError

if TYPE_CHECKING:
    import torch


def whole(kind: type[int], tokens: Sequence[Token]) -> int:
    """Return a whole number as typed; raises ValueError for any other, which would be rounded else."""
    text = tokens[0].value
    if not re.fullmatch(r"[+-]?[0-9]{1,400}", text):
        raise ValueError(f"'{text[:80]}' is not a whole number.")
    return int(text)


MOST = 2**31 - 1  # tokens, sequences and steps are int32 on the device
MOST_LISTED = 2**40  # what an estimate may be made for, whether anything could hold it or not

Count = Annotated[int, Parameter(converter=whole, validator=Number(gte=1, lte=MOST))]
Amount = Annotated[int, Parameter(converter=whole, validator=Number(gte=0, lte=MOST))]
Chunk = Annotated[int, Parameter(converter=whole, validator=Number(gte=2, lte=MOST))]
Seed = Annotated[int, Parameter(converter=whole, validator=Number(gte=-(2**63), lt=2**63))]
Port = Annotated[int, Parameter(converter=whole, validator=Number(gte=0, lt=2**16))]
GiB = Annotated[float, Parameter(validator=Number(gt=0, lte=2**20))]
GiBOrNone = Annotated[float, Parameter(validator=Number(gte=0, lte=2**20))]
MiB = Annotated[float, Parameter(validator=Number(gt=0, lte=1024))]
Seconds = Annotated[float, Parameter(validator=Number(gte=0, lte=86400))]
Wait = Annotated[float, Parameter(validator=Number(gt=0, lte=86400))]
Milliseconds = Annotated[float, Parameter(validator=Number(gt=0, lte=1e6))]
Rate = Annotated[float, Parameter(validator=Number(gt=0, lte=1e6))]
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
Part = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]
Cosine = Annotated[float, Parameter(validator=Number(gte=-1, lte=1))]
Temperature = Annotated[float, Parameter(validator=Number(gte=0, lte=100))]


def listed(items: Sequence[str] | None) -> tuple[str, ...]:
    """Split what an option was given, once or several times, at commas."""
    return tuple(part.strip() for item in items or () for part in item.split(",") if part.strip())


def words_of(name: str, text: str) -> list[str]:
    """Split words joined by commas, each once; raises ConfigError for an empty one."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(f"{name} '{text}' has an empty part", "Join several by single commas.")
    return list(dict.fromkeys(words))


def numbers_of(name: str, text: str) -> list[int]:
    """Split whole numbers joined by commas, ascending; raises ConfigError for anything else."""
    words = words_of(name, text)
    bad = [word for word in words if not word.isdecimal() or len(word) > 13 or int(word) > MOST_LISTED]
    if bad:
        raise ConfigError(
            f"{name} '{bad[0]}' is not a whole number up to {MOST_LISTED}", "Write digits, several joined by commas, such as 8192,32768."
        )
    return sorted({int(word) for word in words})


def find_device(name: str) -> torch.device:
    """Return the device of a name as typed; raises ConfigError for one that does not exist."""
    import torch

    from trtkv.runtime.loading import find_device as find

    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}' was requested, but torch sees no CUDA GPU", "Use --device cpu, or see trtkv doctor.")
    return find(name)


def adapters_of(texts: Sequence[str] | None, engines: Collection[str] = ()) -> dict[str, Path]:
    """Read NAME=DIRECTORY of every --adapter; raises ConfigError for two models of one name."""
    found: dict[str, Path] = {}
    for text in texts or ():
        name, equals, path = text.partition("=")
        if not equals:
            name, path = Path(text).resolve().name, text
        if not name.strip() or not path:
            raise ConfigError(f"adapter '{text}' is not understood", "Write NAME=DIRECTORY.")
        if name in found or name in engines:
            raise ConfigError(f"two models are named '{name}'", f"Name the adapter otherwise: --adapter NAME={path}.")
        found[name] = Path(path)
    return found


def bytes_of(gib: float | None) -> int | None:
    """Return the bytes of a size in GiB, None for the default."""
    return None if gib is None else int(gib * 2**30)

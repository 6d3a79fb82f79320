"""Values as typed: lists joined by commas, and devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtkv.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    import torch


def words_of(name: str, text: str) -> list[str]:
    """Split words joined by commas, each once; raises ConfigError for an empty one."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(f"{name} '{text}' has an empty part", "Join several by single commas.")
    return list(dict.fromkeys(words))


def numbers_of(name: str, text: str) -> list[int]:
    """Split whole numbers joined by commas, ascending; raises ConfigError for anything else."""
    words = words_of(name, text)
    bad = [word for word in words if not word.isdecimal()]
    if bad:
        raise ConfigError(f"{name} '{bad[0]}' is not a whole number", "Write digits, several joined by commas, such as 8192,32768.")
    return sorted({int(word) for word in words})


def find_device(name: str) -> torch.device:
    """Return the device of a name as typed; raises ConfigError for one that does not exist."""
    import torch

    from trtkv.runtime.loading import find_device as find

    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}' was requested, but torch sees no CUDA GPU", "Use --device cpu, or see trtkv doctor.")
    return find(name)


def recall_engine(recall: str | None, offload: bool) -> str:
    """Return what moves the pages of --offload; raises ConfigError without --offload and UnknownName for what is none."""
    from trtkv.runtime.host_memory import ENGINES

    if recall is not None and recall not in ENGINES:
        raise UnknownName("recall", recall, ENGINES)
    if recall is not None and not offload:
        raise ConfigError(f"--recall {recall} is for --offload, which is missing", "Add --offload, or leave --recall out.")
    return recall or "auto"


def swap_bytes(swap_gib: float | None) -> int | None:
    """Return the bytes of host memory for preempted sequences, None for the default; raises ConfigError for no size."""
    if swap_gib is not None and not 0 <= swap_gib < float("inf"):
        raise ConfigError(f"--swap-gib {swap_gib} is no size", "Give GiB, or 0 to recompute preempted sequences.")
    return None if swap_gib is None else int(swap_gib * 2**30)


def cache_bytes(cache_gib: float | None) -> int | None:
    """Return the bytes that the KV cache may take, None for what is free; raises ConfigError for no size."""
    if cache_gib is not None and not 0 < cache_gib < float("inf"):
        raise ConfigError(f"cache-gib {cache_gib} is not above 0", "Leave it out to take what is free.")
    return None if cache_gib is None else int(cache_gib * 2**30)


def host_bytes(host_gib: float | None, offload: bool) -> int | None:
    """Return the bytes of host memory that --offload may take, None for what is free; raises ConfigError for no size and without --offload."""
    if host_gib is None:
        return None
    if host_gib <= 0:
        raise ConfigError(f"--host-gib {host_gib} is no size", "Give GiB above 0.")
    if not offload:
        raise ConfigError(f"--host-gib {host_gib} is for --offload, which is missing", "Add --offload, or leave --host-gib out.")
    return int(host_gib * 2**30)

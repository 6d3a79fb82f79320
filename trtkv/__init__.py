"""TensorRT engines for decoder LLMs whose attention compresses, selects and offloads the KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plugins

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "SamplingParams", "build", "simulate"]

_WHERE = {
    "LLM": "trtkv.runtime.llm", "Grammar": "trtkv.runtime.grammar", "SamplingParams": "trtkv.runtime.sampler", "build": "trtkv.api",
    "simulate": "trtkv.simulation",
}  # fmt: skip

if Path(str(plugins.__file__)).parents[1] != Path(__file__).parents[1]:
    raise ImportError(f"the package {plugins.__file__} hides trtkv's 'plugins': start trtkv from another directory, or rename that one")


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: the command line must start before torch does."""
    if name not in _WHERE:
        raise AttributeError(f"module 'trtkv' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)

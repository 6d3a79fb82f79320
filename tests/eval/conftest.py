from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.tiny import TinyModel
from trtkv import LLM
from trtkv.api import build

Open = Callable[..., LLM]


@pytest.fixture(scope="session")
def tiny_llm(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens an engine of the tiny model: policy, settings, sequences at once, tokens of a chunk."""
    root = tmp_path_factory.mktemp("engines")

    @cache
    def open_engine(policy: str = "full", sets: tuple[str, ...] = (), batch: int = 3, chunk: int = 64) -> LLM:
        out = Path(root) / f"{policy}-{abs(hash(sets))}-{batch}-{chunk}"
        settings = {"max_seq_len": 256, "max_batch_size": batch, "max_chunk_tokens": chunk, "backend": "none"}
        return LLM(build(str(tiny_llama.path), policy, sets=sets, out=out, **settings), device="cpu", executor="torch")

    return open_engine

"""Queries, keys and values that a real model computes for a passage of real text."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtkv import LLM
from trtkv.api import build
from trtkv.config import ModelConfig
from trtkv.eval.haystack import passage
from trtkv.runtime.executor import TorchExecutor
from trtkv.runtime.step import StepRow

CHUNK = 256


@dataclass(frozen=True, slots=True)
class Captured:
    """A model's shape and, for every layer, queries [T, Hq, D], keys and values [T, Hk, D] after rotation."""

    model: ModelConfig
    layers: list[tuple[Tensor, Tensor, Tensor]]


def capture(model: str, num_tokens: int, seed: int = 0) -> Captured:
    """Run a passage of so many tokens through the torch executor with the whole cache, and take what its plugins see."""
    with tempfile.TemporaryDirectory() as directory:
        engine = build(model, "full", out=Path(directory) / "engine", max_seq_len=num_tokens, max_batch_size=1, backend="none")
        llm = LLM(engine, device="cpu", executor="torch")
    assert llm.tokenizer is not None, f"run trtkv pull {model} first"
    count = llm.tokenizer.encode
    tokens = count(" ".join(passage(num_tokens * 2, lambda text: len(count(text)), random.Random(seed))))[:num_tokens]
    assert len(tokens) == num_tokens
    return Captured(llm.engine.manifest.model, _run(llm, tokens))


def _run(llm: LLM, tokens: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    stepper, cache, shape = llm.engine.stepper, llm.engine.cache, llm.engine.manifest.model
    executor = stepper.executor
    assert isinstance(executor, TorchExecutor)
    pages = llm.engine.pages.take(cache.plan.pages(len(tokens)))
    queries: list[list[Tensor]] = [[] for _ in range(shape.num_layers)]
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        executor.taps = {}
        stepper.run([StepRow(part, start, 0, pages, prompt=len(tokens))])
        for layer, found in enumerate(queries):
            found.append(executor.taps[f"layers.{layer}.query"].clone())
    executor.taps = None
    captured = []
    for layer, found in enumerate(queries):
        q = torch.cat(found).unflatten(1, (shape.num_q_heads, shape.head_dim))
        k, v = (cache.buffer(name, layer)[pages].transpose(1, 2).flatten(0, 1)[: len(tokens)].clone() for name in ("keys", "values"))
        captured.append((q, k, v))
    return captured

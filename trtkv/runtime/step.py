"""One step of the engine: a batch of sequences in, their next logits out. Read this file first.

The scheduler says which sequences take part and with how many new tokens; the step announces to the session where their tokens are stored,
fills the engine's inputs, and runs the graph once. Decode is the case of one new token each, prefill of a chunk; both may share a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtkv.config import Limits
from trtkv.plugins.session import Session
from trtkv.runtime.graphs import DecodeGraphs
from trtkv.runtime.inputs import page_table, small_inputs


class Executor(Protocol):
    """What runs the graph: the torch executor or TensorRT."""

    name: str

    @property
    def capturable(self) -> bool:
        """Whether decode steps may be captured into a CUDA graph."""
        ...

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one announced step; returns logits [R, V] fp32."""


@dataclass(slots=True)
class StepRow:
    """One sequence in a step: the new tokens, how many tokens came before them, its slot, its pages, and the rows whose logits are wanted.

    logits_of counts from the first new token; empty while a prompt is not finished. prompt is the length of the whole prompt, by default what
    there is once these tokens are in.
    """

    tokens: Sequence[int]
    seen: int
    slot: int
    pages: Sequence[int]
    logits_of: Sequence[int] = ()
    prompt: int | None = None


class Stepper:
    """Runs steps of one session; holds the inputs that never change."""

    def __init__(self, executor: Executor, session: Session, limits: Limits, rope: Tensor) -> None:
        """Take an executor and its session; rope is `rope_table`'s result."""
        self.executor, self.session, self.limits = executor, session, limits
        self._fixed = {"rope": rope.to(session.device), "state": session.address_table()}
        self._width = session.plan.pages(limits.max_seq_len)
        self._graphs = DecodeGraphs(executor, session, self._width, self._fixed) if executor.capturable else None

    @torch.inference_mode()
    def run(self, rows: Sequence[StepRow]) -> Tensor:
        """Run one step: logits [R, V] fp32 of the rows asked for, in order; all sequences' keys and values are stored afterwards."""
        new = [len(row.tokens) for row in rows]
        stored = [row.seen + len(row.tokens) for row in rows]
        groups = self.session.plan.num_page_groups
        prompts = [total if row.prompt is None else row.prompt for row, total in zip(rows, stored, strict=True)]
        self.session.begin_step(new, [stored] * groups, [row.slot for row in rows], [[row.pages for row in rows]] * groups, prompts)
        if self._graphs is not None and self.executor.capturable and self._graphs.takes(rows):
            logits = self._graphs.run(rows)
        else:
            values = {**small_inputs(rows, groups), "page_table": page_table(rows, groups, self._width)}
            inputs = {name: torch.from_numpy(value.copy()).to(self.session.device, non_blocking=True) for name, value in values.items()}
            logits = self.executor.run({**self._fixed, **inputs})
        self.session.end_step()
        return logits

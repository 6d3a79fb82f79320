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


class Executor(Protocol):
    """What runs the graph: the torch executor or TensorRT."""

    name: str

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

    @torch.inference_mode()
    def run(self, rows: Sequence[StepRow]) -> Tensor:
        """Run one step: logits [R, V] fp32 of the rows asked for, in order; all sequences' keys and values are stored afterwards."""
        new = [len(row.tokens) for row in rows]
        stored = [row.seen + len(row.tokens) for row in rows]
        groups = self.session.plan.num_page_groups
        prompts = [total if row.prompt is None else row.prompt for row, total in zip(rows, stored, strict=True)]
        self.session.begin_step(new, [stored] * groups, [row.slot for row in rows], [[row.pages for row in rows]] * groups, prompts)
        inputs = {name: tensor.to(self.session.device, non_blocking=True) for name, tensor in self._inputs(rows, new, stored).items()}
        logits = self.executor.run({**self._fixed, **inputs})
        self.session.end_step()
        return logits

    def _inputs(self, rows: Sequence[StepRow], new: list[int], stored: list[int]) -> dict[str, Tensor]:
        starts = [0]
        for count in new:
            starts.append(starts[-1] + count)
        groups = self.session.plan.num_page_groups
        width = self.session.plan.pages(self.limits.max_seq_len)  # constant: a shape that changes costs TensorRT a callback in every plugin
        table = [[*row.pages, *[0] * (width - len(row.pages))] for row in rows]
        values = {
            "token_ids": [token for row in rows for token in row.tokens],
            "positions": [position for row in rows for position in range(row.seen, row.seen + len(row.tokens))],
            "cu_seqlens": starts,
            "seq_lens": stored,
            "stored_lens": [stored] * groups,
            "slots": [row.slot for row in rows],
            "page_table": [table] * groups,
            "last_rows": [start + index for start, row in zip(starts, rows, strict=False) for index in row.logits_of] or [0],
        }
        return {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}

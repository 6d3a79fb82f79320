"""Decode steps as CUDA graphs: one for every batch size, replayed with new inputs at fixed addresses.

The first step of a batch size runs as it is, which loads every kernel, and is captured behind it; capturing computes nothing. Steps that choose
their next tokens on the device are graphs of their own: a step may then be queued before the host has read what the one before it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trtkv.plugins.session import Session
from trtkv.runtime.device_sampler import Ask, DeviceSampler
from trtkv.runtime.head_table import HeadTable
from trtkv.runtime.inputs import differ, page_table, small_inputs

if TYPE_CHECKING:
    from trtkv.runtime.step import Executor, StepRow

Arrays = Mapping[str, np.ndarray]
ALIGNMENT = 128  # bytes at which every input begins
QUEUED = 3  # pinned blocks: one more than the steps that may be on their way
FEW_ROWS = 4  # changed rows of the page table that are copied one by one


class DecodeGraphs:
    """Captures and replays the steps in which every sequence has one new token and wants its logits."""

    def __init__(self, executor: Executor, session: Session, width: int, fixed: Mapping[str, Tensor]) -> None:
        """Take an executor whose steps can be captured; width is M of the page table, fixed the inputs that never change."""
        self._executor, self._session, self._width, self._fixed = executor, session, width, fixed
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def takes(rows: Sequence[StepRow]) -> bool:
        """Say whether a step is one of these: all sequences are behind their prompt."""
        return all(len(row.tokens) == 1 and len(row.logits_of) == 1 and row.prompt is not None and row.seen >= row.prompt for row in rows)

    def run(self, rows: Sequence[StepRow]) -> Tensor:
        """Run an announced step: logits [B, V] fp32, the caller's to keep."""
        logits, again = self._run(rows, (len(rows), -1), {}, self._executor.run)
        return logits.clone() if again else logits

    def choose(self, rows: Sequence[StepRow], asks: Sequence[Ask], sampler: DeviceSampler) -> Tensor:
        """Run an announced step and choose its next tokens on the device; returns the logits [B, V] fp32, which the next step overwrites."""
        more = sampler.inputs(asks)

        def step(values: Mapping[str, Tensor]) -> Tensor:
            ids = sampler.tokens(values["token_ids"], values["slots"])
            logits = self._executor.run({**{name: value for name, value in values.items() if name not in more}, "token_ids": ids})
            sampler.choose(logits, values, values["slots"])
            return logits

        for key in [key for key in self._captured if key[1] not in (-1, sampler.version)]:
            del self._captured[key]  # its sampler's state lies elsewhere now
        return self._run(rows, (len(rows), sampler.version), more, step)[0]

    def _run(
        self, rows: Sequence[StepRow], key: tuple[int, int], more: Arrays, step: Callable[[Mapping[str, Tensor]], Tensor]
    ) -> tuple[Tensor, bool]:
        """Run a step, captured if it was before; returns its logits and whether they lie where the next step's will."""
        arrays = {**small_inputs(rows, self._session.plan.num_page_groups, self._session.stored_lens()), **more}
        captured = self._captured.get(key)
        if captured is not None:
            captured.inputs.fill(rows, arrays)
            captured.graph.replay()
            return captured.logits, True
        inputs = _Static(arrays, len(rows), self._session, self._width)
        inputs.fill(rows, arrays)
        values = {**self._fixed, **inputs.tensors}
        first = step(values)
        torch.cuda.current_stream(self._session.device).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = step(values)
        self._captured[key] = _Captured(graph, inputs, logits)
        return first, False


class _Captured:
    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: _Static, logits: Tensor) -> None:
        self.graph, self.inputs, self.logits = graph, inputs, logits


class _Static:
    """Inputs of B decoding sequences at fixed addresses: the small ones in one block, the page table moved only where it changes.

    The host writes to pinned memory in turns, so that it can fill the next step's block while this one's is still to be copied.
    """

    def __init__(self, arrays: Arrays, batch: int, session: Session, width: int) -> None:
        self._groups, self._width = session.plan.num_page_groups, width
        starts, size = {}, 0
        for name, values in arrays.items():
            starts[name], size = size, size + -(-values.nbytes // ALIGNMENT) * ALIGNMENT
        self._block = torch.zeros(size, dtype=torch.uint8, device=session.device)
        self.tensors = {name: _view(self._block, starts[name], values) for name, values in arrays.items()}
        self._heads, shape = HeadTable.of(session, width), (self._groups, batch, width)
        table = torch.zeros(shape, dtype=torch.int32, device=session.device) if self._heads is None else self._heads.view(batch)
        self.tensors["page_table"] = table
        self._staged = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(QUEUED)]
        self._host = [{name: _view(one, starts[name], values).numpy() for name, values in arrays.items()} for one in self._staged]
        queued = QUEUED if self._heads is None else 0
        self._tables = [torch.zeros(shape, dtype=torch.int32, pin_memory=True) for _ in range(queued)]
        self._copied = [torch.cuda.Event() for _ in range(QUEUED)]
        self._pages: list[Any] = [None] * batch
        self._turn = 0

    def fill(self, rows: Sequence[StepRow], arrays: Arrays) -> None:
        """Queue the copy of a step's values to their addresses."""
        self._turn = (self._turn + 1) % QUEUED
        self._copied[self._turn].synchronize()
        for name, values in arrays.items():
            self._host[self._turn][name][...] = values
        self._block.copy_(self._staged[self._turn], non_blocking=True)
        if self._heads is not None and self._heads.taken_by(self):
            self._pages = [None] * len(rows)
        changed = [b for b, (row, known) in enumerate(zip(rows, self._pages, strict=True)) if row.pages is not known]
        if changed:
            self._move_pages(rows, changed)
            self._pages = [row.pages for row in rows]
        self._copied[self._turn].record()

    def _move_pages(self, rows: Sequence[StepRow], changed: Sequence[int]) -> None:
        if self._heads is not None:
            for b in changed:
                self._heads.move(len(rows), b, rows[b].pages)  # type: ignore[arg-type]
            return
        table, staged = self.tensors["page_table"], self._tables[self._turn]
        if len(changed) > FEW_ROWS or self._groups > 1 or any(map(differ, rows)):
            staged.numpy()[...] = page_table(rows, self._groups, self._width)
            table.copy_(staged, non_blocking=True)
            return
        for b in changed:
            staged.numpy()[:, b] = page_table([rows[b]], 1, self._width)[:, 0]
            table[0, b].copy_(staged[0, b], non_blocking=True)


def _view(block: Tensor, start: int, values: np.ndarray) -> Tensor:
    """Return the part of a block of bytes that holds an array of this shape and dtype."""
    dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
    return block[start : start + values.nbytes].view(dtype).view(values.shape)

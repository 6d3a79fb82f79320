"""Decode steps as CUDA graphs: one for every batch size, replayed with new inputs at fixed addresses.

The first step of a batch size runs as it is, which loads every kernel, and is captured behind it; capturing computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtkv.plugins.session import Session
from trtkv.runtime.inputs import page_table, small_inputs

if TYPE_CHECKING:
    from trtkv.runtime.step import Executor, StepRow


class DecodeGraphs:
    """Captures and replays the steps in which every sequence has one new token and wants its logits."""

    def __init__(self, executor: Executor, session: Session, width: int, fixed: Mapping[str, Tensor]) -> None:
        """Take an executor whose steps can be captured; width is M of the page table, fixed the inputs that never change."""
        self._executor, self._session, self._width, self._fixed = executor, session, width, fixed
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def takes(rows: Sequence[StepRow]) -> bool:
        """Say whether a step is one of these: all sequences are behind their prompt."""
        return all(len(row.tokens) == 1 and len(row.logits_of) == 1 and row.prompt is not None and row.seen >= row.prompt for row in rows)

    def run(self, rows: Sequence[StepRow]) -> Tensor:
        """Run an announced step: logits [B, V] fp32."""
        captured = self._captured.get(len(rows))
        if captured is not None:
            captured.inputs.fill(rows)
            captured.graph.replay()
            return captured.logits.clone()
        inputs = _Static(rows, self._session, self._width)
        inputs.fill(rows)
        values = {**self._fixed, **inputs.tensors}
        first = self._executor.run(values)
        torch.cuda.current_stream(self._session.device).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._executor.run(values)
        self._captured[len(rows)] = _Captured(graph, inputs, logits)
        return first


class _Captured:
    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: _Static, logits: Tensor) -> None:
        self.graph, self.inputs, self.logits = graph, inputs, logits


class _Static:
    """Inputs of B decoding sequences at fixed addresses: the small ones in one pinned block, the page table moved only when it changes."""

    def __init__(self, rows: Sequence[StepRow], session: Session, width: int) -> None:
        self._groups, self._width = session.plan.num_page_groups, width
        shapes = {name: values.shape for name, values in small_inputs(rows, self._groups).items()}
        sizes = [-(-int(torch.Size(shape).numel()) // 32) * 32 for shape in shapes.values()]  # every input begins at 128 bytes
        self._staging = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=True)
        self._block = torch.zeros(sum(sizes), dtype=torch.int32, device=session.device)
        self.tensors: dict[str, Tensor] = {}
        self._host = {}
        start = 0
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            count = torch.Size(shape).numel()
            self.tensors[name] = self._block[start : start + count].view(shape)
            self._host[name] = self._staging[start : start + count].view(shape).numpy()
            start += size
        self.tensors["page_table"] = torch.zeros(self._groups, len(rows), width, dtype=torch.int32, device=session.device)
        self._pages: list[Sequence[int]] = []
        self._copied = torch.cuda.Event()

    def fill(self, rows: Sequence[StepRow]) -> None:
        """Copy a step's values to their addresses, once the copy before this one has read the pinned block."""
        self._copied.synchronize()
        for name, values in small_inputs(rows, self._groups).items():
            self._host[name][...] = values
        self._block.copy_(self._staging, non_blocking=True)
        self._copied.record()
        if len(self._pages) != len(rows) or any(row.pages is not known for row, known in zip(rows, self._pages, strict=True)):
            self.tensors["page_table"].copy_(torch.from_numpy(page_table(rows, self._groups, self._width).copy()))
            self._pages = [row.pages for row in rows]

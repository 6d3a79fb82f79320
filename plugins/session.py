"""The cache behind the plugins: buffers of one engine session, and where this step's tokens lie in them.

TensorRT sees none of it. A plugin instance holds its session; the runtime announces every step with `begin_step` before it runs the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from trtkv.plan import CachePlan
from trtkv.plugins.dtypes import TORCH_DTYPES
from trtkv.plugins.held.caches import HeldCaches
from trtkv.plugins.rows import Row, StepGroup

T = TypeVar("T")
_keys = itertools.count(1)
_current: ContextVar[Session | None] = ContextVar("session", default=None)


class Session:
    """Buffers of a running engine: `buffers[name][layer]` is a tensor or None, rows are pages or slots as the plan says."""

    def __init__(self, plan: CachePlan, num_pages: Sequence[int], num_slots: int, device: torch.device | str = "cpu", dense_below: int = 0) -> None:
        """Allocate the cache: num_pages for every page group, num_slots sequences at once.

        Sequences of up to dense_below tokens are read whole even where the budget is smaller: on a GPU that can be faster.
        """
        self.plan, self.num_slots, self.device = plan, num_slots, torch.device(device)
        self.num_pages = tuple(num_pages)
        self.held = HeldCaches(plan, self.device) if plan.held else None
        self.read_tokens = 0.0
        self.key = next(_keys)
        self.buffers: dict[str, list[Tensor | None]] = {}
        for spec in () if plan.held else plan.buffers:
            self.buffers[spec.name] = [
                torch.empty(
                    (self.num_pages[plan.page_groups[layer]] if spec.paged else num_slots, *map(int, spec.shape[1:])),
                    dtype=TORCH_DTYPES[spec.dtype],
                    device="cpu" if spec.tier == "host" else self.device,
                )
                if layer in spec.layers
                else None
                for layer in range(plan.num_layers)
            ]
        self.dense_below = dense_below
        self.parts = 1
        self.on_release: Callable[[int], None] | None = None
        self.reduce: Callable[[Tensor], None] | None = None  # sums a tensor in place over the parts of an engine
        self._scratch: dict[Hashable, object] = {}
        self._step: list[StepGroup] = []

    def buffer(self, name: str, layer: int) -> Tensor:
        """Return one layer's buffer; KeyError or TypeError here means that a plan and an op disagree."""
        found = self.buffers[name][layer]
        assert found is not None, f"layer {layer} has no buffer {name}"
        return found

    def words(self, layer: int) -> Tensor:
        """Return a layer's one-bit keys as the kernels lay them out: int32 [P, Hk, N / 32, D], the bytes of `fier_bits`."""
        packed = self.buffer("fier_bits", layer)
        return packed.view(torch.int32).view(*packed.shape[:2], packed.shape[2] // 32, -1)

    def ranges(self, layer: int) -> Tensor:
        """Return the lows and ranges of one-bit keys as the kernels lay them out: fp16 [P, Hk, N / 32, 2, D], the bytes of `fier_range`."""
        return self.buffer("fier_range", layer).view(torch.float16)

    def scratch(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what an op keeps between steps and layers, made at its first use: never inside a captured graph."""
        if key not in self._scratch:
            self._scratch[key] = make()
        return self._scratch[key]  # type: ignore[return-value]

    def reads_all_up_to(self, layer: int) -> int:
        """Stored tokens up to which a layer's decode query reads everything."""
        select = self.plan.select[layer]
        return 1 << 30 if select is None else max(select.budget, self.dense_below)

    def tokens_read(self, stored: int) -> float:
        """Tokens that one decode query of a paged cache reads of so many stored ones, mean over the layers."""
        if stored <= self.dense_below:
            return float(stored)
        return self.plan.tokens_read(stored)

    def step(self, layer: int) -> StepGroup:
        """Return the announced step as this layer sees it."""
        return self._step[self.plan.page_groups[layer]]

    def address_table(self) -> Tensor:
        """Return the `state` input: this session's key, then the address of every buffer of every layer (0: none), int64."""
        entries = [self.key]
        for spec in self.plan.buffers:
            tensors = self.buffers.get(spec.name, [None] * self.plan.num_layers)
            entries += [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return torch.tensor(entries, dtype=torch.int64, device=self.device)

    def begin_step(
        self,
        new: Sequence[int],
        stored: Sequence[Sequence[int]],
        slots: Sequence[int],
        pages: Sequence[Sequence[Sequence[int]]],
        prompts: Sequence[int],
    ) -> None:
        """Announce a step: new tokens of each of B sequences, stored [Y][B] tokens behind it, slots [B], page numbers [Y][B][M], prompts [B].

        A sequence whose stored tokens are all new begins afresh, whatever its slot held before.
        """
        groups = range(self.plan.num_page_groups)
        self._step = [self._group(new, stored[group], slots, pages[group], prompts) for group in groups]
        self.read_tokens = 0.0
        for row in self._step[0].rows:
            if self.held is None:
                self.read_tokens += self.tokens_read(row.stored) if row.answers else 0
            elif row.new == row.stored:
                self.held.start(row.slot)

    def end_step(self) -> None:
        """Evict and encode behind the step's attention, where the plan says so."""
        if self.held is not None:
            for row in self._step[0].rows:
                self.held.finish(row.slot)

    def note_read(self, row: Row, tokens: float) -> None:
        """Count what a layer's attention read of a held cache; `read_tokens` is the step's mean over layers, all decoding sequences together."""
        if row.answers:
            self.read_tokens += tokens / self.plan.num_layers

    def stored_bytes(self) -> int:
        """Return the bytes that hold keys, values and summaries of the announced step's sequences, in all parts of the engine."""
        rows = self._step[0].rows
        if self.held is not None:
            return self.parts * sum(self.held.nbytes(row.slot) for row in rows)
        return self.parts * sum(self.plan.stored_bytes(row.stored) for row in rows)

    def release(self, slot: int) -> None:
        """Free what a slot holds; pages belong to their allocator."""
        if self.on_release is not None:
            self.on_release(slot)
        if self.held is not None:
            self.held.release(slot)

    def _group(
        self, new: Sequence[int], stored: Sequence[int], slots: Sequence[int], pages: Sequence[Sequence[int]], prompts: Sequence[int]
    ) -> StepGroup:
        size, rows, start = self.plan.page_size, [], 0
        for count, total, slot, own, prompt in zip(new, stored, slots, pages, prompts, strict=True):
            rows.append(Row(start, count, total, slot, own, size, self.device, prompt))
            start += count
        return StepGroup(rows, size, self.device)


@contextmanager
def bind(session: Session) -> Iterator[Session]:
    """Make a session the one that plugins attach to while an execution context is created."""
    token = _current.set(session)
    try:
        yield session
    finally:
        _current.reset(token)


def current() -> Session | None:
    """Return the session that plugins attach to now, or None during an engine build."""
    return _current.get()

"""The cache behind the plugins: buffers of one engine session, and where this step's tokens lie in them.

TensorRT sees none of it. A plugin instance holds its session; the runtime announces every step with `begin_step` before it runs the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtkv.plan import CachePlan
from trtkv.plugins.dtypes import TORCH_DTYPES
from trtkv.plugins.held.caches import HeldCaches

_keys = itertools.count(1)
_current: ContextVar[Session | None] = ContextVar("session", default=None)


@dataclass(slots=True)
class Row:
    """One sequence of the step: its rows [start, start + new) among the T tokens, and where it is stored.

    stored counts the tokens behind the append, prompt those of the whole prompt; pages [M] int64 holds the page numbers in order, run their
    slice when they are consecutive.
    """

    start: int
    new: int
    stored: int
    slot: int
    pages: Tensor
    run: slice | None
    prompt: int = 0


@dataclass(slots=True)
class StepGroup:
    """The step as the layers of one page group see it.

    token_page and token_slot [T] int64 say where each new token is written; cache holds what layers of this step share.
    """

    rows: list[Row]
    token_page: Tensor
    token_slot: Tensor
    page_size: int
    cache: dict[object, object] = field(default_factory=dict)

    def closed_groups(self, group: int) -> tuple[Tensor, Tensor]:
        """Return page and index within the page, int64, of every group of tokens that this step completes."""
        key = ("closed", group)
        if key not in self.cache:
            pages, inside = [], []
            for row in self.rows:
                for index in range((row.stored - row.new) // group, row.stored // group):
                    pages.append(int(row.pages[index * group // self.page_size]))
                    inside.append(index % (self.page_size // group))
            device = self.token_page.device
            self.cache[key] = (torch.tensor(pages, dtype=torch.int64, device=device), torch.tensor(inside, dtype=torch.int64, device=device))
        return self.cache[key]  # type: ignore[return-value]


class Session:
    """Buffers of a running engine: `buffers[name][layer]` is a tensor or None, rows are pages or slots as the plan says."""

    def __init__(self, plan: CachePlan, num_pages: Sequence[int], num_slots: int, device: torch.device | str = "cpu") -> None:
        """Allocate the cache: num_pages for every page group, num_slots sequences at once."""
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
        self._step: list[StepGroup] = []

    def buffer(self, name: str, layer: int) -> Tensor:
        """Return one layer's buffer; KeyError or TypeError here means that a plan and an op disagree."""
        found = self.buffers[name][layer]
        assert found is not None, f"layer {layer} has no buffer {name}"
        return found

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
        if self.held is not None:
            for row in self._step[0].rows:
                if row.new == row.stored:
                    self.held.start(row.slot)

    def end_step(self) -> None:
        """Evict and encode behind the step's attention, where the plan says so."""
        if self.held is not None:
            for row in self._step[0].rows:
                self.held.finish(row.slot)

    def note_read(self, row: Row, tokens: float) -> None:
        """Count what a layer's attention read for a sequence that decodes; `read_tokens` is the step's mean over layers, all sequences together."""
        if row.new == 1 and row.stored > row.prompt:
            self.read_tokens += tokens / self.plan.num_layers

    def stored_bytes(self) -> int:
        """Return the bytes that hold keys, values and summaries of the announced step's sequences."""
        rows = self._step[0].rows
        if self.held is not None:
            return sum(self.held.nbytes(row.slot) for row in rows)
        return sum(self.plan.stored_bytes(row.stored) for row in rows)

    def release(self, slot: int) -> None:
        """Free what a slot holds; pages belong to their allocator."""
        if self.held is not None:
            self.held.release(slot)

    def _group(
        self, new: Sequence[int], stored: Sequence[int], slots: Sequence[int], pages: Sequence[Sequence[int]], prompts: Sequence[int]
    ) -> StepGroup:
        size, rows, start = self.plan.page_size, [], 0
        token_page, token_slot = [], []
        for count, total, slot, own, prompt in zip(new, stored, slots, pages, prompts, strict=True):
            used = own[: -(-total // size)]
            rows.append(Row(start, count, total, slot, torch.tensor(used, dtype=torch.int64, device=self.device), _as_slice(used), prompt))
            for index in range(total - count, total) if self.held is None else ():
                token_page.append(own[index // size])
                token_slot.append(index % size)
            start += count
        as_tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=self.device)  # noqa: E731
        return StepGroup(rows, as_tensor(token_page), as_tensor(token_slot), size)


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


def _as_slice(pages: Sequence[int]) -> slice | None:
    if pages and all(b == a + 1 for a, b in itertools.pairwise(pages)):
        return slice(pages[0], pages[-1] + 1)
    return None

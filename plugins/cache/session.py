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

from plugins.cache.batch import Row, StepGroup
from plugins.cache.bytes import ByteCount
from plugins.cache.encodings.grouped.ledger import find_ledger
from plugins.cache.encodings.grouped.store import EncodedStore
from plugins.cache.encodings.mixed import make_compactor, make_pool
from plugins.cache.encodings.per_token.store import ReplacedStore
from plugins.cache.eviction.compactor import Compactor
from plugins.cache.eviction.ledger import Ledger
from plugins.cache.eviction.per_head.compactor import HeadCompactor
from plugins.cache.eviction.per_head.ledger import HeadLedger
from plugins.cache.eviction.per_head.pages import HeadPages
from plugins.cache.eviction.stacks import Stacks
from plugins.cache.overrides import EVERYTHING, OwnValues, least_budget
from plugins.cache.reference.caches import HeldCaches
from plugins.cache.support import encodes_by_kernels
from plugins.cache.tiers.host.store import Offload
from plugins.device.dtypes import TORCH_DTYPES
from trtkv.plan import CachePlan

T = TypeVar("T")
_keys = itertools.count(1)
_OFFLOADED = ("keys", "values")  # parts of a page on the host, in this order
_current: ContextVar[Session | None] = ContextVar("session", default=None)


class Session:
    """Buffers of a running engine: `buffers[name][layer]` is a tensor or None, rows are pages or slots as the plan says."""

    def __init__(
        self,
        plan: CachePlan,
        num_pages: Sequence[int],
        num_slots: int,
        device: torch.device | str = "cpu",
        dense_below: int = 0,
        *,
        by_definition: bool = False,
        offload: Offload | None = None,
    ) -> None:
        """Allocate the cache: num_pages for every page group (or of their one pool, where heads have their own), num_slots sequences at once.

        Sequences of up to dense_below tokens are read whole even where the budget is smaller: on a GPU that can be faster. by_definition holds what
        is evicted from in tensors, as roles define it, where pages and kernels could: what those are compared with. offload holds the keys and values
        of the layers that it covers; their frames have room for a selection, so dense_below is none there.
        """
        self.plan, self.num_slots, self.device = plan, num_slots, torch.device(device)
        self.num_pages = tuple(num_pages)
        form = None if by_definition else encodes_by_kernels(plan, self.device)
        held = (plan.held and form is None) or (by_definition and (plan.compacts or plan.mixed))
        self.held = HeldCaches(plan, self.device) if held else None
        # Lengths of what is evicted from; of heads that differ their compactor's.
        self.ledger: Ledger | HeadLedger | None = find_ledger(plan) if plan.evict is not None and not held and not plan.pooled else None
        self.encoded: EncodedStore | None = None
        if form is not None:
            make = ReplacedStore if form.replaced else EncodedStore
            self.encoded = make(plan, form, self.num_pages, num_slots, self.device, self.ledger, offload)
        self.read_tokens = 0.0
        self.key = next(_keys)
        self.buffers: dict[str, list[Tensor | None]] = {}
        self.ragged = make_pool(plan, sum(self.num_pages), num_slots, self.device) if plan.pooled and not held else None
        self.stacks = Stacks(plan, self.num_pages, num_slots, self.device) if plan.compacts and not plan.pooled and not held else None
        if self.stacks is not None or self.encoded is not None or self.ragged is not None:
            self.buffers = (self.stacks or self.encoded or self.ragged).buffers  # type: ignore[union-attr]
        for spec in () if held or self.buffers else plan.buffers:
            self.buffers[spec.name] = [
                torch.empty(
                    (self.num_pages[plan.page_groups[layer]] if spec.paged else num_slots, *map(int, spec.shape[1:])),
                    dtype=TORCH_DTYPES[spec.dtype],
                    device="cpu" if spec.tier == "host" else self.device,
                )
                if layer in spec.layers and not (offload is not None and spec.name in _OFFLOADED and offload.covers(layer))
                else None
                for layer in range(plan.num_layers)
            ]
        self.offload = offload
        for layer, tier in (offload.tiers if offload else {}).items():
            for part, name in enumerate(_OFFLOADED):
                self.buffers[name][layer] = tier.host[:, :, part]
        self.dense_below = 0 if offload else dense_below
        self.count = ByteCount(plan, form)
        self.own = OwnValues(plan, num_slots, self.device)
        self.parts = 1
        self.keeps_inputs = False  # whether an op's inputs stay as they are while somebody holds them
        self.on_release: Callable[[int], None] | None = None
        self.reduce: Callable[[Tensor], None] | None = None  # sums a tensor in place over the parts of an engine
        self.gather: Callable[[Tensor, Tensor], None] | None = None  # writes the columns of all parts [R, V / G] into [R, V]
        self._scratch: dict[Hashable, object] = {}
        self._step: list[StepGroup] = []
        self.compactor = Compactor(self) if self.stacks is not None else make_compactor(self) if self.ragged is not None else None
        if isinstance(self.compactor, HeadCompactor):
            self.ledger = self.compactor.ledger

    def buffer(self, name: str, layer: int) -> Tensor:
        """Return one layer's buffer; KeyError or TypeError here means that a plan and an op disagree."""
        found = self.buffers[name][layer]
        assert found is not None, f"layer {layer} has no buffer {name}"
        return found

    def page_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers whose rows are pages, of all layers, in the plan's order; of offloaded layers those of their pages on the host."""
        for spec in self.plan.buffers:
            if spec.paged:
                yield from (self.buffer(spec.name, layer) for layer in spec.layers)

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
        return EVERYTHING if select is None else max(select.budget, self.dense_below)

    def scores_from(self, layer: int) -> int:
        """Stored tokens up to which no decode query needs scores, whatever its request asked for."""
        select = self.plan.select[layer]
        if select is None or self.offload is not None:
            return self.reads_all_up_to(layer)
        return max(min(select.budget, least_budget(select)), self.dense_below)

    @property
    def reads_all(self) -> bool:
        """Whether the announced step reads every sequence that decodes whole, in all layers: kernels then skip the selection and its list.

        Where a step selects with the query of the step before it, a step whose next one may select is none of these, and remembers its query.
        """
        if self.offload is not None:
            return False
        step, key = self._step[0], ("reads all", self.dense_below)
        if key not in step.cache:
            below, smallest = self.dense_below, self.own.smallest_budget
            ahead = any(one.speculative for one in self.plan.select if one is not None)
            step.cache[key] = all(row.stored + ahead <= max(smallest(row.slot), below) for row in step.rows if row.new == 1)
        return bool(step.cache[key])

    def tokens_read(self, stored: int, slot: int = -1) -> float:
        """Tokens that one decode query of a paged cache reads of so many stored ones, mean over the layers."""
        if stored <= self.dense_below:
            return float(stored)
        if not self.own.has(slot):
            return self.count.tokens_read(stored)
        plans = [self.own.plan(layer, slot) for layer in range(self.plan.num_layers)]
        return sum(one.reads(stored) if one else stored for one in plans) / len(plans)

    def step(self, layer: int) -> StepGroup:
        """Return the announced step as this layer sees it."""
        return self._step[self.plan.page_groups[layer] if self.ragged is None else 0]

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
        pages: Sequence[Sequence[Sequence[int] | HeadPages]],
        prompts: Sequence[int],
    ) -> None:
        """Announce a step: new tokens of each of B sequences, stored [Y][B] tokens behind it, slots [B], page numbers [Y][B][M], prompts [B].

        A sequence whose stored tokens are all new begins afresh, whatever its slot held before. Where tokens are evicted, stored counts as if none
        had been; the session knows better. Where heads have pages of their own, pages[0] says
        which, as `HeadPages`.
        """
        if self.offload is not None:
            self.offload.join()  # a step that failed may have left work behind
        groups, seen = range(self.plan.num_page_groups), stored[0]
        if isinstance(self.compactor, HeadCompactor) and self.ragged is not None:
            lengths = self.compactor.begin(new, seen, slots, prompts)
            self._step = [self._group(new, self.ragged.longest(lengths), slots, [()] * len(slots), prompts, seen)]
            self.ragged.announce(self._step[0].rows, pages[0], lengths)
            self.compactor.announced()
        else:
            if self.ledger is not None:
                stored = self.ledger.begin(new, seen, slots, prompts)
            self._step = [self._group(new, stored[group], slots, pages[group], prompts, seen) for group in groups]
        self.read_tokens = 0.0
        if self.encoded is not None:
            self.encoded.begin(self._step[0].rows)
        for row in self._step[0].rows:
            if self.ledger is not None:
                self.read_tokens += self.ledger.mean_stored(row.slot) if row.answers else 0
            elif self.held is None:
                self.read_tokens += self.tokens_read(row.stored, row.slot) if row.answers else 0
            elif row.new == row.stored:
                self.held.start(row.slot)

    def forget_shared(self) -> None:
        """Forget what layers of the announced step have shared: a step that is captured makes it anew, from its own inputs and in its own memory."""
        for group in self._step:
            group.cache.clear()

    def end_step(self) -> None:
        """Evict and encode behind the step's attention, where the plan says so; what runs beside the step is waited for."""
        if self.offload is not None:
            self.offload.join()
        if self.encoded is not None:
            self.encoded.finish()
        if self.held is not None:
            for row in self._step[0].rows:
                self.held.finish(row.slot)
        elif isinstance(self.compactor, HeadCompactor):
            self.compactor.finish(self._step[0].rows)
        elif self.compactor is not None:
            self.compactor.finish([group.rows for group in self._step])
        elif self.encoded is not None and self.encoded.settler is not None:
            self.encoded.settler.finish([group.rows for group in self._step])
        elif self.ledger is not None:
            self.ledger.finish([row.slot for row in self._step[0].rows])

    def note_read(self, row: Row, tokens: float) -> None:
        """Count what a layer's attention read of a held cache; `read_tokens` is the step's mean over layers, all decoding sequences together."""
        if row.answers:
            self.read_tokens += tokens / self.plan.num_layers

    def stored_bytes(self) -> int:
        """Return the bytes that hold keys, values and summaries of the announced step's sequences, in all parts of the engine."""
        return sum(self.bytes_of(row.slot, row.seen) for row in self._step[0].rows)

    def bytes_of(self, slot: int, seen: int) -> int:
        """Return the bytes that hold keys, values and summaries of a sequence that has seen so many tokens, in all parts of the engine."""
        if self.held is not None:
            return self.parts * self.held.nbytes(slot) if seen else 0
        if self.encoded is not None:
            return self.parts * self.encoded.stored_bytes(slot, seen)
        lengths = self.stored_of(slot, seen)
        return self.parts * (self.count.stored(lengths) + self.count.state(lengths))

    def reserved_bytes(self) -> int:
        """Return the bytes that the announced step's sequences occupy: whole pages and slots, or what is held."""
        if self.held is not None:
            return self.stored_bytes()
        if self.encoded is not None:
            return self.parts * sum(self.encoded.reserved_bytes(row.slot, row.seen) for row in self._step[0].rows)
        return self.parts * sum(self.count.reserved(self.stored_of(row.slot, row.seen)) for row in self._step[0].rows)

    def stored_of(self, slot: int, seen: int) -> Sequence[int]:
        """Return the tokens that the layers of each page group store of a sequence that has seen so many."""
        return [seen] * self.plan.num_page_groups if self.ledger is None else self.ledger.stored(slot)

    def stored_lens(self) -> Sequence[Sequence[int]]:
        """Return the tokens [Y][B] that the announced step's sequences store behind its append."""
        if self.ragged is not None:
            return self.ragged.stored
        return [[row.stored for row in group.rows] for group in self._step]

    def release(self, slot: int) -> None:
        """Free what a slot holds; pages belong to their allocator."""
        if self.on_release is not None:
            self.on_release(slot)
        self.own.set(slot, None)
        if self.held is not None:
            self.held.release(slot)
        if self.encoded is not None:
            self.encoded.release(slot)
        if self.ledger is not None:
            self.ledger.release(slot)

    def _group(
        self,
        new: Sequence[int],
        stored: Sequence[int],
        slots: Sequence[int],
        pages: Sequence[Sequence[int]],
        prompts: Sequence[int],
        seen: Sequence[int],
    ) -> StepGroup:
        size, rows, start = self.plan.page_size, [], 0
        for count, total, slot, own, prompt, whole in zip(new, stored, slots, pages, prompts, seen, strict=True):
            rows.append(Row(start, count, total, slot, own, size, self.device, prompt, whole))
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

"""Which sequences take part in the next step: running ones first, then prompts in the order of their arrival, chunk by chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trtkv.config import Limits
from trtkv.errors import CapacityError, RequestError
from trtkv.plan import CachePlan
from trtkv.runtime.pages import PageAllocator
from trtkv.runtime.step import StepRow


@dataclass(slots=True, eq=False)
class Running:
    """A prompt on its way: tokens with what was generated so far, and how many of them are in the cache."""

    request: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    seen: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt


class Scheduler:
    """Admits a sequence when the pages of its longest possible form are free, so that a running one never runs out."""

    def __init__(self, plan: CachePlan, limits: Limits, pages: PageAllocator, slots: list[int]) -> None:
        """Share pages and free slots with whatever else runs on the engine."""
        self.plan, self.limits, self.pages = plan, limits, pages
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._slots = slots

    def check(self, tokens: Sequence[int], max_tokens: int) -> None:
        """Raise RequestError for a prompt that can never be served."""
        if not tokens:
            raise RequestError("the prompt is empty", "Give at least one token.")
        longest = self.limits.max_seq_len
        if len(tokens) + 1 > longest:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the engine takes {longest - 1}",
                f"Shorten it, or build with --max-seq-len {len(tokens) + max_tokens} or more.",
            )
        need, there = self.plan.pages(min(longest, len(tokens) + max_tokens)), self.pages.num_pages
        if need > there:
            raise RequestError(
                f"prompt and answer take {need} pages of the cache, which has {there}", "Lower max-tokens or give the cache more memory."
            )

    def add(self, sequence: Running) -> None:
        """Queue a checked sequence; its answer is cut at the engine's limit."""
        sequence.max_tokens = min(sequence.max_tokens, self.limits.max_seq_len - sequence.num_prompt)
        self.waiting.append(sequence)

    def remove(self, sequence: Running) -> None:
        """Forget a finished or cancelled sequence and free what it held."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self.pages.give(sequence.pages)
            self._slots.append(sequence.slot)
            sequence.pages, sequence.slot = [], -1

    def next(self) -> list[tuple[Running, StepRow]]:
        """Choose the next step's sequences: at most max_chunk_tokens new tokens together; none when all are finished.

        Raises CapacityError when nothing runs here and others hold what the first in line needs.
        """
        self._admit()
        if self.waiting and not self.running:
            raise CapacityError(
                "another call holds the engine's slots or pages", "Finish or close it first, or build with a larger --max-batch-size."
            )
        return list(self._choose(self.limits.max_chunk_tokens))

    def _choose(self, room: int) -> Iterator[tuple[Running, StepRow]]:
        decoding = [one for one in self.running if len(one.tokens) - one.seen == 1]
        prefilling = [one for one in self.running if len(one.tokens) - one.seen > 1]
        for one in decoding + prefilling:
            count = min(room, len(one.tokens) - one.seen)
            if count:
                room -= count
                finished = one.seen + count == len(one.tokens)
                yield (
                    one,
                    StepRow(one.tokens[one.seen : one.seen + count], one.seen, one.slot, one.pages, (count - 1,) if finished else (), one.num_prompt),
                )

    def _admit(self) -> None:
        while self.waiting and self._slots:
            need = self.plan.pages(self.waiting[0].num_prompt + self.waiting[0].max_tokens)
            if need > self.pages.free:
                return
            one = self.waiting.popleft()
            one.pages, one.slot = self.pages.take(need), self._slots.pop()
            self.running.append(one)

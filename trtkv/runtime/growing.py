"""Scheduling where nothing is evicted: a sequence owns the pages that it fills and one more; when they run out, the newest is preempted.

It resumes where it stopped when there is room again (`swap.py`), or is recomputed where there is no host memory for it. Caches that lie in
tensors are admitted for their longest form.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from trtkv.config import Limits
from trtkv.errors import RequestError
from trtkv.plan import CachePlan
from trtkv.runtime.pages import Key, PageAllocator, page_keys
from trtkv.runtime.scheduler import Scheduler
from trtkv.runtime.sequence import Running


class GrowingScheduler(Scheduler):
    """Shares slots and pages among sequences whose caches grow; `Running.pages` are their pages."""

    def __init__(self, plan: CachePlan, limits: Limits, pages: PageAllocator, slots: list[int]) -> None:
        """Share pages and free slots with whatever else runs on the engine."""
        super().__init__(plan, limits, slots)
        self.pages, self._gives_way = pages, plan.in_pages

    def check(self, tokens: Sequence[int], max_tokens: int) -> None:
        """Raise RequestError for a prompt that can never be served."""
        self._check_length(tokens, max_tokens)
        need, there = self.plan.pages(min(self.limits.max_seq_len, len(tokens) + max_tokens)), self.pages.num_pages
        if need > there:
            raise RequestError(
                f"prompt and answer take {need} pages of the cache, which has {there}", "Lower max-tokens or give the cache more memory."
            )

    def stored(self, sequence: Running) -> None:
        """Note that a step has stored a sequence's tokens up to `seen`: the prompt's full pages may serve others from now on."""
        full = min(sequence.seen, sequence.num_prompt) // self.plan.page_size
        if not self.plan.in_pages or full == len(sequence.keys):
            return
        keys = page_keys(sequence.tokens, self.plan.page_size, full, sequence.keys)
        for index in range(len(sequence.keys), full):
            self.pages.publish(sequence.pages[index], keys[index])
            if self.saved is not None:
                self.saved.save(sequence.pages[index], keys[index])
        sequence.keys = keys

    def _pages(self, one: Running) -> list[int]:
        return one.pages

    def _begin(self, one: Running) -> bool:
        """Give a waiting sequence its slot and pages, if there are any."""
        if not self._slots:
            return False
        if one.left is not None:
            return self._resume(one)
        shared = self.pages.share(self._prompt_keys(one)) if self.plan.in_pages else []
        need = self._pages_to_begin(one) - len(shared)
        # One free page for every running sequence, or the newest would soon be preempted.
        if not self._room(need + (len(self.running) if self.plan.in_pages else 0), one):
            self.pages.give(shared)
            return False
        one.pages, one.slot = shared + self.pages.take(need), self._slots.pop()
        self._claim(one.pages, one.slot)
        one.seen = one.reused = (len(shared) + self._load(one, len(shared))) * self.plan.page_size
        self._began(one)
        return True

    def _make_way(self, one: Running) -> bool:
        """Preempt the last running sequence where its priority is lower."""
        if not (self._gives_way and self.running and self.running[-1].priority < one.priority):
            return False
        self._preempt(self.running[-1])
        return True

    def _resume(self, one: Running) -> bool:
        """Resume a swapped sequence where it stopped, if there are pages for what has left the device."""
        assert self.swap is not None
        kept = self.swap.regain(one)
        need = self._pages_to_begin(one) - len(one.pages) - sum(page is not None for page in kept)
        if not self._room(need + len(self.running), one):
            self.pages.give([page for page in kept if page is not None])
            return False
        one.slot, fresh = self._slots.pop(), self.pages.take(need)
        try:
            self.swap.bring(one, kept, fresh)
        except BaseException:  # it stays in the queue, in a state that can be cancelled
            self.pages.give(fresh + [page for page in kept if page is not None])
            self._slots.append(one.slot)
            one.slot = -1
            raise
        return True

    def _load(self, one: Running, shared: int) -> int:
        """Fill a sequence's pages after the shared ones with what is saved of its prompt; returns how many."""
        if self.saved is None:
            return 0
        waiting = list(zip(one.pages[shared:], self._prompt_keys(one)[shared:], strict=False))
        for index, (page, key) in enumerate(waiting):
            if not self.saved.load(page, key):
                return index
            self.pages.publish(page, key)
        return len(waiting)

    def _prompt_keys(self, one: Running) -> list[Key]:
        """Name the prompt's pages that may be reused: at least two tokens are always computed, the last of which gives the logits."""
        return page_keys(one.tokens, self.plan.page_size, max(0, one.num_prompt - 2) // self.plan.page_size)

    def _pages_to_begin(self, one: Running) -> int:
        longest = one.num_prompt + one.max_tokens
        return self.plan.pages(min(longest, len(one.tokens) + 1) if self.plan.in_pages else longest)

    def _grow(self) -> None:
        """Give every running sequence the page of its next token; the newest is preempted where there is none."""
        for one in list(self.running):
            need = self.plan.pages(len(one.tokens)) - len(one.pages)
            while one in self.running and not self._room(need):
                self._preempt(self.running[-1])
            if one in self.running and need > 0:
                more = self.pages.take(need)
                self._claim(more)
                one.pages = one.pages + more  # a new list: captured steps know their page table by it

    def _room(self, count: int, asking: Running | None = None) -> bool:
        """Have so many pages free: waiting sequences release theirs, the last in the queue first, and shared pages last of all."""
        if count <= self.pages.free:
            return True
        for shared in (False, True) if not self.running else (False,):
            for one in reversed(self.waiting):
                while one is not asking and count > self.pages.free and self._shrink(one, count - self.pages.free, shared=shared):
                    pass
        return count <= self.pages.free

    def _shrink(self, one: Running, missing: int, *, shared: bool) -> bool:
        """Have a waiting sequence release some pages; False where it has none that may be swapped out."""
        tail = self.swap.tail(one, missing, shared=shared) if self.swap is not None else []
        if tail and self.swap is not None and not self.swap.send(one, tail):
            self._lose(one)
            self._begin_again(one)
        return bool(tail)

    def _preempt(self, one: Running) -> None:
        self.preemptions += 1
        if self.swap is not None and self.swap.park(one):
            self.running.remove(one)
            self._slots.append(one.slot)
            one.slot = -1
        else:
            self._release(one)
            self._begin_again(one)
        insort(self.waiting, one, key=lambda other: other.order)

    def _begin_again(self, one: Running) -> None:
        self.recomputed += one.seen > one.reused
        one.seen, one.keys, one.arriving = 0, [], None

    def _lose(self, one: Running) -> None:
        """Free what a waiting sequence holds."""
        if one.left is not None and self.swap is not None:
            self.swap.drop(one)
            self.pages.give(one.pages)
            one.pages = []

    def _claim(self, pages: Sequence[int], slot: int | None = None) -> None:
        if self.swap is not None:
            self.swap.claim(pages, slot)

    def _release(self, one: Running) -> None:
        self.running.remove(one)
        self.pages.give(one.pages)
        self._slots.append(one.slot)
        one.pages, one.slot = [], -1

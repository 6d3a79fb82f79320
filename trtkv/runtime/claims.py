"""Scheduling where tokens are evicted from pages: a sequence owns the pages that it fills, and those that it will still need are set aside for it.

What a policy stores follows from integers, so the most pages that a sequence still takes are known: first for its prompt, which may be whole until
its end, then for the rest of its answer. Whoever is admitted finds them, so nobody gives way. Pages that an eviction frees, and those that a sequence
no longer claims behind its prompt, go to others at once. Where what stays is encoded, prompts are read outside the pages, where there is room for one
that takes several steps.

Prompts are cut at the same places whoever shares a step, with room for a token of every other sequence: a policy may evict between two chunks, and an
answer must not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plugins.cache.cache import Cache
from plugins.cache.ledgers.evicting import EvictingLedger
from plugins.cache.ledgers.per_head import HeadLedger
from plugins.cache.pages import HeadPages
from trtkv.config import Limits
from trtkv.errors import RequestError
from trtkv.plan import CachePlan
from trtkv.runtime.memory import claimed_chunk
from trtkv.runtime.pages import GroupPages, HeadPageAllocator, PageAllocator
from trtkv.runtime.scheduler import Scheduler
from trtkv.runtime.sequence import Running


class ClaimScheduler(Scheduler):
    """Shares slots and pages among sequences whose caches shrink; `Running.pages` is a list of one list a page group."""

    def __init__(self, plan: CachePlan, limits: Limits, pages: PageAllocator | GroupPages, slots: list[int], ledger: EvictingLedger) -> None:
        """Share pages by a session's ledger, which knows what is stored."""
        super().__init__(plan, limits, pages, slots)  # type: ignore[arg-type]
        self._pools = pages.pools if isinstance(pages, GroupPages) else [pages]
        self._ledger, self._gives_way = ledger, False
        self._claims: dict[Running, list[int]] = {}
        self._chunk = claimed_chunk(limits)
        self._read: Running | None = None  # whose prompt is in between two steps, where there is room for one

    def check(self, tokens: Sequence[int], max_tokens: int) -> None:
        """Raise RequestError for a prompt that can never be served."""
        self._check_length(tokens, max_tokens)
        answer = min(max_tokens, self.limits.max_seq_len - len(tokens))
        for need, pool in zip(self._pages_for(len(tokens), answer), self._pools, strict=True):
            if need > pool.num_pages:
                raise RequestError(
                    f"prompt and answer take {need} pages of the cache, which has {pool.num_pages}",
                    "Lower max-tokens or give the cache more memory.",
                )

    def stored(self, sequence: Running) -> None:
        """Take note that a step is done: pages that are no longer filled go back, and what is claimed follows the answer behind the prompt."""
        stored, old = self._ledger.stored(sequence.slot), sequence.pages
        # A page in hand: a sequence that fills its last page in every step would otherwise return and take one for ever.
        keep = [self.plan.pages(one + 1) for one in stored]
        if any(len(own) > count for own, count in zip(old, keep, strict=True)):  # type: ignore[arg-type]
            for pool, own, count in zip(self._pools, old, keep, strict=True):
                pool.give(own[count:])  # type: ignore[index]
            sequence.pages = [own[:count] for own, count in zip(old, keep, strict=True)]  # type: ignore[index]
        if sequence is self._read and sequence.seen >= sequence.num_prompt:
            self._read = None
        if sequence.seen == sequence.num_prompt:
            self._claims[sequence] = self._ledger.pages_to_end(sequence.slot, sequence.max_tokens)

    def _begin(self, one: Running) -> bool:
        claim = self._pages_for(one.num_prompt, one.max_tokens)
        if not self._slots or any(need > room for need, room in zip(claim, self._unclaimed(), strict=True)):
            return False
        self._claims[one], one.slot, one.seen, one.pages = claim, self._slots.pop(), 0, self._no_pages()
        self._began(one)
        return True

    def _no_pages(self) -> list[int]:
        return [[] for _ in self._pools]  # type: ignore[misc]

    def _pages_for(self, prompt: int, answer: int) -> list[int]:
        return self._ledger.pages_for(prompt, self.limits.max_chunk_tokens, answer)

    def _unclaimed(self) -> list[int]:
        """Return the pages of each group that nobody owns and nobody in the running will want."""
        free = [pool.free for pool in self._pools]
        for one, claim in self._claims.items():
            free = [room - max(0, want - len(own)) for room, want, own in zip(free, claim, one.pages, strict=True)]  # type: ignore[arg-type]
        return free

    def _grow(self) -> None:
        """Pages come with the tokens of a step."""

    def _prepare(self, one: Running, count: int) -> int:
        """Take the pages of the next tokens: the next chunk of a prompt or nothing of it."""
        count = self._cut(one, count)
        if self._ledger.encodes and one.seen < one.num_prompt and 0 < count < one.num_prompt:
            if self._read not in (None, one):
                return 0
            self._read = one
        after = self._ledger.pages_after(one.slot, count, one.seen, one.num_prompt)
        need = [pages - len(own) for pages, own in zip(after, one.pages, strict=True)]  # type: ignore[arg-type]
        if any(more > 0 for more in need):
            one.pages = [own + pool.take(max(0, more)) for own, pool, more in zip(one.pages, self._pools, need, strict=True)]  # type: ignore
        return count

    def _cut(self, one: Running, count: int) -> int:
        """Return the tokens of a sequence's next step, none where a prompt's next chunk does not fit into count tokens."""
        if one.seen >= one.num_prompt:
            return count
        left = one.num_prompt - one.seen
        whole = min(self._chunk, left)
        whole -= left - whole == 1 and whole > 1  # as in any schedule: a last token alone would be taken for one that decodes
        return whole if count >= whole else 0

    def _release(self, one: Running) -> None:
        self.running.remove(one)
        for pool, own in zip(self._pools, one.pages, strict=True):
            pool.give(own)  # type: ignore[arg-type]
        del self._claims[one]
        self._read = None if self._read is one else self._read
        self._slots.append(one.slot)
        one.pages, one.slot = [], -1


class HeadClaimScheduler(ClaimScheduler):
    """Does so where every KV head has pages of its own, all from one pool; `Running.pages` are `HeadPages`."""

    def __init__(self, plan: CachePlan, limits: Limits, pages: HeadPageAllocator, slots: list[int], ledger: HeadLedger) -> None:
        """Share pages by a session's ledger, which knows what every head stores."""
        super().__init__(plan, limits, pages, slots, ledger)  # type: ignore[arg-type]
        self._pool, self._heads = pages, ledger

    def stored(self, sequence: Running) -> None:
        """Take note that a step is done: pages that heads no longer fill go back, but for one in hand."""
        own: HeadPages = sequence.pages  # type: ignore[assignment]
        keep = self._heads.pages(sequence.slot, 1)
        if (own.counts > keep).any():
            sequence.pages = self._pool.cut(own, keep)  # type: ignore[assignment]
        if sequence.seen == sequence.num_prompt:
            self._claims[sequence] = self._ledger.pages_to_end(sequence.slot, sequence.max_tokens)

    def _no_pages(self) -> list[int]:
        return HeadPages.empty(self._pool.heads)  # type: ignore[return-value]

    def _unclaimed(self) -> list[int]:
        wanted = (max(0, claim[0] - one.pages.total) for one, claim in self._claims.items())  # type: ignore[attr-defined]
        return [self._pool.free - sum(wanted)]

    def _prepare(self, one: Running, count: int) -> int:
        count = self._cut(one, count)
        need = self._heads.pages(one.slot, count) if one.seen else self._heads.pages_to_begin(one.num_prompt, count)
        more = need - one.pages.counts  # type: ignore[attr-defined]
        if count and (more > 0).any():
            one.pages = self._pool.extend(one.pages, np.maximum(more, 0))  # type: ignore[arg-type, assignment]
        return count

    def _release(self, one: Running) -> None:
        self.running.remove(one)
        self._pool.give(one.pages)  # type: ignore[arg-type]
        del self._claims[one]
        self._slots.append(one.slot)
        one.pages, one.slot = [], -1


def make_scheduler(cache: Cache, limits: Limits, pages: PageAllocator | GroupPages | HeadPageAllocator, slots: list[int]) -> Scheduler:
    """Make the scheduler that a session's plan needs."""
    if isinstance(pages, HeadPageAllocator):
        assert isinstance(cache.ledger, HeadLedger), "heads have pages of their own only where they are evicted from"
        return HeadClaimScheduler(cache.plan, limits, pages, slots, cache.ledger)
    if isinstance(cache.ledger, EvictingLedger):
        return ClaimScheduler(cache.plan, limits, pages, slots, cache.ledger)
    assert isinstance(pages, PageAllocator), "several page groups have pages of their own only where tokens are evicted"
    return Scheduler(cache.plan, limits, pages, slots)

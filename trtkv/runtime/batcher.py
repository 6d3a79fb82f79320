"""Continuous batching over one engine: calls come and go between steps, every step serves all that run.

Whoever wants an answer drives: `advance` runs one step for everybody and hands each call its events. A lock makes that safe from several threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trtkv.errors import EngineError, TrtkvError
from trtkv.runtime.loading import Engine
from trtkv.runtime.sampler import SamplingParams, StopChecker, choose, not_finite, top_logprobs
from trtkv.runtime.scheduler import Running, Scheduler
from trtkv.runtime.stats import Stats, StepFigures
from trtkv.runtime.step import StepRow
from trtkv.runtime.tokenizer import Tokenizer

Batch = list[tuple[Running, StepRow]]


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of one answer: request is the prompt's index, text what became final with this token, finish_reason set with the last.

    top holds the likeliest tokens with their log probabilities where they were asked for. An answer that cannot go on ends with the reason
    "error" and what was wrong; the others of its batch go on.
    """

    request: int
    token_id: int | None
    text: str
    logprob: float | None = None
    finish_reason: str | None = None
    top: Sequence[tuple[int, float]] = ()
    error: TrtkvError | None = None


@dataclass(slots=True, eq=False)
class Call:
    """Prompts that were asked together: events are those not yet taken, wake is called whenever there are more."""

    params: Sequence[SamplingParams]
    events: deque[Event] = field(default_factory=deque)
    stats: Stats = field(default_factory=Stats)
    open: set[int] = field(default_factory=set)
    wake: Callable[[], None] = lambda: None
    checkers: list[StopChecker] = field(default_factory=list)
    members: list[Running] = field(default_factory=list)


class Batcher:
    """The sequences of one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        """Serve an engine; nothing else may use its slots and pages at the same time."""
        self.engine, self.tokenizer = engine, tokenizer
        self.scheduler = Scheduler(engine.session.plan, engine.manifest.limits, engine.pages, engine.slots)
        self.lock = threading.RLock()
        self.evicted_tokens = 0.0  # of sequences that have ended, mean over layers and KV heads
        self._calls: dict[Running, Call] = {}

    @property
    def busy(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self._calls)

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, priority: int = 0, wake: Callable[[], None] = lambda: None
    ) -> Call:
        """Queue prompts in tokens; raises RequestError, and queues none, when one can never be served."""
        for tokens, settings in zip(prompts, params, strict=True):
            self.scheduler.check(tokens, settings.max_tokens)
        ends = self.engine.manifest.model.eos_ids
        call = Call(params, wake=wake, checkers=[StopChecker(one, self.tokenizer, ends) for one in params])
        with self.lock:
            for index, (tokens, settings) in enumerate(zip(prompts, params, strict=True)):
                one = Running(index, list(tokens), len(tokens), settings.max_tokens, priority)
                self.scheduler.add(one)
                self._calls[one] = call
                call.members.append(one)
                call.open.add(index)
        return call

    def cancel(self, call: Call) -> None:
        """Drop what a call has not finished and free what it holds."""
        with self.lock:
            for one in call.members:
                self._drop(one)

    def advance(self) -> bool:
        """Run one step for everybody; False when nothing is left to do."""
        with self.lock:
            batch = self.scheduler.next()
            if not batch:
                return False
            started = time.perf_counter()
            logits = self.engine.stepper.run([row for _, row in batch])
            wanted = [one for one, row in batch if row.logits_of]
            ids, logprobs, tops = self._sample(logits, wanted)
            self._count(batch, time.perf_counter() - started)
            for one, row in batch:
                one.seen += len(row.tokens)
                self.scheduler.stored(one)
            touched = self._calls_of(wanted)
            for row, (one, token, logprob) in enumerate(zip(wanted, ids, logprobs, strict=True)):
                self._answer_or_end(one, token, logprob, tops.get(row, ()))
            for call in touched:
                call.wake()
            return True

    def _sample(self, logits: Tensor, wanted: Sequence[Running]) -> tuple[list[int], list[float | None], dict[int, list[tuple[int, float]]]]:
        if not wanted:
            return [], [], {}
        settings = [self._calls[one].params[one.request] for one in wanted]
        ids, logprobs = choose(logits, settings, [one.tokens for one in wanted], [one.num_prompt for one in wanted])
        rows = [row for row, one in enumerate(settings) if one.top_logprobs and ids[row] >= 0]
        most = top_logprobs(logits[rows], max(settings[row].top_logprobs for row in rows)) if rows else []
        return ids, logprobs, {row: top[: settings[row].top_logprobs] for row, top in zip(rows, most, strict=True)}

    def _count(self, batch: Batch, seconds: float) -> None:
        step = StepFigures.of(self.engine.session, batch, seconds)
        for call in self._calls_of([one for one, _ in batch]):
            call.stats.add_step(step)

    def _calls_of(self, sequences: Sequence[Running]) -> list[Call]:
        return list(dict.fromkeys(self._calls[one] for one in sequences))

    def _answer_or_end(self, one: Running, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        """Answer one sequence; whatever goes wrong with it ends it alone."""
        call = self._calls[one]
        try:
            if token < 0:
                raise not_finite(f"sequence {one.request}")
            self._answer(one, call, token, logprob, top)
        except Exception as error:  # noqa: BLE001 (a checker or tokenizer that fails on one text must not take the batch with it)
            known = error if isinstance(error, TrtkvError) else EngineError(f"the answer could not go on: {error}", "Report it with the prompt.")
            call.events.append(Event(one.request, None, "", finish_reason="error", error=known))
            self._drop(one)

    def _answer(self, one: Running, call: Call, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        if not one.num_generated:
            call.stats.reused_tokens += one.reused
        one.tokens.append(token)
        text, reason = call.checkers[one.request].push(token)
        if reason is None and one.num_generated >= one.max_tokens:
            # The engine's limit can come before the request's own, which the checker counts.
            text, reason = text + call.checkers[one.request].flush(), "length"
        call.events.append(Event(one.request, token, text, logprob, reason, top))
        if reason is not None:
            self._drop(one)

    def _drop(self, one: Running) -> None:
        call = self._calls.pop(one, None)
        if call is None:
            return
        call.open.discard(one.request)
        if one.slot >= 0:
            self.evicted_tokens += self._evicted(one)
            self.engine.session.release(one.slot)
        self.scheduler.remove(one)

    def _evicted(self, one: Running) -> float:
        """Return the tokens of a sequence that its caches no longer hold."""
        session = self.engine.session
        if session.held is None or session.plan.evict is None or not one.seen:
            return 0.0
        caches = [session.held.find(layer, one.slot) for layer in range(session.plan.num_layers)]
        return sum(cache.seen - sum(cache.lengths) / len(cache.lengths) for cache in caches) / len(caches)

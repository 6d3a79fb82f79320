"""Requests to repeat a prompt, where a policy evicts by what the model reads meanwhile: further rows of the step that completes the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trtkv.config import Limits
from trtkv.errors import EngineError
from trtkv.plan import CachePlan
from trtkv.repeat import WORDS, Repeat, RepeatPlan
from trtkv.runtime.rows import StepRow

Encode = Callable[[str], Sequence[int]]


class Repeater:
    """Follows prompts as they are read."""

    @staticmethod
    def of(plan: CachePlan, limits: Limits, encode: Encode | None) -> Repeater | None:
        """Return what a plan needs, None where it has no prompt repeated; raises EngineError where there is nothing to turn text into tokens."""
        if plan.evict is None or plan.evict.repeat is None:
            return None
        if encode is None:
            problem = f"policy '{plan.policy}' has prompts repeated, and the engine was built without a tokenizer"
            raise EngineError(problem, "Build from a checkpoint that has one.")
        return Repeater(plan.evict.repeat, encode, limits.max_chunk_tokens)

    def __init__(self, plan: RepeatPlan, encode: Encode, chunk: int) -> None:
        """Take how prompts are repeated, what turns text into tokens without special ones, and the most tokens of a step."""
        self._plan, self._chunk = plan, chunk
        self._first, self._later, self._end = (list(encode(words)) for words in (plan.first, plan.later, plan.end))
        words = max(len(self._first), len(self._later)) + len(self._end)
        if words > WORDS:
            raise EngineError(f"the words that request a prompt again are {words} tokens, and {WORDS} are set aside", "Choose another policy.")
        self._prompts: dict[int, list[int]] = {}  # by slot, as far as they have been read

    def rows(self, row: StepRow) -> Iterator[StepRow]:
        """Yield what follows a row that has been read: the requests to repeat its prompt, where it completes one that is to be repeated."""
        prompt = row.seen + len(row.tokens) if row.prompt is None else row.prompt
        if row.seen == 0:
            self._prompts[row.slot] = []
        if row.seen >= prompt or row.slot not in self._prompts:
            return
        read = self._prompts[row.slot]
        read += row.tokens
        if len(read) < prompt:
            return
        for part in self._plan.parts(prompt):
            request = self._request(read, part)
            place = 0
            for size in evenly(len(request), self._chunk):
                ends = place + size == len(request)
                of = Repeat(part.start, part.stop, prompt, ends, ends and part.stop == prompt)
                yield replace(row, tokens=request[place : place + size], seen=prompt + place, logits_of=(), prompt=prompt, repeat=of)
                place += size
        del self._prompts[row.slot]

    def _request(self, prompt: Sequence[int], part: range) -> list[int]:
        before = prompt[max(0, part.start - self._plan.overlap) : part.start]
        return [*(self._later if part.start else self._first), *before, *self._end, *prompt[part.start : part.stop]]


def evenly(tokens: int, most: int) -> Iterator[int]:
    """Cut so many tokens into chunks of at most `most` that differ by one: none has a single token unless all do."""
    count = -(-tokens // most)
    for index in range(count):
        yield (tokens * (index + 1)) // count - (tokens * index) // count

"""Greedy answers that do not depend on what else runs: every prompt is prefilled alone in fixed chunks, then all sequences decode together.

A policy that evicts while a prompt comes in chunks would otherwise see other chunks in another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from torch import Tensor

from trtkv.errors import CapacityError
from trtkv.runtime.llm import LLM
from trtkv.runtime.rows import StepRow
from trtkv.runtime.sampler import SamplingParams, StopChecker, sample


@dataclass(slots=True)
class Answer:
    """One answer on its way: prompt and generated tokens, of which `fed` are in the cache, and the bytes it held at its fullest behind the prompt."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    checker: StopChecker
    slot: int
    pages: Sequence[int]
    fed: int = 0
    text: str = ""
    held_bytes: int = 0
    ended: bool = False

    def step(self, count: int) -> StepRow:
        """Feed the next tokens; the prediction behind the last is asked for when none is left."""
        asked = (count - 1,) if self.fed + count == len(self.tokens) else ()
        return StepRow(self.tokens[self.fed : self.fed + count], self.fed, self.slot, self.pages, asked, self.num_prompt)


@dataclass(slots=True)
class Generated:
    """Answers in the order of the prompts, and what they cost: bytes of one sequence and tokens that a decoded one read, both means."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    read_tokens: float = 0.0
    reads: int = 0

    @property
    def stored_bytes(self) -> float:
        """Bytes of a sequence at its fullest behind its prompt."""
        return fmean(self.held_bytes)

    @property
    def tokens_read_per_step(self) -> float:
        """Stored tokens that a decoded token read, mean over layers."""
        return self.read_tokens / max(1, self.reads)


def generate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    batch: int,
    report: Callable[[float], None] = lambda fraction: None,
    ignore_eos: bool = False,
) -> Generated:
    """Answer prompts in tokens greedily, batch of them at once; report takes the fraction that is done, in tokens.

    ignore_eos writes on behind the end of a text, to max_tokens. Raises RequestError for a prompt that the engine cannot take, CapacityError when
    another call holds the engine.
    """
    found, done, total = Generated(), 0, sum(map(len, prompts)) + sum(max_tokens)

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        report(done / total)

    for start in range(0, len(prompts), batch):
        own = slice(start, start + batch)
        with _admitted(llm, prompts[own], max_tokens[own], ignore_eos) as answers:
            for one in answers:
                _prefill(llm, one, count)
            while running := [one for one in answers if not one.ended]:
                _decode(llm, running, found)
                count(len(running))
            found.texts += [one.text for one in answers]
            found.token_ids += [one.tokens[one.num_prompt :] for one in answers]
            found.held_bytes += [one.held_bytes for one in answers]
    return found


@contextmanager
def _admitted(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], ignore_eos: bool) -> Iterator[list[Answer]]:
    """Lend slots and pages to prompts for the block."""
    engine, answers = llm.engine, list[Answer]()
    try:
        for tokens, most in zip(prompts, max_tokens, strict=True):
            llm.batcher.scheduler.check(tokens, most)
            if not engine.slots:
                raise CapacityError("another call holds the engine's slots", "Finish or close it first.")
            pages = engine.pages.take(engine.pages_for(len(tokens), len(tokens) + most))
            params = SamplingParams(max_tokens=min(most, engine.manifest.limits.max_seq_len - len(tokens)), ignore_eos=ignore_eos)
            checker = StopChecker(params, llm.tokenizer, engine.manifest.model.eos_ids)
            answers.append(Answer(list(tokens), len(tokens), params, checker, engine.slots.pop(), pages))
        yield answers
    finally:
        for one in answers:
            engine.cache.release(one.slot)
            engine.pages.give(one.pages)
            engine.slots.append(one.slot)


def _prefill(llm: LLM, one: Answer, count: Callable[[int], None]) -> None:
    for size in chunk_sizes(one.num_prompt, llm.engine.manifest.limits.max_chunk_tokens):
        logits = llm.engine.stepper.run([one.step(size)])
        one.fed += size
        count(size)
    _take(llm, [one], logits)


def _decode(llm: LLM, running: Sequence[Answer], found: Generated) -> None:
    logits = llm.engine.stepper.run([one.step(1) for one in running])
    for one in running:
        one.fed += 1
    found.read_tokens += llm.engine.cache.read_tokens
    found.reads += len(running)
    _take(llm, running, logits)


def _take(llm: LLM, answers: Sequence[Answer], logits: Tensor) -> None:
    """Append the likeliest tokens and weigh what is held; raises EngineError for logits that are not finite."""
    cache = llm.engine.cache
    ids, _ = sample(logits, [one.params for one in answers], [one.tokens for one in answers], [one.num_prompt for one in answers])
    for one, token in zip(answers, ids, strict=True):
        one.held_bytes = max(one.held_bytes, cache.bytes_of(one.slot, one.fed))
        one.tokens.append(token)
        text, reason = one.checker.push(token)
        one.text += text
        one.ended = reason is not None


def chunk_sizes(num_tokens: int, most: int) -> list[int]:
    """Cut a prompt into chunks; none but a whole prompt has one token, which would be taken for a step that decodes."""
    sizes, left = [], num_tokens
    while left:
        size = min(left, most)
        if left == most + 1 and most > 2:
            size -= 1
        sizes.append(size)
        left -= size
    return sizes

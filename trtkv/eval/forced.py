"""Teacher-forced decoding: a prompt is prefilled, then given tokens are fed one by one, so that policies act as in real decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from trtkv.errors import CapacityError, RequestError
from trtkv.eval.task import Sample
from trtkv.runtime.llm import LLM
from trtkv.runtime.rows import StepRow


@dataclass(frozen=True, slots=True)
class Given:
    """A text in tokens whose first `prompt` ones are prefilled; the policy takes them for the whole prompt. The others are fed one by one."""

    tokens: Sequence[int]
    prompt: int


@dataclass(slots=True)
class Held:
    """What sequences held and read while they were forced: bytes of one at its fullest behind the prompt, tokens read by so many decoded ones."""

    stored_bytes: float = 0.0
    read_tokens: float = 0.0
    reads: int = 0

    @property
    def tokens_read_per_step(self) -> float:
        """Stored tokens that one decoded token read, mean over layers and decoded tokens."""
        return self.read_tokens / max(1, self.reads)

    def figures(self) -> dict[str, float]:
        """Return the two figures that every measurement carries."""
        return {"stored_bytes": self.stored_bytes, "tokens_read_per_step": self.tokens_read_per_step}

    def add(self, other: Held) -> None:
        """Count other sequences as well."""
        self.stored_bytes = max(self.stored_bytes, other.stored_bytes)
        self.read_tokens += other.read_tokens
        self.reads += other.reads


# Texts [R] and positions [R] whose next token the logits [R, V] fp32 predict: the token at `position` of that text.
Visit = Callable[[Sequence[int], Sequence[int], Tensor], None]


def force(llm: LLM, texts: Sequence[Given], visit: Visit, report: Callable[[float], None] = lambda fraction: None) -> Held:
    """Feed texts through an engine, as many at once as it has free slots and pages for, and show every prediction of a token behind the prompt.

    visit is called once a step; the last token of a text is predicted and never fed. Raises RequestError for a text without prompt or without
    a token behind it, or beyond the engine's length, and CapacityError when another call holds the engine.
    """
    for index, text in enumerate(texts):
        _check(index, text, llm.engine.manifest.limits.max_seq_len)
    held, waiting = Held(), list(range(len(texts)))
    done, total = 0, sum(len(text.tokens) - text.prompt for text in texts)
    while waiting:
        rows = _admit(llm, texts, waiting)
        try:
            for row in rows:
                _prefill(llm, row, visit, held)
            report(done / total)
            while running := [row for row in rows if row.fed < len(row.text.tokens) - 1]:
                _decode(llm, running, visit, held)
            done += sum(len(row.text.tokens) - row.text.prompt for row in rows)
            report(done / total)
        finally:
            for row in rows:
                llm.engine.cache.release(row.slot)
                llm.engine.pages.give(row.pages)
                llm.engine.slots.append(row.slot)
    return held


@dataclass(slots=True)
class _Row:
    """A text on its way: where it is stored, and how many of its tokens are."""

    index: int
    text: Given
    slot: int
    pages: list[int]
    fed: int = 0

    def step(self, count: int, asked: bool) -> StepRow:
        """Feed the next tokens, whose last one's prediction may be asked for."""
        tokens = list(self.text.tokens[self.fed : self.fed + count])
        return StepRow(tokens, self.fed, self.slot, self.pages, (count - 1,) if asked else (), self.text.prompt)


def _check(index: int, text: Given, longest: int) -> None:
    """Raise RequestError for a text that cannot be fed."""
    if not 1 <= text.prompt < len(text.tokens):
        raise RequestError(f"text {index} has {len(text.tokens)} tokens, {text.prompt} of them prompt", "A prompt and a token behind it are needed.")
    if len(text.tokens) > longest:
        raise RequestError(f"text {index} has {len(text.tokens)} tokens, the engine takes {longest}", "Shorten it, or raise --max-seq-len.")


def _admit(llm: LLM, texts: Sequence[Given], waiting: list[int]) -> list[_Row]:
    """Take slots and pages for as many waiting texts as there are; raises CapacityError when there are none for the first."""
    engine, rows = llm.engine, list[_Row]()
    while waiting and engine.slots:
        need = engine.pages_for(texts[waiting[0]].prompt, len(texts[waiting[0]].tokens))
        if not engine.pages.has(need):
            break
        index = waiting.pop(0)
        rows.append(_Row(index, texts[index], engine.slots.pop(), engine.pages.take(need)))
    if not rows:
        raise CapacityError("another call holds the engine's slots or pages", "Finish or close it first, or give the cache more memory.")
    return rows


def _run(llm: LLM, rows: Sequence[StepRow]) -> Tensor:
    """Run a step and wait for it: a captured step's inputs lie at fixed addresses, which the next step may only fill once this one has read them."""
    logits = llm.engine.stepper.run(rows)
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    return logits


def _prefill(llm: LLM, row: _Row, visit: Visit, held: Held) -> None:
    """Feed a prompt in chunks, none of one token behind others: that would be taken for a step that decodes."""
    chunk = llm.engine.manifest.limits.max_chunk_tokens
    while row.fed < row.text.prompt:
        left = row.text.prompt - row.fed
        count = left if left <= chunk else chunk - (left == chunk + 1 and chunk > 2)
        logits = _run(llm, [row.step(count, count == left)])
        row.fed += count
        if count == left:
            visit([row.index], [row.fed], logits)
    held.stored_bytes = max(held.stored_bytes, llm.engine.cache.stored_bytes())


def _decode(llm: LLM, rows: Sequence[_Row], visit: Visit, held: Held) -> None:
    """Feed one token of every text."""
    cache = llm.engine.cache
    logits = _run(llm, [row.step(1, True) for row in rows])
    for row in rows:
        row.fed += 1
    visit([row.index for row in rows], [row.fed for row in rows], logits)
    held.stored_bytes = max(held.stored_bytes, cache.stored_bytes() / len(rows))
    held.read_tokens += cache.read_tokens
    held.reads += len(rows)


def forced_logprobs(llm: LLM, texts: Sequence[Given], report: Callable[[float], None] = lambda fraction: None) -> tuple[list[Tensor], Held]:
    """Return for every text the log probabilities [n, V] fp32 with which its n tokens behind the prompt were predicted."""
    rows: list[list[Tensor]] = [[] for _ in texts]

    def keep(which: Sequence[int], positions: Sequence[int], logits: Tensor) -> None:
        for index, one in zip(which, logits.log_softmax(-1), strict=True):
            rows[index].append(one)

    held = force(llm, texts, keep, report)
    return [torch.stack(one) for one in rows], held


def forced_nll(llm: LLM, texts: Sequence[Given], report: Callable[[float], None] = lambda fraction: None) -> tuple[list[list[float]], Held]:
    """Return for every text the negative log-likelihood, in nats, of each token behind the prompt."""
    losses: list[list[float]] = [[] for _ in texts]

    def add(which: Sequence[int], positions: Sequence[int], logits: Tensor) -> None:
        targets = torch.tensor([texts[index].tokens[at] for index, at in zip(which, positions, strict=True)], device=logits.device)
        found = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        for index, loss in zip(which, found.tolist(), strict=True):
            losses[index].append(loss)

    held = force(llm, texts, add, report)
    return losses, held


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """How an answer was predicted token by token with the right ones before it.

    exact is 1 when every token was the likeliest, which is when greedy generation gives the answer; digits is the share of its digits that were (of
    its tokens, where it has no digit); nll is the mean negative log-likelihood of a token, in nats.
    """

    exact: float
    digits: float
    nll: float


def score_answers(
    llm: LLM, samples: Iterable[Sample], *, blind: bool = False, report: Callable[[float], None] = lambda fraction: None
) -> tuple[list[AnswerScore], Held]:
    """Score the targets of samples by teacher forcing.

    blind: only the context is the prompt, so a policy that acts at the prompt's end does not see the question, which is then fed token by token; else
    the question belongs to the prompt. Raises RequestError for a sample without target.
    """
    asked = [tokens_of(llm, sample, blind=blind) for sample in samples]
    hits: list[list[bool]] = [[] for _ in asked]
    losses: list[list[float]] = [[] for _ in asked]

    def compare(which: Sequence[int], positions: Sequence[int], logits: Tensor) -> None:
        wanted = torch.tensor([asked[index].text.tokens[at] for index, at in zip(which, positions, strict=True)], device=logits.device)
        found = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none").tolist()
        right = (logits.argmax(-1) == wanted).tolist()
        for index, at, hit, loss in zip(which, positions, right, found, strict=True):
            if at >= asked[index].answer:
                hits[index].append(hit)
                losses[index].append(loss)

    held = force(llm, [one.text for one in asked], compare, report)
    rows = zip(asked, hits, losses, strict=True)
    return [
        AnswerScore(float(all(hit)), fmean(x for x, digit in zip(hit, one.digits, strict=True) if digit), fmean(loss)) for one, hit, loss in rows
    ], held


@dataclass(frozen=True, slots=True)
class Asked:
    """A sample in tokens: where its answer begins, and which of the answer's tokens hold digits (all, where none does)."""

    text: Given
    answer: int
    digits: tuple[bool, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the tokens and the two places, for programs that score the same sample."""
        return {"tokens": list(self.text.tokens), "prompt": self.text.prompt, "answer": self.answer, "digits": list(self.digits)}


def tokens_of(llm: LLM, sample: Sample, *, blind: bool) -> Asked:
    """Put a sample into tokens, the prompt being its context alone (blind) or all before the answer; raises RequestError without a target.

    The answer begins where the tokens of prompt and target leave those of the prompt alone.
    """
    if not sample.target:
        raise RequestError("a sample has no target text", "Score its answer by generation instead.")
    prompt, whole = llm.encode(sample.prompt), llm.encode(sample.prompt + sample.target)
    answer = next((index for index, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    assert llm.tokenizer is not None
    tokens = whole[answer:]
    digits = tuple(any(letter.isdigit() for letter in llm.tokenizer.decode([token])) for token in tokens)
    start = min(sample.compressible_tokens(llm.encode), answer) if blind else answer
    return Asked(Given(whole, start), answer, digits if any(digits) else (True,) * len(tokens))

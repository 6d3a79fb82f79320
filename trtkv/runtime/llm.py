"""Text in, text out: the public face of a running engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from trtkv.errors import RequestError
from trtkv.runtime.loading import Engine, Options, Progress, open_engine
from trtkv.runtime.sampler import SamplingParams, StopChecker, sample
from trtkv.runtime.scheduler import Running, Scheduler
from trtkv.runtime.stats import Stats
from trtkv.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of one answer: request is the prompt's index, text what became final with this token, finish_reason set with the last."""

    request: int
    token_id: int | None
    text: str
    logprob: float | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class Completion:
    """One answer: finish_reason is "stop" (end of text or a stop string) or "length"."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class LLM:
    """An engine with its tokenizer, ready to generate; `stats` describes the last call."""

    def __init__(
        self,
        engine: str | Path,
        *,
        weights: str | Path | None = None,
        device: str = "auto",
        executor: str = "auto",
        cache_bytes: int | None = None,
        progress: Progress = lambda stage, fraction: None,
    ) -> None:
        """Open an engine directory.

        Args:
            engine: Directory that `trtkv build` made.
            weights: Checkpoint directory, "random", or None for the one the engine was built from.
            device: auto, cpu, cuda or cuda:N.
            executor: auto (TensorRT where it runs, else torch), torch or tensorrt.
            cache_bytes: Memory for the KV cache; None takes what is free, up to full length for every sequence.
            progress: Called with a stage and a fraction while weights are read.
        """
        options = Options(None if weights is None else str(weights), device, executor, cache_bytes)
        self.engine: Engine = open_engine(Path(engine), options, progress)
        self.tokenizer = Tokenizer(Path(engine)) if (Path(engine) / "tokenizer.json").is_file() else None
        self.stats = Stats()

    @property
    def executor_name(self) -> str:
        """What runs the graph: torch, or the TensorRT backend's name."""
        return self.engine.stepper.executor.name

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()) -> list[Completion]:  # noqa: B008
        """Answer prompts (texts or token ids), batched as the engine allows; the answers are in the order of the prompts.

        Raises RequestError for a prompt that is empty or longer than the engine takes.
        """
        tokens = self._encode(prompts)
        answers = [Completion(len(one)) for one in tokens]
        for event in self._run(tokens, self._params(params, len(tokens))):
            answer = answers[event.request]
            answer.text += event.text
            if event.token_id is not None:
                answer.token_ids.append(event.token_id)
            if event.logprob is not None:
                answer.logprobs.append(event.logprob)
            answer.finish_reason = event.finish_reason or answer.finish_reason
        return answers

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()) -> Iterator[Event]:  # noqa: B008
        """Answer prompts piece by piece; closing the iterator frees what the unfinished ones hold."""
        tokens = self._encode(prompts)
        return self._run(tokens, self._params(params, len(tokens)))

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Render chat messages to a prompt with the checkpoint's template; raises RequestError when it has none."""
        return self._tokenizer().chat(list(messages))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt as `generate` would feed them; raises RequestError without a tokenizer."""
        return self._tokenizer().encode(text)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("the engine was built without a tokenizer", "Give token ids instead of text, or build from a checkpoint that has one.")
        return self.tokenizer

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        several = not isinstance(prompts, str) and not (len(prompts) and isinstance(prompts[0], int))
        tokens = []
        for prompt in prompts if several else [prompts]:  # type: ignore[union-attr]
            tokens.append(self._tokenizer().encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt])  # type: ignore[union-attr]
        vocab = self.engine.manifest.model.vocab_size
        for one in tokens:
            wrong = next((token for token in one if not 0 <= token < vocab), None)
            if wrong is not None:
                raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab}", "Use the model's own tokenizer.")
        return tokens

    def _params(self, params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
        every = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(every) != count:
            raise RequestError(f"{len(every)} sampling parameters for {count} prompts", "Give one, or one a prompt.")
        return every

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[Event]:
        engine = self.engine
        scheduler = Scheduler(engine.session.plan, engine.manifest.limits, engine.pages, engine.slots)
        for one, settings in zip(prompts, params, strict=True):
            scheduler.check(one, settings.max_tokens)
        stats = self.stats = Stats()
        checkers = [StopChecker(settings, self.tokenizer, engine.manifest.model.eos_ids) for settings in params]
        for index, (one, settings) in enumerate(zip(prompts, params, strict=True)):
            scheduler.add(Running(index, list(one), len(one), settings.max_tokens))
        everything = [*scheduler.waiting]
        try:
            while batch := scheduler.next():
                started = time.perf_counter()
                logits = engine.stepper.run([row for _, row in batch])
                wanted = [one for one, row in batch if row.logits_of]
                ids, logprobs = _sample(logits, wanted, params)
                stats.add_step(engine.session, batch, time.perf_counter() - started)
                for one, row in batch:
                    one.seen += len(row.tokens)
                for one, token, logprob in zip(wanted, ids, logprobs, strict=True):
                    yield self._advance(scheduler, one, token, logprob, checkers[one.request])
        finally:
            for one in everything:
                self._drop(scheduler, one)

    def _drop(self, scheduler: Scheduler, one: Running) -> None:
        if one.slot >= 0:
            self.engine.session.release(one.slot)
        scheduler.remove(one)

    def _advance(self, scheduler: Scheduler, one: Running, token: int, logprob: float | None, checker: StopChecker) -> Event:
        one.tokens.append(token)
        text, reason = checker.push(token)
        if reason is None and one.num_generated >= one.max_tokens:
            # The engine's limit can come before the request's own, which the checker counts.
            text, reason = text + checker.flush(), "length"
        if reason is not None:
            self._drop(scheduler, one)
        return Event(one.request, token, text, logprob, reason)


def _sample(logits: Tensor, wanted: Sequence[Running], params: Sequence[SamplingParams]) -> tuple[list[int], list[float | None]]:
    if not wanted:
        return [], []
    settings = [params[one.request] for one in wanted]
    return sample(logits, settings, [one.tokens for one in wanted], [one.num_prompt for one in wanted])

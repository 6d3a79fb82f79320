"""Long generation: how long a policy writes what full KV writes, and how likely it finds full's text once they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from weakref import ref

import torch
from torch import Tensor

from trtkv.errors import ConfigError
from trtkv.eval.forced import Given, force
from trtkv.eval.generate import generate
from trtkv.eval.perplexity import Perplexity, windows
from trtkv.eval.task import Bench
from trtkv.runtime.llm import LLM

GENERATED = 2048
LEAST_PROMPT = 16


class LongGeneration(Perplexity):
    """Greedy generation of 2,048 tokens behind a prompt of the text; length counts both.

    "agreement": share of full's tokens that the policy predicts behind full's own text; "same": share of places at which the freely generated texts
    hold the same token; "diverged": tokens before the first difference (all, if there is none); "nll" the policy's loss on full's text in nats a
    token, "full_nll" full's own.
    """

    main = "agreement"
    higher_is_better = True

    def __init__(self, options: object, name: str = "long-generation", generated: int = GENERATED) -> None:
        """Take the text's file, or None."""
        super().__init__(options, name)  # type: ignore[arg-type]
        self._generated = generated
        self._full: _Full | None = None

    @property
    def identity(self) -> str:
        """The text, and how much is generated."""
        return f"{super().identity} generated {self._generated}"

    def measure(self, bench: Bench) -> Mapping[str, float]:
        """Generate behind `samples` prompts with both; raises ConfigError where the length leaves no prompt."""
        prompt = bench.length - self._generated
        if prompt < LEAST_PROMPT:
            least = self._generated + LEAST_PROMPT
            raise ConfigError(f"the task '{self.name}' generates {self._generated} tokens behind a prompt", f"Give at least --length {least}.")
        prompts = [list(text.tokens) for text in windows(bench.llm, self._data, prompt, bench.samples, bench.seed)]
        full = self._of_full(bench, prompts)
        written = self._generate(bench.llm, prompts, bench, (1 / 2, 3 / 4))
        losses, hits, held = _follow(bench.llm, full.given(prompts), lambda part: bench.report(3 / 4 + part / 4))
        pairs = list(zip(full.written, written, strict=True))
        return {
            "agreement": fmean(fmean(one) for one in hits),
            "same": fmean(fmean(a == b for a, b in zip(theirs, mine, strict=True)) for theirs, mine in pairs),
            "diverged": fmean(first_difference(theirs, mine) for theirs, mine in pairs),
            "nll": fmean(fmean(one) for one in losses),
            "full_nll": full.nll,
            **held,
        }

    def _of_full(self, bench: Bench, prompts: list[list[int]]) -> _Full:
        """Return what full KV writes behind the prompts; kept for the next policy, as long as full stays open."""
        llm, key = bench.full(), (bench.length, bench.samples, bench.seed, bench.batch)
        if self._full is None or self._full.llm() is not llm or self._full.key != key:
            found = _Full(ref(llm), key, self._generate(llm, prompts, bench, (0.0, 1 / 4)))
            found.nll = fmean(fmean(one) for one in _follow(llm, found.given(prompts), lambda part: bench.report((1 + part) / 4))[0])
            self._full = found
        return self._full

    def _generate(self, llm: LLM, prompts: list[list[int]], bench: Bench, span: tuple[float, float]) -> list[list[int]]:
        """Write exactly so many tokens behind every prompt, ends of text included; span is the part of the whole work."""
        start, end = span
        most = [self._generated] * len(prompts)
        return generate(llm, prompts, most, bench.batch, lambda part: bench.report(start + (end - start) * part), ignore_eos=True).token_ids


@dataclass(slots=True)
class _Full:
    """Texts that full KV wrote, and its loss on them in nats a token; the engine itself is the runner's to close."""

    llm: ref[LLM]
    key: tuple[int, ...]
    written: list[list[int]]
    nll: float = 0.0

    def given(self, prompts: list[list[int]]) -> list[Given]:
        """Put prompts and texts together, to be fed."""
        return [Given([*start, *text], len(start)) for start, text in zip(prompts, self.written, strict=True)]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts of one length share before they differ."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _follow(llm: LLM, texts: Sequence[Given], report: Callable[[float], None]) -> tuple[list[list[float]], list[list[float]], dict[str, float]]:
    """Feed texts and return each token's loss, whether it was the likeliest, and what the sequences held."""
    losses: list[list[float]] = [[] for _ in texts]
    hits: list[list[float]] = [[] for _ in texts]

    def visit(which: Sequence[int], positions: Sequence[int], logits: Tensor) -> None:
        targets = torch.tensor([texts[index].tokens[at] for index, at in zip(which, positions, strict=True)], device=logits.device)
        found = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none").tolist()
        right = (logits.argmax(-1) == targets).float().tolist()
        for index, loss, hit in zip(which, found, right, strict=True):
            losses[index].append(loss)
            hits[index].append(hit)

    held = force(llm, texts, visit, report)
    return losses, hits, held.figures()

"""Long generation: how long a policy writes what full KV writes, and how likely it finds full's text once they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from trtkv.errors import ConfigError
from trtkv.eval.forced import Given, force
from trtkv.eval.perplexity import Perplexity, windows
from trtkv.eval.task import Bench
from trtkv.runtime.llm import LLM
from trtkv.runtime.sampler import SamplingParams

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
        texts = windows(bench.llm, self._data, prompt, bench.samples, bench.seed)
        prompts = [list(text.tokens) for text in texts]
        wanted = _generate(bench.full(), prompts, self._generated)
        bench.report(1 / 4)
        written = _generate(bench.llm, prompts, self._generated)
        bench.report(1 / 2)
        given = [Given([*start, *text], prompt) for start, text in zip(prompts, wanted, strict=True)]
        full_losses = _follow(bench.full(), given)[0]
        bench.report(3 / 4)
        losses, hits, held = _follow(bench.llm, given, bench)
        pairs = list(zip(wanted, written, strict=True))
        return {
            "agreement": fmean(fmean(one) for one in hits),
            "same": fmean(fmean(a == b for a, b in zip(full, mine, strict=True)) for full, mine in pairs),
            "diverged": fmean(first_difference(full, mine) for full, mine in pairs),
            "nll": fmean(fmean(one) for one in losses),
            "full_nll": fmean(fmean(one) for one in full_losses),
            **held,
        }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts of one length share before they differ."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _generate(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generate exactly so many tokens behind every prompt, ends of text included."""
    answers = llm.generate(prompts, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
    return [one.token_ids for one in answers]


def _follow(llm: LLM, texts: Sequence[Given], bench: Bench | None = None) -> tuple[list[list[float]], list[list[float]], dict[str, float]]:
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

    held = force(llm, texts, visit, (lambda part: bench.report(3 / 4 + part / 4)) if bench else (lambda part: None))
    return losses, hits, held.figures()

"""Next-token agreement and KL divergence against full KV on the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from trtkv.errors import ConfigError
from trtkv.eval.decoding import Cost, Given, Report, silent
from trtkv.eval.perplexity import Perplexity, standard_error, windows
from trtkv.eval.task import Bench
from trtkv.eval.teacher_forcing import force, forced_logprobs
from trtkv.runtime.llm import LLM

FIGURES = ("agreement", "kl", "nll", "full_nll")


class Agreement(Perplexity):
    """Share of tokens at which the policy's likeliest next token is full KV's, on the windows of the perplexity task.

    "kl" is the mean divergence KL(full || policy) of the next-token distributions in nats, "nll" and "full_nll" the losses of both.
    """

    main = "agreement"
    higher_is_better = True

    def measure(self, bench: Bench) -> Mapping[str, float]:
        """Run both over the ends of `samples` windows."""
        return compare(bench.llm, bench.full(), windows(bench.llm, self._data, bench.length, bench.samples, bench.seed), bench.report)


def compare(llm: LLM, full: LLM, texts: Sequence[Given], report: Report = silent) -> dict[str, float]:
    """Compare two engines' predictions after the prompts of texts: agreement, kl, nll, full_nll, with standard errors over texts.

    Texts are taken as many at a time as the engine takes sequences, so that only their predictions by full are in memory. Raises ConfigError when
    the two engines do not share a vocabulary.
    """
    sizes = [one.engine.manifest.model.vocab_size for one in (llm, full)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens cannot be compared", "Compare engines of one model.")
    rows, cost, batch = list[list[float]](), Cost(), llm.engine.manifest.limits.max_batch_size
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        found, one = _against(llm, part, forced_logprobs(full, part)[0])
        rows += found
        cost.add(one)
        report((start + len(part)) / len(texts))
    figures = dict(zip(FIGURES, zip(*rows, strict=True), strict=True))
    errors = {f"{name}_error": standard_error(values) for name, values in figures.items()}
    return {**{name: fmean(values) for name, values in figures.items()}, **errors, **cost.figures()}


def _against(llm: LLM, texts: Sequence[Given], wanted: Sequence[Tensor]) -> tuple[list[list[float]], Cost]:
    """Return each text's mean figures; wanted: full's log probabilities [n, V]."""
    sums = torch.zeros(len(texts), len(FIGURES), dtype=torch.float64)

    def visit(which: Sequence[int], positions: Sequence[int], logits: Tensor) -> None:
        places = list(zip(which, positions, strict=True))
        mine = logits.float().log_softmax(-1)
        full = torch.stack([wanted[index][at - texts[index].prompt] for index, at in places])
        targets = torch.tensor([[texts[index].tokens[at]] for index, at in places], device=mine.device)
        kl = (full.exp() * (full - mine)).sum(-1)
        found = [(mine.argmax(-1) == full.argmax(-1)).float(), kl, -mine.gather(1, targets)[:, 0], -full.gather(1, targets)[:, 0]]
        sums[list(which)] += torch.stack(found, 1).double().cpu()

    cost = force(llm, texts, visit)
    return (sums / torch.tensor([[len(text.tokens) - text.prompt] for text in texts])).tolist(), cost

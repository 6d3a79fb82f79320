"""Next-token agreement and KL divergence against full KV on the same text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from trtkv.errors import ConfigError
from trtkv.eval.forced import Given, Held, force, forced_logprobs
from trtkv.eval.perplexity import Perplexity, windows
from trtkv.eval.task import Bench
from trtkv.runtime.llm import LLM


class Agreement(Perplexity):
    """Share of tokens at which the policy's likeliest next token is full KV's, on the windows of the perplexity task.

    "kl" is the mean divergence KL(full || policy) of the next-token distributions in nats, "nll" and "full_nll" the losses of both.
    """

    main = "agreement"
    higher_is_better = True

    def measure(self, bench: Bench) -> Mapping[str, float]:
        """Run both over the ends of `samples` windows."""
        return compare(bench.llm, bench.full(), windows(bench.llm, self._data, bench.length, bench.samples, bench.seed), bench.report)


def compare(llm: LLM, full: LLM, texts: Sequence[Given], report: Callable[[float], None] = lambda fraction: None) -> dict[str, float]:
    """Compare two engines' predictions behind the prompts of texts: agreement, kl, nll, full_nll, with standard errors over texts.

    Texts are taken as many at a time as the engine holds, so that full's predictions of those alone are kept. Raises ConfigError when the two
    engines do not share a vocabulary.
    """
    sizes = [one.engine.manifest.model.vocab_size for one in (llm, full)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens cannot be compared", "Compare engines of one model.")
    rows: dict[str, list[float]] = {"agreement": [], "kl": [], "nll": [], "full_nll": []}
    held = Held()
    batch = llm.engine.manifest.limits.max_batch_size
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        wanted, _ = forced_logprobs(full, part)
        found, one = _against(llm, part, wanted)
        for name, values in found.items():
            rows[name] += values
        held.add(one)
        report(min(1.0, (start + len(part)) / len(texts)))
    errors = {f"{name}_error": stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0 for name, values in rows.items()}
    return {**{name: fmean(values) for name, values in rows.items()}, **errors, **held.figures()}


def _against(llm: LLM, texts: Sequence[Given], wanted: Sequence[Tensor]) -> tuple[dict[str, list[float]], Held]:
    """Return each text's mean figures; wanted are full's log probabilities [n, V]."""
    sums = torch.zeros(4, len(texts), dtype=torch.float64)

    def visit(which: Sequence[int], positions: Sequence[int], logits: Tensor) -> None:
        mine = logits.float().log_softmax(-1)
        full = torch.stack([wanted[index][at - texts[index].prompt] for index, at in zip(which, positions, strict=True)])
        targets = torch.tensor([[texts[index].tokens[at]] for index, at in zip(which, positions, strict=True)], device=mine.device)
        kl = (full.exp() * (full - mine)).sum(-1)
        found = [(mine.argmax(-1) == full.argmax(-1)).float(), kl, -mine.gather(1, targets)[:, 0], -full.gather(1, targets)[:, 0]]
        sums[:, list(which)] += torch.stack(found).double().cpu()

    held = force(llm, texts, visit)
    counts = torch.tensor([len(text.tokens) - text.prompt for text in texts])
    return dict(zip(("agreement", "kl", "nll", "full_nll"), (sums / counts).tolist(), strict=True)), held

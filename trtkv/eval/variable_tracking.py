"""Variable tracking as RULER defines it: assignments spread over a text, all variables of one value asked for (arXiv 2404.06654, section 3).

One chain of four hops among repeated sentences and a short solved example before it, as in RULER; the wording is this package's own, and the answer
is as long as the names need.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from itertools import pairwise

from trtkv.errors import ConfigError
from trtkv.eval.haystack import FILLER, CountTokens, hide_all, repeated
from trtkv.eval.strings import recall
from trtkv.eval.task import AnswerTask, Sample

HOPS, SLACK, SPARE = 4, 8, 12  # hops of the chain; tokens for joins that a tokenizer may count otherwise; words of an answer beside the names
INTRODUCTION = "Keep track of the variables that are assigned in the following text."


class VariableTracking(AnswerTask):
    """Five variables of one value: "score" is the share that the answer names, "exact" 1 when it names all."""

    name = "variable-tracking"

    def samples(self, length_tokens: int, count: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Build samples; the assignments stand in their order anywhere in the text."""
        return [self._sample(length_tokens, random.Random(f"{self.name} {length_tokens} {seed} {index}"), count_tokens) for index in range(count)]

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Look for the names."""
        return recall(text, sample.answers)

    def _sample(self, length: int, rng: random.Random, count_tokens: CountTokens) -> Sample:
        drawn = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(2 * (HOPS + 1))]
        first, second = (str(rng.randrange(10_000, 100_000)) for _ in range(2))
        shown, names = drawn[: HOPS + 1], drawn[HOPS + 1 :]
        example = _text(FILLER * 2, shown, first, rng) + _question(first) + f" {' '.join(shown)}"
        answer_tokens = count_tokens(f" {' '.join(names)}") + SPARE
        fixed = (example, "\n\n", INTRODUCTION, *(f" {one}" for one in _assignments(names, second)), _question(second))
        room = length - answer_tokens - sum(map(count_tokens, fixed)) - SLACK
        if room < 0:
            raise ConfigError(f"{length} tokens do not hold the task '{self.name}' with its answer", "Give a greater --length.")
        text = _text(repeated(room, count_tokens), names, second, rng)
        return Sample(f"{example}\n\n{text}", _question(second), tuple(names), answer_tokens)


def _assignments(names: Sequence[str], value: str) -> list[str]:
    return [f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {before}" for before, name in pairwise(names))]


def _text(filler: Sequence[str], names: Sequence[str], value: str, rng: random.Random) -> str:
    places = sorted(rng.random() for _ in names)
    return f"{INTRODUCTION}\n{' '.join(hide_all(filler, list(zip(_assignments(names, value), places, strict=True))))}"


def _question(value: str) -> str:
    return (
        f"\nQuestion: Which variables have the value {value} in the text above, directly or through other variables? "
        f"Answer: The {HOPS + 1} variables with the value {value} are:"
    )

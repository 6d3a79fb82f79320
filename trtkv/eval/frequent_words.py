"""Frequent words as RULER defines them: made-up words with frequencies of a zeta distribution, the top three asked for (arXiv 2404.06654, section 3).

The exponent is 2.0; the most frequent entry is a row of dots, which the question tells to ignore. Where RULER draws from a vocabulary that grows with
the text, frequencies here are the distribution's own, so that the three answers are certain; the
wording is this package's own.
"""

from __future__ import annotations

import random
import string
from itertools import count as count_from

from trtkv.errors import ConfigError
from trtkv.eval.haystack import CountTokens
from trtkv.eval.strings import recall
from trtkv.eval.task import AnswerTask, Sample

ALPHA, LETTERS, TOP, SLACK, SPARE = 2.0, 6, 3, 8, 12
NOISE = "...."
INTRODUCTION = "The following text is written in code words. Remember those that come most often."
QUESTION = (
    f"\nQuestion: Leaving out the dots '{NOISE}', which {TOP} code words come most often in the text above? "
    f"Answer: The {TOP} code words that come most often are:"
)


class FrequentWords(AnswerTask):
    """The three most frequent made-up words: "score" is the share that the answer names, "exact" 1 when it names all."""

    name = "frequent-words"

    def samples(self, length_tokens: int, count: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Build samples."""
        return [self._sample(length_tokens, random.Random(f"{self.name} {length_tokens} {seed} {index}"), count_tokens) for index in range(count)]

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Look for the three words."""
        return recall(text, sample.answers)

    def _sample(self, length: int, rng: random.Random, count_tokens: CountTokens) -> Sample:
        ranked = ["".join(rng.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(length)]
        answers = tuple(ranked[:TOP])
        answer_tokens = count_tokens(" " + ", ".join(answers)) + SPARE
        room = length - answer_tokens - count_tokens(INTRODUCTION) - count_tokens(QUESTION) - SLACK
        frequencies = _fitting(ranked, room, count_tokens)
        top = [times for _, times in frequencies[1 : TOP + 2]]
        if len(top) <= TOP or top[TOP - 1] == top[TOP]:
            raise ConfigError(f"{length} tokens do not hold the task '{self.name}' with its answer", "Give a greater --length.")
        entries = [word for word, times in frequencies for _ in range(times)]
        return Sample(f"{INTRODUCTION}\n{' '.join(rng.sample(entries, len(entries)))}", QUESTION, answers, answer_tokens)


def _fitting(ranked: list[str], room: int, count_tokens: CountTokens) -> list[tuple[str, int]]:
    """Return the frequencies of the longest text of the distribution that fits, in tokens."""
    low, high = 0, max(0, room)
    while low < high:
        middle = (low + high + 1) // 2
        tokens = sum(times * count_tokens(f" {word}") for word, times in _frequencies(ranked, middle))
        low, high = (middle, high) if tokens <= room else (low, middle - 1)
    return _frequencies(ranked, low)


def _frequencies(ranked: list[str], scale: int) -> list[tuple[str, int]]:
    """Return how often each word comes: scale / rank**alpha, dots first, down to once."""
    found = []
    for rank, word in zip(count_from(1), [NOISE, *ranked], strict=False):
        times = int(scale / rank**ALPHA)
        if times < 1:
            break
        found.append((word, times))
    return found

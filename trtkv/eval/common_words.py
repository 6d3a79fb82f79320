"""Common words as RULER defines them: a numbered list in which ten words come often and all others seldom (arXiv 2404.06654, section 3).

RULER repeats common words 30 times and others 3 times; where 300 entries take more than half of the text it is 20 and 2, or 10 and 1. A short solved
example stands before the list as in RULER. Words are those of Python's documentation, the wording is this package's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from trtkv.errors import ConfigError
from trtkv.eval.haystack import CountTokens, words
from trtkv.eval.strings import recall
from trtkv.eval.task import AnswerTask, Sample

NUM_COMMON, SLACK, SPARE = 10, 8, 12
RATES = ((30, 3), (20, 2), (10, 1))  # how often a common and a rare word come
INTRODUCTION = "The following is a numbered list of words. Some come much more often than others. Remember those that come most often."
QUESTION = f"\nQuestion: Which {NUM_COMMON} words come most often in the list above? Answer: The {NUM_COMMON} words that come most often are:"


class CommonWords(AnswerTask):
    """The ten most common words: "score" is the share that the answer names, "exact" 1 when it names all."""

    name = "common-words"

    def samples(self, length_tokens: int, count: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Build samples."""
        return [self._sample(length_tokens, random.Random(f"{self.name} {length_tokens} {seed} {index}"), count_tokens) for index in range(count)]

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Look for the ten words."""
        return recall(text, sample.answers)

    def _sample(self, length: int, rng: random.Random, count_tokens: CountTokens) -> Sample:
        vocabulary = rng.sample(words(), len(words()))
        shown, common, others, rare = (vocabulary[start:stop] for start, stop in ((0, 10), (10, 20), (20, 30), (30, None)))
        example = _list([*shown * 3, *others], rng) + QUESTION + _numbered(shown)
        answer_tokens = count_tokens(_numbered(common)) + SPARE
        room = length - answer_tokens - sum(map(count_tokens, (example, "\n\n", INTRODUCTION, QUESTION))) - SLACK
        entries = _entries(common, rare, room, count_tokens)
        if len(entries) < NUM_COMMON * RATES[-1][0] + NUM_COMMON:
            raise ConfigError(f"{length} tokens do not hold the task '{self.name}' with its answer", "Give a greater --length.")
        return Sample(f"{example}\n\n{_list(entries, rng)}", QUESTION, tuple(common), answer_tokens)


def _entries(common: list[str], rare: list[str], room: int, count_tokens: CountTokens) -> list[str]:
    """Choose the rates and as many rare words as there is room for, in tokens; none at all when not even the common ones fit."""
    numbers = [0, *accumulate(count_tokens(f" {index}.") for index in range(1, max(1, room) // 2))]
    for often, seldom in RATES:  # noqa: B007 - both are used below
        used = often * sum(count_tokens(f" {word}") for word in common)
        count = often * len(common)
        if count < len(numbers) and used + numbers[count] <= room / 2:
            break
    if count >= len(numbers) or used + numbers[count] > room:
        return []
    chosen: list[str] = []
    for word in rare:
        used += seldom * count_tokens(f" {word}")
        count += seldom
        if count >= len(numbers) or used + numbers[count] > room:
            break
        chosen.append(word)
    return [*common * often, *chosen * seldom]


def _list(entries: Sequence[str], rng: random.Random) -> str:
    return f"{INTRODUCTION}\n{_numbered(rng.sample(entries, len(entries))).strip()}"


def _numbered(entries: Sequence[str]) -> str:
    return "".join(f" {index}. {word}" for index, word in enumerate(entries, 1))

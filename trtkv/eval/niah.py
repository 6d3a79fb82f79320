"""Needles in a haystack as RULER defines them: keys with values hidden in a text, of which some are asked for (arXiv 2404.06654, section 3).

Eight variants differ in the haystack (repeated sentences, real text, or nothing but other needles), in how many keys, values and questions there are,
and in what keys and values look like. What is hidden and asked, how many and how it is scored are RULER's; the wording is this package's own, the
real text is Python's documentation instead of essays, keys are joined from its words, and an answer is as long as its values and a sentence need.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Literal

from trtkv.errors import ConfigError
from trtkv.eval.haystack import CountTokens, depths, hide_all, passage, repeated, words
from trtkv.eval.strings import listed, recall
from trtkv.eval.task import AnswerTask, Sample

SLACK, SPARE = 8, 16  # tokens: joins that a tokenizer may count otherwise; words of an answer beside its values


@dataclass(frozen=True, slots=True)
class Needles(AnswerTask):
    """One variant: num_keys different keys stand in the text, num_values values belong to each asked one, num_queries keys are asked for."""

    name: str
    haystack: Literal["repeat", "text", "needles"] = "text"
    key_kind: Literal["words", "uuid"] = "words"
    value_kind: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def samples(self, length_tokens: int, count: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Build samples; where one value is asked for, its depths divide the text evenly, all other needles stand anywhere."""
        return [
            self._sample(length_tokens, depth, random.Random(f"{self.name} {length_tokens} {seed} {index}"), count_tokens)
            for index, depth in enumerate(depths(count))
        ]

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Return the share of the values that the answer contains."""
        return recall(text, sample.answers)

    def _sample(self, length: int, depth: float, rng: random.Random, count_tokens: CountTokens) -> Sample:
        keys = [self._key(rng) for _ in range(max(self.num_keys, self.num_queries))]
        pairs = [(key, self._value(rng)) for key in keys for _ in range(self.num_values)]
        asked = keys[: self.num_queries]
        answers = tuple(value for key, value in pairs if key in asked)
        question = self._question(asked, len(answers))
        needles = [self._needle(*pair) for pair in pairs]
        answer_tokens = sum(count_tokens(f" {value},") + count_tokens(f" {key}") * (len(answers) > 1) for key, value in pairs if key in asked) + SPARE
        room = length - answer_tokens - sum(map(count_tokens, [self._introduction(), question, *(f" {one}" for one in needles)])) - SLACK
        if room < 0:
            raise ConfigError(f"{length} tokens do not hold the task '{self.name}' with its answer", "Give a greater --length.")
        single = len(answers) == 1
        places = [depth if single and index == 0 else rng.random() for index in range(len(needles))]
        text = hide_all(self._hay(room, rng, count_tokens), list(zip(needles, places, strict=True)))
        target = f" {answers[0]}" if single else ""
        return Sample(f"{self._introduction()}\n{' '.join(text)}", f"\n{question}", answers, answer_tokens, target, depth if single else None)

    def _hay(self, room: int, rng: random.Random, count_tokens: CountTokens) -> list[str]:
        if self.haystack == "text":
            return passage(room, count_tokens, rng)
        if self.haystack == "repeat":
            return repeated(room, count_tokens)
        hay, used = list[str](), 0
        while True:
            one = self._needle(self._key(rng), self._value(rng))
            used += count_tokens(f" {one}")
            if used > room:
                return hay
            hay.append(one)

    def _key(self, rng: random.Random) -> str:
        return _uuid(rng) if self.key_kind == "uuid" else "-".join(rng.sample(words(), 2))

    def _value(self, rng: random.Random) -> str:
        return _uuid(rng) if self.value_kind == "uuids" else str(rng.randrange(1_000_000, 10_000_000))

    def _introduction(self) -> str:
        return f"The following text hides some magic {self.value_kind}. Memorize them. You will be asked about them at the end."

    def _needle(self, key: str, value: str) -> str:
        return f"One of the magic {self.value_kind} for {key} is: {value}."

    def _question(self, keys: list[str], num_answers: int) -> str:
        """Ask, and begin the answer."""
        if num_answers == 1:
            kind = self.value_kind[:-1]
            return f"What is the magic {kind} for {keys[0]} in the text above? The magic {kind} for {keys[0]} is:"
        if len(keys) == 1:
            return (
                f"What are all {num_answers} magic {self.value_kind} for {keys[0]} in the text above? The magic {self.value_kind} for {keys[0]} are:"
            )
        return (
            f"What are the magic {self.value_kind} for {listed(keys)} in the text above? Name one after the other. "
            f"One of the magic {self.value_kind} for {keys[0]} is:"
        )


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


VARIANTS = {
    one.name: one
    for one in (
        Needles("niah-single-1", haystack="repeat"),
        Needles("niah-single-2"),
        Needles("niah-single-3", value_kind="uuids"),
        Needles("niah-multikey-1", num_keys=4),
        Needles("niah-multikey-2", haystack="needles"),
        Needles("niah-multikey-3", haystack="needles", key_kind="uuid", value_kind="uuids"),
        Needles("niah-multivalue", num_values=4),
        Needles("niah-multiquery", num_queries=4),
    )
}

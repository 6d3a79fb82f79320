"""Needle in a haystack: one odd sentence in a long text, asked for at the end (Kamradt's test, with a sentence of its own in every sample)."""

from __future__ import annotations

import random

from trtkv.errors import ConfigError
from trtkv.eval.haystack import CountTokens, depths, hide, passage
from trtkv.eval.strings import recall
from trtkv.eval.task import AnswerTask, Sample

CITIES = ("San Francisco", "Lisbon", "Kyoto", "Nairobi", "Toronto", "Prague", "Lima", "Oslo", "Cairo", "Melbourne", "Chicago", "Hanoi")
FOODS = ("a sandwich", "a bowl of noodles", "an apple pie", "a fish soup", "a cheese plate", "a bag of cherries", "a pancake", "a baked potato")
PLACES = (
    "the old park",
    "the harbour",
    "the rose garden",
    "the market hall",
    "the river bank",
    "the hilltop",
    "the library steps",
    "the train museum",
)
DAYS = ("sunny", "rainy", "windy", "snowy", "foggy", "quiet")
SLACK, SPARE = 8, 12  # tokens: joins that a tokenizer may count otherwise; words of an answer beside what is looked for
INTRODUCTION = "Read the following text carefully. A question about it follows at the end."


class Needle(AnswerTask):
    """What is best to do in a city, told once: "score" is the share of its three parts that the answer names, "exact" 1 when it names all."""

    name = "needle"

    def samples(self, length_tokens: int, count: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Build one sample a depth."""
        return [
            self._sample(length_tokens, depth, random.Random(f"needle {length_tokens} {seed} {index}"), count_tokens)
            for index, depth in enumerate(depths(count))
        ]

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Look for food, place and day."""
        return recall(text, sample.answers)

    def _sample(self, length: int, depth: float, rng: random.Random, count_tokens: CountTokens) -> Sample:
        city, food, place, day = (rng.choice(one) for one in (CITIES, FOODS, PLACES, DAYS))
        target = f" to eat {food} at {place} on a {day} day."
        needle = f"The best thing to do in {city} is{target}"
        question = f"What is the best thing to do in {city}? The best thing to do in {city} is"
        answer_tokens = count_tokens(target) + SPARE
        room = length - answer_tokens - sum(map(count_tokens, (INTRODUCTION, question, f" {needle}"))) - SLACK
        if room < 0:
            raise ConfigError(f"{length} tokens do not hold the task 'needle' with its answer", "Give a greater --length.")
        text = hide(passage(room, count_tokens, rng), needle, depth)
        return Sample(f"{INTRODUCTION}\n\n{' '.join(text)}", f"\n\n{question}", (food, place, day), answer_tokens, target, depth)

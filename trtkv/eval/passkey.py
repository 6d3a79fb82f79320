"""Pass key: a number hidden in a long text that is asked for at the end (Mohtashami and Jaggi, arXiv 2305.16300, with colons)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from trtkv.errors import ConfigError
from trtkv.eval.haystack import CountTokens, depths, hide, passage
from trtkv.eval.task import AnswerTask, Sample

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
QUESTION = "What is the pass key? The pass key is:"


@dataclass(frozen=True, slots=True)
class Passkey:
    """One sample: the document with its introduction, the question behind it, and the key that answers it."""

    document: str
    question: str
    key: str

    @property
    def prompt(self) -> str:
        """Document and question."""
        return f"{self.document}\n\n{self.question}"

    def score(self, answer: str) -> float:
        """Return 1 when the answer begins with the key, else the fraction of its digits that stand in their place."""
        given = answer.strip()[: len(self.key)]
        return sum(a == b for a, b in zip(given, self.key, strict=False)) / len(self.key)


def make_passkey(num_tokens: int, count_tokens: CountTokens, *, digits: int = 5, depth: float = 0.5, seed: int = 0) -> Passkey:
    """Build a sample whose prompt has about num_tokens tokens; depth is where the key stands, 0 at the start, 1 at the end.

    Raises ValueError when so few tokens do not hold the question.
    """
    rng = random.Random(f"passkey {num_tokens} {digits} {depth} {seed}")
    key = str(rng.randrange(1, 10)) + "".join(str(rng.randrange(10)) for _ in range(digits - 1))
    needle = f"The pass key is: {key}. Remember it. The pass key is: {key}."
    room = num_tokens - sum(count_tokens(part) for part in (INTRODUCTION, f" {needle}", QUESTION)) - 8
    if room < 0:
        raise ValueError(f"{num_tokens} tokens do not hold the question of a pass key")
    text = hide(passage(room, count_tokens, rng), needle, depth)
    return Passkey(f"{INTRODUCTION}\n\n{' '.join(text)}", QUESTION, key)


class PasskeyTask(AnswerTask):
    """Pass keys of so many digits at depths that divide the text evenly: "score" counts whole keys, "partial" digits in their place."""

    def __init__(self, name: str, digits: int) -> None:
        self.name, self.digits = name, digits

    def samples(self, length_tokens: int, count: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Build one sample a depth."""
        answer_tokens = count_tokens(" " + "8" * self.digits) + 2
        made = []
        for index, depth in enumerate(depths(count)):
            try:
                one = make_passkey(length_tokens - answer_tokens, count_tokens, digits=self.digits, depth=depth, seed=seed * 1_000_003 + index)
            except ValueError:
                raise ConfigError(f"{length_tokens} tokens do not hold the task '{self.name}' with its answer", "Give a greater --length.") from None
            made.append(Sample(one.document, f"\n\n{one.question}", (one.key,), answer_tokens, f" {one.key}", depth))
        return made

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Compare the beginning of an answer with the key."""
        (key,) = sample.answers
        partial = Passkey("", "", key).score(text)
        return {"score": float(partial == 1), "partial": partial}

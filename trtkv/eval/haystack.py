"""Real text to hide things in: the documentation of the language itself, which ships with every Python."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache

CountTokens = Callable[[str], int]


@cache
def sentences() -> tuple[str, ...]:
    """Return the prose sentences of Python's language reference, in order, without code and grammar."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values())
    paragraphs = (re.sub(r"\s+", " ", one).strip() for one in re.split(r"\n\s*\n", text))
    prose = [one for one in paragraphs if len(one) > 60 and one[0].isalpha() and one[-1] in ".:" and ">>>" not in one and "::=" not in one]
    return tuple(sentence for one in prose for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", one))


def passage(num_tokens: int, count_tokens: CountTokens, rng: random.Random) -> list[str]:
    """Return consecutive sentences from a random place that together have at most num_tokens tokens."""
    chosen, used = [], 0
    for sentence in _from(rng.randrange(len(sentences()))):
        size = count_tokens(" " + sentence)
        if used + size > num_tokens:
            break
        chosen.append(sentence)
        used += size
    return chosen


def hide(text: Sequence[str], needle: str, depth: float) -> list[str]:
    """Insert a needle at a depth between 0 (start) and 1 (end)."""
    at = round(depth * len(text))
    return [*text[:at], needle, *text[at:]]


def _from(start: int) -> Iterator[str]:
    every = sentences()
    while True:
        yield every[start]
        start = (start + 1) % len(every)

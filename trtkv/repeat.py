"""A complete prompt that the model repeats before anything is evicted, so that what it reads meanwhile says which tokens matter: as plain data.

The prompt is repeated part by part. A request has the words that request it, from the second part on the end of the part before, and the part itself,
as if the model had written it. Requests follow the prompt, each directly: their keys and values are dropped when they end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WORDS = 96  # tokens that the words of a request have at most


@dataclass(frozen=True, slots=True)
class RepeatPlan:
    """How prompts of more than `above` tokens are repeated: in parts of so many tokens, after the last `overlap` ones of the part before.

    first and later are the words that request the first part and the later ones; end follows them, and the overlap.
    """

    above: int
    part: int
    overlap: int
    first: str = "\n\nRepeat the previous context exactly."
    later: str = "\n\nRepeat the part of the previous context exactly, starting with"
    end: str = "\n"

    def parts(self, prompt: int) -> Iterator[range]:
        """Yield the tokens of each part, none of a prompt that is not repeated."""
        for start in range(0, prompt if prompt > self.above else 0, self.part):
            yield range(start, min(start + self.part, prompt))

    def beside(self, prompt: int) -> int:
        """Return the most tokens that are stored beside a prompt while it is repeated."""
        return min(prompt, self.part) + self.overlap + WORDS if prompt > self.above else 0


@dataclass(frozen=True, slots=True)
class Repeat:
    """What a step's new tokens are of a request: it repeats tokens start to stop of a prompt of so many.

    ends says that the request ends with them, last that the prompt has been repeated then.
    """

    start: int
    stop: int
    prompt: int
    ends: bool = True
    last: bool = True

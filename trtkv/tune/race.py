"""Which candidates deserve more samples: all get a few, and those leave of which these say that they are not what the user wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trtkv.tune.candidates import Candidate
from trtkv.tune.estimate import Estimate, Losses, estimate, worst

FIRST = 2  # samples that every candidate gets
HOPELESS = 0.05  # chance of reaching the floor below which a candidate leaves
BEATEN = 0.001  # chance that nothing smaller reaches it below which a candidate leaves
# Candidates, samples that they have had and new ones: what each lost in every task on the new ones, by key.
Measure = Callable[[Sequence[Candidate], int, int], Mapping[str, Sequence[Losses]]]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a user wants: the least of what a policy takes at a quality of at least `floor`, or, without one, the best quality; within limits.

    least says of what: bytes of the cache, or bytes that a step reads. memory_bytes is the GPU's, whose memory reads bytes_per_s; milliseconds are
    those of the longest step.
    """

    floor: float | None = None
    least: Literal["cache", "reads"] = "cache"
    memory_bytes: int | None = None
    milliseconds: float | None = None
    bytes_per_s: float | None = None

    def admits(self, one: Candidate) -> bool:
        """Whether a candidate's cost is within the limits."""
        fits = self.memory_bytes is None or one.cost.memory_bytes <= self.memory_bytes
        quick = self.milliseconds is None or self.bytes_per_s is None or one.cost.milliseconds(self.bytes_per_s) <= self.milliseconds
        return fits and quick

    def worth(self, full: Candidate, field: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that may be better than full: none where full itself is within the limits and only quality counts."""
        within = [one for one in field if self.admits(one)]
        if not self.admits(full):
            return within
        return [] if self.floor is None else [one for one in within if self.size(one) < self.size(full)]

    def size(self, one: Candidate) -> tuple[int, int]:
        """What candidates are compared by: the bytes that matter first, then the others."""
        both = one.cost.cache_bytes, one.cost.read_bytes
        return both if self.least == "cache" else both[::-1]


def rounds(samples: int) -> list[int]:
    """Return the new samples of each round, half as many as before, up to all."""
    found = [min(FIRST, samples)]
    while (done := sum(found)) < samples:
        found.append(min(max(1, done // 2), samples - done))
    return found


def race(goal: Goal, field: Sequence[Candidate], samples: int, measure: Measure, found: MutableMapping[str, Estimate]) -> list[Candidate]:
    """Measure candidates until few are left, and return those, which have had all samples; the estimates of all go into found, by key."""
    losses: dict[str, list[Losses]] = {}
    left, done = list(field), 0
    for new in rounds(samples):
        left = survivors(goal, left, found) if done else left
        for key, more in measure(left, done, new).items():
            losses[key] = [sum(pair, Losses()) for pair in zip(losses.get(key, [Losses()] * len(more)), more, strict=True)]
            found[key] = worst(map(estimate, losses[key]))
        done += new
    return left


def survivors(goal: Goal, field: Sequence[Candidate], found: Mapping[str, Estimate]) -> list[Candidate]:
    """Return the candidates that are worth more samples; found are the estimates of all by key.

    Those leave that hardly reach the floor, and those that something smaller surely makes superfluous. Without a floor it is what the best
    probably reaches, and nothing is superfluous.
    """
    floor = goal.floor if goal.floor is not None else max(found[one.subject.key].value - found[one.subject.key].error for one in field)
    left, none_yet = [], 1.0
    for one in sorted(field, key=goal.size):
        reaches = found[one.subject.key].reaches(floor)
        if reaches >= HOPELESS and none_yet >= BEATEN:
            left.append(one)
        none_yet *= 1 - reaches if goal.floor is not None else 1
    return left or [max(field, key=lambda one: found[one.subject.key].value)]


def choose(goal: Goal, finalists: Sequence[Candidate], found: Mapping[str, Estimate]) -> Candidate | None:
    """Return what the user should take of the candidates with all samples; None where none reaches the floor."""
    if goal.floor is None:
        return min(finalists, key=lambda one: (-found[one.subject.key].value, goal.size(one)), default=None)
    reaching = [one for one in finalists if found[one.subject.key].value >= goal.floor]
    return min(reaching, key=goal.size, default=None)


def frontier(goal: Goal, field: Sequence[Candidate], found: Mapping[str, Estimate]) -> list[Candidate]:
    """Return the candidates, smallest first, of which none is better in one of quality, cache and bytes read without being worse in another."""
    axes = {one.subject.key: (one.cost.cache_bytes, one.cost.read_bytes, -found[one.subject.key].value) for one in field}

    def beaten(mine: tuple[float, ...]) -> bool:
        return any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in axes.values())

    return sorted((one for one in field if not beaten(axes[one.subject.key])), key=goal.size)

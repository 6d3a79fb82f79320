"""How well a policy answers, from few samples: a mean with the uncertainty that they leave."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.95)  # of intervals that hold the true value in 90 of 100 cases
ALIKE = 4.0  # tokens of one text err together: so many count as one where too few texts say how much they do
ENOUGH = 8  # texts that say it


@dataclass(frozen=True, slots=True)
class Losses:
    """What samples lost against `full`: their number, the sum of their losses and of the squares, and the trials behind each (tokens of a text)."""

    samples: int = 0
    total: float = 0.0
    squares: float = 0.0
    trials: int = 1

    def __add__(self, other: Losses) -> Losses:
        """Join the losses of different samples of one task."""
        return Losses(self.samples + other.samples, self.total + other.total, self.squares + other.squares, max(self.trials, other.trials))

    @staticmethod
    def of(values: Iterable[float]) -> Losses:
        """Take the losses of samples that are right or wrong as a whole."""
        found = list(values)
        return Losses(len(found), sum(found), sum(value * value for value in found))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quality: 1 for what answers as `full` does. error is the standard error of value."""

    value: float
    error: float
    samples: int

    @property
    def low(self) -> float:
        """The interval's lower end."""
        return self.value - Z * self.error

    @property
    def high(self) -> float:
        """The interval's upper end, which may be above 1 where a policy answered better than full."""
        return self.value + Z * self.error

    def reaches(self, floor: float) -> float:
        """Return how probable it is that the true quality is at least so much."""
        if self.error == 0:
            return float(self.value >= floor)
        return NormalDist().cdf((self.value - floor) / self.error)


EXACT = Estimate(1.0, 0.0, 0)  # full against itself


def estimate(losses: Losses) -> Estimate:
    """Estimate a quality from losses.

    Few samples that agree by chance must not look certain: the variance is at least that of as many right and wrong trials with one more of each
    (Laplace's rule of succession).
    """
    n, trials = losses.samples, losses.trials
    mean = losses.total / n
    share = (min(1.0, max(0.0, mean)) * n * trials + 1) / (n * trials + 2)
    least = share * (1 - share) / trials * (ALIKE if trials > 1 and n < ENOUGH else 1.0)
    spread = (losses.squares - n * mean * mean) / (n - 1) if n > 1 else 0.0
    return Estimate(1 - mean, math.sqrt(max(least, spread) / n), n)


def worst(estimates: Iterable[Estimate]) -> Estimate:
    """Return the estimate of the task in which a policy is worst."""
    return min(estimates, key=lambda one: (one.value, -one.error))

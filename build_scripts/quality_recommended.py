"""The rows of docs/quality.md that compare encodings on the same prompts; `quality_compress.py` makes their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

Record = dict[str, Any]
GOAL = ("rotated", 0.30, 0.01)  # a preset, its share of full's bytes, and what it may lose in any task
PROSE = "prose"
SHOWN = ("full", "kivi4", "rotated", "rotated quantize.value_bits=2")  # the records have more


def encodings(rows: Sequence[Record], tasks: Sequence[str]) -> Iterator[list[str]]:
    """Yield a line an encoding: its name, bytes, right answers, divergence.

    Behind its right answers stand the samples that full had wrong and it right, and the other way round.
    """
    for name in (one for one in SHOWN if one in rows[0]["answers"]):
        cells = []
        for task in tasks:
            pairs = paired(rows, task, name)
            won, lost = (sum(own - full == by for own, full in pairs) for by in (1, -1))
            cells.append(f"{sum(own for own, _ in pairs)}" + (f" (+{won} -{lost})" if won or lost else ""))
        kl = fmean(row["answers"][name]["kl"] for row in rows if row["task"] == PROSE)
        yield [" ".join(f"`{part}`" for part in name.split()), f"{share(rows, name):.1%}", *cells, f"{kl:.4f}"]


def paired(rows: Sequence[Record], task: str, name: str) -> list[tuple[int, int]]:
    """Return for every sample of a task whether an encoding and full answer it."""
    return [(row["answers"][name]["exact"], row["answers"]["full"]["exact"]) for row in rows if row["task"] == task]


def share(rows: Sequence[Record], name: str) -> float:
    """Return an encoding's share of full's bytes, mean over the samples."""
    return fmean(row["answers"][name]["bytes"] / row["answers"]["full"]["bytes"] for row in rows)


def reached(groups: Sequence[Sequence[Record]], tasks: Sequence[str]) -> str:
    """Set the goal beside what its preset stores and loses at most in a task, in any of the groups of records."""
    name, most, points = GOAL
    size = max(share(rows, name) for rows in groups)
    lost = max(fmean(full - own for own, full in paired(rows, task, name)) for rows in groups for task in tasks)
    verdict = "Reached" if size <= most and lost <= points else "Missed"
    return f"`{name}` within {points:.0%} of `full` in every task at {most:.0%} of the bytes: loses at most {lost:.1%} at {size:.1%}. **{verdict}.**"

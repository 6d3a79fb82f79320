"""The part of docs/quality.md that says which presets to take, from the records of `quality_compress.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Record = dict[str, Any]
FEW = 60  # prompts, beside which `rotated` has more
SHOWN = ("full", "rotated", "near-lossless", "balanced", "smallest")  # the records have more
CHOSEN = 1  # the seed of the prompts by which presets that see the question were chosen: others confirm them


@dataclass(frozen=True, slots=True)
class Goal:
    """A preset, its share of full's bytes, and what it may lose in any task; it sees the question."""

    preset: str
    share: float
    points: float

    def verdict(self, groups: Sequence[Sequence[Record]]) -> str:
        """Say what it loses at most in a task, in any of the groups of records that have it."""
        own = [rows for rows in groups if rows[0]["seen"] and self.preset in rows[0]["answers"]]
        size = max(share(rows, self.preset) for rows in own)
        lost, error, task, model = max((*loss(rows, task, self.preset), task, rows[0]["model"]) for rows in own for task in tasks(rows))
        verdict = "Reached" if size <= self.share and lost <= self.points else "Missed"
        mean = max(fmean(loss(rows, task, self.preset)[0] for task in tasks(rows)) for rows in own)
        goal = f"- `{self.preset}`, {self.share:.0%} of the bytes within {self.points:.0%} of `full` in every task: takes {size:.1%},"
        return f"{goal}\n  loses at most {lost:.1%} ± {error:.1%} ({task}, {model}), {mean:.1%} in a model's mean. **{verdict}.**"


GOALS = (
    Goal("near-lossless", 0.30, 0.01),
    Goal("balanced", 0.16, 0.03),
    Goal("smallest", 0.08, 0.10),
)


def grouped(rows: Sequence[Record]) -> list[list[Record]]:
    """Put records of one model, length, question and number of samples together, but for those by which presets were chosen."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        if row["seen"] and row["seed"] == CHOSEN:
            continue
        groups.setdefault((not row["seen"], -row["samples"], row["model"], row["length"]), []).append(row)
    return [groups[place] for place in sorted(groups)]


def lines(rows: Sequence[Record]) -> list[list[str]]:
    """Return a line for every policy: where, its name, bytes and right answers by task."""
    one, counts = rows[0], Counter(row["task"] for row in rows)
    few, most = min(counts.values()), max(counts.values())
    place = f"{one['model']}, {'seen' if one['seen'] else 'unseen'}, {few if few == most else f'{few} to {most}'}"
    found = []
    for name in (one for one in SHOWN if one in rows[0]["answers"] and (one != "rotated" or most > FEW or rows[0]["seen"])):
        right = " ".join(str(sum(own for own, _ in paired(rows, task, name))) for task in tasks(rows))
        found.append([place, f"`{name}`", f"{share(rows, name):.1%}", right])
    return found if len(found) > 1 else []


def tasks(rows: Sequence[Record]) -> list[str]:
    """List the tasks of records."""
    return sorted({row["task"] for row in rows})


def paired(rows: Sequence[Record], task: str, name: str) -> list[tuple[int, int]]:
    """Return for every sample of a task whether a policy and full answer it."""
    return [(row["answers"][name]["exact"], row["answers"]["full"]["exact"]) for row in rows if row["task"] == task]


def loss(rows: Sequence[Record], task: str, name: str) -> tuple[float, float]:
    """Return the right answers that a policy has fewer than full, as a share of the samples, and its standard error."""
    lost = [full - own for own, full in paired(rows, task, name)]
    return fmean(lost), stdev(lost) / len(lost) ** 0.5


def share(rows: Sequence[Record], name: str) -> float:
    """Return a policy's share of full's bytes, mean over the samples."""
    return fmean(row["answers"][name]["bytes"] / row["answers"]["full"]["bytes"] for row in rows)

"""The part of docs/quality.md that says which presets to take, from the records of `quality_compress.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Record = dict[str, Any]
SHOWN = ("full", "int8", "fp8", "rotated", "near-lossless", "balanced", "smallest")
PROSE = "prose"  # texts without a question


@dataclass(frozen=True, slots=True)
class Goal:
    """A preset, its share of full's bytes, and what it may lose in any task; it sees the question."""

    preset: str
    share: float
    points: float

    def verdict(self, rows: Sequence[Record]) -> str:
        """Say what it loses at most in a task of a model."""
        seen = [group(rows, model, True) for model in models(rows)]
        size = max(share(own, self.preset) for own in seen)
        lost, error, task, model = max((*loss(own, task, self.preset), task, own[0]["model"]) for own in seen for task in tasks(own))
        verdict = "Reached" if size <= self.share and lost <= self.points else "Missed"
        mean = max(fmean(loss(own, task, self.preset)[0] for task in tasks(own)) for own in seen)
        goal = f"- `{self.preset}`, {self.share:.0%} of the bytes within {self.points:.0%} of `full` in every task: takes {size:.1%},"
        return f"{goal}\n  loses at most {lost:.1%} ± {error:.1%} ({task}, {model}), {mean:.1%} in a model's mean. **{verdict}.**"


GOALS = (
    Goal("near-lossless", 0.30, 0.01),
    Goal("balanced", 0.16, 0.03),
    Goal("smallest", 0.08, 0.10),
)


def lines(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and a line for every policy: bytes, and right answers by task for each model, question seen or not."""
    groups = [group(rows, model, seen) for seen in (True, False) for model in models(rows)]
    titles = [f"{own[0]['model'].split('-')[0]}, {'seen' if own[0]['seen'] else 'unseen'}" for own in groups]

    def right(own: Sequence[Record], name: str) -> str:
        return "/".join(str(sum(one for one, _ in paired(own, task, name))) for task in tasks(own)) if name in own[0]["answers"] else "-"

    size = {name: max(share(own, name) for own in groups if name in own[0]["answers"]) for name in SHOWN}
    found = [[f"`{name}`", f"{size[name]:.1%}", *(right(own, name) for own in groups)] for name in SHOWN]
    return ["preset", "bytes", *titles], found


def prose(rows: Sequence[Record]) -> str:
    """Say how many nats a token presets lose in texts without a question, the larger of the models' means."""
    texts = [[row for row in rows if row["task"] == PROSE and row["model"] == model] for model in models(rows)]
    worst = {name: max(fmean(row["answers"][name]["nll"] - row["answers"]["full"]["nll"] for row in own) for own in texts) for name in SHOWN[1:]}
    return ", ".join(f"`{name}` {more:.3f}" for name, more in worst.items())


def models(rows: Sequence[Record]) -> list[str]:
    """List the models of records."""
    return sorted({row["model"] for row in rows})


def group(rows: Sequence[Record], model: str, seen: bool) -> list[Record]:
    """Return the records of a model's questions, those that are seen when the prompt is compressed or the others."""
    return [row for row in rows if row["model"] == model and row["seen"] is seen and row["task"] != PROSE]


def tasks(rows: Sequence[Record]) -> list[str]:
    """List the tasks of records that have a question."""
    return sorted({row["task"] for row in rows} - {PROSE})


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

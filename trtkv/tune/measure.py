"""Measures candidates round by round: the cells of `trtkv eval`, whose results a directory keeps, so that an interrupted search goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trtkv.errors import ConfigError
from trtkv.eval.files import read_text
from trtkv.eval.grid import Cell, Scoring, TaskSpec
from trtkv.eval.jobs import run_cells
from trtkv.eval.opened import Setup
from trtkv.eval.perplexity import scored_tokens
from trtkv.eval.results import Results
from trtkv.eval.samples import SampleMaker
from trtkv.eval.task import AnswerTask
from trtkv.tune.candidates import Candidate
from trtkv.tune.estimate import EXACT, Estimate, Losses
from trtkv.tune.race import Goal, race

TEXT = "agreement"  # the task of a text: does a policy choose the next tokens that full chooses?
Bar = Callable[[str, int, int], None]  # what is going on, tokens done, tokens in all


@dataclass(frozen=True, slots=True)
class Question:
    """What quality means to a user: tasks at a length, so many samples of each for the finalists, found and scored as `trtkv eval` does.

    spare: windows that a text has beyond those that are measured, which lie between them.
    """

    tasks: tuple[TaskSpec, ...]
    length: int
    samples: int
    seed: int = 0
    scoring: Scoring = "generate"
    spare: int = 0

    def checked(self, maker: SampleMaker, full: Candidate) -> Question:
        """Return the question with no more samples than a text has windows.

        Raises ConfigError where a task has no answers to compare, or a text or task does not fit into the length.
        """
        samples, windows = self.samples, self.samples
        for spec in self.tasks:
            if isinstance(maker.task(spec), AnswerTask):
                maker.samples(self.cells(spec, [full], 0, 1)[0])
            elif spec.name != TEXT:
                raise ConfigError(
                    f"the task '{spec.name}' does not say how much a policy loses against full", "Name a task with answers, or a --text."
                )
            elif spec.options.data is not None:
                windows = _windows(maker, full, spec.options.data, self.length)
                samples = min(samples, windows)
        return replace(self, samples=samples, spare=max(0, windows - samples))

    def cells(self, spec: TaskSpec, field: Sequence[Candidate], done: int, new: int) -> list[Cell]:
        """Return cells of so many samples that no round before, with `done` samples together, has had."""
        if spec.options.data is not None and spec.name == TEXT:
            skip = done + self.spare * done // self.samples
            spec = replace(spec, options=replace(spec.options, skip=skip), identity=f"{spec.identity} after {skip}")
        return [Cell(one.subject, spec, self.length, new, self.seed + done, self.scoring) for one in field]


def _windows(maker: SampleMaker, full: Candidate, text: Path, length: int) -> int:
    """Return how many windows a text has; raises ConfigError where it is shorter than one."""
    found = maker.count(full.subject, read_text(text))
    if found < length:
        raise ConfigError(f"'{text}' has {found} tokens, fewer than the context of {length}", "Give a longer --text or a lower --context.")
    return 1 + (found - length) // scored_tokens(length)


@dataclass(slots=True)
class Search:
    """One search: `found` are the estimates of all candidates by key, `full` what the model itself scores in each task with answers."""

    question: Question
    goal: Goal
    setup: Setup
    directory: Path
    jobs: int = 1
    maker: SampleMaker = field(default_factory=SampleMaker)
    found: dict[str, Estimate] = field(default_factory=dict)
    full: dict[str, float] = field(default_factory=dict)
    cells: int = 0

    def run(self, full: Candidate, field: Sequence[Candidate], bar: Bar) -> list[Candidate]:
        """Measure until few candidates are left, and return those, which have had all samples. Ctrl-C loses the cells that were running."""
        self.found[full.subject.key] = EXACT
        if not field:
            return []
        self.question = self.question.checked(self.maker, full)
        samples, scores = self.question.samples, dict[str, list[float]]()

        def measure(left: Sequence[Candidate], done: int, new: int) -> dict[str, list[Losses]]:
            named = f"samples {done + 1} to {done + new} of {samples}, {len(left)} of {len(field)} candidates"
            losses: dict[str, list[Losses]] = {one.subject.key: [] for one in left}
            for spec in self.question.tasks:
                records = self._measure(spec, full, left, done, new, partial(bar, named))
                reference = records.get(full.subject.key)
                if reference is not None:
                    scores.setdefault(spec.name, []).extend(one["score"] for one in reference["answers"])
                for key, those in losses.items():
                    those.append(lost(records[key], reference))
            return losses

        left = race(self.goal, field, samples, measure, self.found)
        self.full = {name: sum(values) / len(values) for name, values in scores.items()}
        return left

    def _measure(
        self, spec: TaskSpec, full: Candidate, field: Sequence[Candidate], done: int, new: int, bar: Callable[[int, int], None]
    ) -> dict[str, Mapping[str, Any]]:
        """Run the cells that no results have yet; return the records by the subject's key."""
        answers = isinstance(self.maker.task(spec), AnswerTask)
        cells = self.question.cells(spec, [full, *field] if answers else list(field), done, new)
        shares = dict.fromkeys((cell.key for cell in cells), 0.0)
        weight = {cell.key: cell.weight for cell in cells}

        def report(key: str, share: float) -> None:
            shares[key] = max(shares[key], share)
            bar(round(sum(weight[one] * part for one, part in shares.items())), sum(weight.values()))

        run_cells(cells, self.setup, self.directory, self.jobs, report, self.maker)
        records = Results(self.directory).finished()
        self.cells += len(cells)
        return {cell.subject.key: records[cell.key] for cell in cells}


def lost(record: Mapping[str, Any], full: Mapping[str, Any] | None) -> Losses:
    """Return what a cell lost: right answers of full that became wrong (and the reverse), or next tokens that are not full's."""
    if full is not None:
        pairs = zip(record["answers"], full["answers"], strict=True)
        return Losses.of(theirs["score"] - mine["score"] for mine, theirs in pairs)
    figures, length = record["figures"], record["length"]
    n, mean, error = record["samples"], 1 - figures["agreement"], figures["agreement_error"]
    return Losses(n, n * mean, n * mean * mean + n * (n - 1) * error * error, scored_tokens(length))

"""What a search tells: rows of a table, the file of the policy it recommends, a plot of the frontier."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtkv.errors import ConfigError
from trtkv.eval.plot import save
from trtkv.policies.registry import check_file_name
from trtkv.policies.written import write_policy
from trtkv.tune.candidates import Candidate
from trtkv.tune.estimate import Estimate
from trtkv.tune.race import Goal, frontier


def rows(goal: Goal, field: Sequence[Candidate], found: Mapping[str, Estimate], full: Candidate, chosen: Candidate | None) -> list[dict[str, Any]]:
    """Return every candidate as JSON-ready data, smallest first; frontier says that none is better in one respect without being worse in another.

    What was not measured, as something cheaper is good enough, has no quality: None.
    """
    best = {one.subject.key for one in frontier(goal, field, found)}
    told = []
    for one in sorted(field, key=goal.size):
        of = found.get(one.subject.key)
        told.append({
            "policy": one.subject.policy.name, "budget": one.subject.budget, "set": list(one.subject.sets),
            "cache_bytes": one.cost.cache_bytes, "of_full": one.cost.cache_bytes / full.cost.cache_bytes, "memory_bytes": one.cost.memory_bytes,
            "read_bytes": one.cost.read_bytes, "reads_of_full": one.cost.read_bytes / full.cost.read_bytes, "tokens_read": one.cost.tokens_read,
            "quality": of and of.value, "low": of and of.low, "high": of and of.high, "samples": of.samples if of else 0,
            "frontier": one.subject.key in best, "admitted": goal.admits(one), "chosen": chosen is not None and one.subject.key == chosen.subject.key,
        })  # fmt: skip
    return told


def check_out(path: Path) -> None:
    """Raise ConfigError unless a policy's file may have this name and can be written, before anything is measured."""
    check_file_name(path)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"the policy's file '{path}' cannot be written", "Choose a file in a directory that exists and can be written.")


def write(path: Path, one: Candidate, comment: str) -> None:
    """Write a candidate's policy whole or not at all; raises ConfigError where the file cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        part.write_text(write_policy(one.subject.policy, comment), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror or error}", "Choose another --out.") from None
    finally:
        part.unlink(missing_ok=True)


def command(model: str, policy: str, context: int, batch: int) -> str:
    """Return the command that builds an engine with a policy."""
    return shlex.join(
        ["trtkv", "build", "--model", model, "--policy", policy, "--max-seq-len", str(context), "--max-batch-size", str(batch)]
    )  # fmt: skip


def draw(path: Path, told: Sequence[Mapping[str, Any]], floor: float | None) -> None:
    """Draw quality with its intervals against the cache and against what a step reads; the format is the suffix's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, cost, title in zip(panels, ("of_full", "reads_of_full"), ("cache, of full's bytes", "read in a step, of full's bytes"), strict=True):
        for one in (one for one in told if one["quality"] is not None):
            colour = "C3" if one["chosen"] else "C0" if one["frontier"] else "0.7"
            low, high = one["quality"] - one["low"], max(0.0, one["high"] - one["quality"])
            panel.errorbar(100 * one[cost], one["quality"], yerr=[[max(0.0, low)], [high]], fmt="o", color=colour, markersize=4, linewidth=1)
            if one["frontier"] or one["chosen"]:
                label = one["policy"] + (f" {one['budget']}" if one["budget"] is not None else "")
                panel.annotate(label, (100 * one[cost], one["quality"]), textcoords="offset points", xytext=(5, 5), fontsize=7)
        if floor is not None:
            panel.axhline(floor, color="black", linestyle="--", linewidth=1)
        panel.set_xlabel(f"{title} (%)")
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("quality: 1 answers as full does")
    save(figure, path)

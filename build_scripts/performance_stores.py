"""The section of docs/performance.md about stored forms of the cache, from the records of `build_scripts/bench_stores.sh`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtkv.bench.report import cell, commits

Record = dict[str, Any]
# Least ratios to dense attention that the project has set itself: store, geometry, batch, context.
GOALS = {
    ("int2", "llama-3.1-8b", 8, 32768): 3.0,
    ("int2", "llama-3.1-8b", 1, 131072): 3.0,
    ("fp8", "llama-3.1-8b", 8, 32768): 1.7,
    ("fp8", "llama-3.1-8b", 1, 131072): 1.7,
}
COLUMNS = {
    "geometry": "geometry", "shape": "batch x context", "label": "stored as", "attend_us": "attend", "dense_us": "dense", "ratio": "ratio",
    "goal": "goal", "bound_us": "bound", "times_bound": "x bound", "moved": "MB moved", "achieved_GBps": "GB/s",
}  # fmt: skip
HEAD = """
## Decode attention over stored forms of the cache

`build_scripts/bench_stores.sh` measures these rows: attention of one layer's decode step over a cache that is stored in two or four bits
(KIVI's groups and residual), in eight-bit floats or in {dtype}, beside the fastest dense attention of the same run. {machine}, driver {driver},
torch {torch}, commit {commit}, {date}; microseconds, medians of CUDA-graph replays over cold caches, every result checked in the run that timed it.

"""


def section(records: Sequence[Record]) -> str:
    """Return the section, of every row the newest record with a time; nothing where there is none."""
    rows = {_row(one): one for one in records if one.get("store") and one.get("op") == "attend" and one["status"] == "ok"}
    if not rows:
        return ""
    newest = list(rows.values())[-1]
    facts = {**newest["environment"], "date": newest["environment"]["date"][:10], "dtype": newest["dtype"], "commit": commits(list(rows.values()))}
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * 3 + "---:|" * (len(COLUMNS) - 3)]
    lines += ["| " + " | ".join(cell(_shown(one).get(name)) for name in COLUMNS) + " |" for one in rows.values()]
    return HEAD.format(**facts) + "\n".join(lines) + "\n" + _missed(list(rows.values()))


def _row(one: Record) -> tuple[Any, ...]:
    return tuple(one.get(name) for name in ("store", "geometry", "batch", "context", "group", "residual", "bits"))


def _shown(one: Record) -> Record:
    group = f", groups of {one['group']}" if one.get("group") else ""
    moved = one.get("least_bytes", 0) / 1e6
    return {**one, "shape": f"{one['batch']} x {one['context'] // 1024}k", "label": one["store"] + group, "goal": _goal(one), "moved": moved}


def _goal(one: Record) -> float | None:
    return GOALS.get((one["store"], one["geometry"], one["batch"], one["context"]))


def _missed(rows: Sequence[Record]) -> str:
    missed = [one for one in map(_shown, rows) if one["goal"] is not None and one["ratio"] < one["goal"]]
    lines = [f"- {one['geometry']} {one['shape']}, {one['label']}: {cell(one['ratio'])} of {cell(one['goal'])}." for one in missed]
    return "\nGoals missed:\n\n" + "\n".join(lines) + "\n" if lines else "\nNo goal is missed.\n"

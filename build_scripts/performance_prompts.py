"""The section of docs/performance.md on what eviction adds to a prompt: column sums beside attention, and LagKV's compression of a whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtkv.bench.report import cell, commits

Record = dict[str, Any]

SUMS_GOAL = 1.6  # attention with sums over the fastest library attention alone
LAG_GOAL_PERCENT = 1.0  # of a prompt's attention and products
SUMS = {
    "geometry": "geometry", "shape": "prompt", "attention_us": "attention", "flash_us": "flash", "cudnn_us": "cuDNN", "sums_us": "sums",
    "sums_TFLOPs": "sums TFLOP/s", "last_32_us": "sums of 32 queries", "with_sums_per_fastest": "attention and sums per fastest",
}  # fmt: skip
LAG = {
    "geometry": "geometry", "shape": "prompt", "new_tokens": "chunk", "compress_us": "compression", "attention_us": "attention",
    "products_us": "products", "compress_percent_of_prefill": "% of prefill", "stored_tokens": "tokens stored",
}  # fmt: skip
HEAD = """
## What eviction adds to a prompt

`build_scripts/bench_evict.sh` measures these rows: {machine}, driver {driver}, torch {torch}, commit {commit}, {date}; microseconds.

One layer's attention over a whole prompt and the sums of what each token received from all queries, timed in turn with the library's attention.
*attention* is what engines run, with its log-sum-exp; *flash* and *cuDNN* are torch's forms. A GPU at its power limit runs what follows a busy kernel
slower: where *attention* is cuDNN's, their difference is that. The goal of the last column is {goal}.

"""
LAG_HEAD = """
All of LagKV's evictions of a prompt that is read in chunks, in all layers, beside those chunks' attention and products. The goal is {goal:g}% of the
prefill.

"""


def section(records: Sequence[Record]) -> str:
    """Return the section, of every row the newest record; nothing where there is none."""
    good = [one for one in records if one.get("status") == "ok" and one.get("op") in ("prefill-sums", "lag") and "with_sums_per_fastest" in one]
    good += [one for one in records if one.get("status") == "ok" and one.get("op") == "lag" and "compress_percent_of_prefill" in one]
    rows = {(one["op"], one["geometry"], one["context"], one["new_tokens"]): one for one in good if "driver" in one["environment"]}
    if not rows:
        return ""
    newest = max(rows.values(), key=lambda one: str(one["environment"]["date"]))
    facts = {**newest["environment"], "date": newest["environment"]["date"][:10], "commit": commits(list(rows.values()))}
    sums, lag = ([_shown(one) for one in rows.values() if one["op"] == op] for op in ("prefill-sums", "lag"))
    text = HEAD.format(**facts, goal=SUMS_GOAL) + (_table(sums, SUMS) if sums else "")
    text += LAG_HEAD.format(goal=LAG_GOAL_PERCENT) + _table(lag, LAG) if lag else ""
    return text + _missed(sums, lag)


def _shown(one: Record) -> Record:
    return {**one, "shape": f"{one['context'] // 1024}k"}


def _table(rows: Sequence[Record], columns: dict[str, str]) -> str:
    lines = ["| " + " | ".join(columns.values()) + " |", "|---|---|" + "---:|" * (len(columns) - 2)]
    return "\n".join(lines + ["| " + " | ".join(cell(one.get(name)) for name in columns) + " |" for one in rows]) + "\n"


def _missed(sums: Sequence[Record], lag: Sequence[Record]) -> str:
    """Name the goals that are missed."""
    lines = [
        f"- {one['geometry']} {one['shape']}: {cell(one['with_sums_per_fastest'])} times the fastest attention, goal {SUMS_GOAL}."
        for one in sums
        if one["with_sums_per_fastest"] > SUMS_GOAL
    ]
    lines += [
        f"- {one['geometry']} {one['shape']}, lag: {cell(one['compress_percent_of_prefill'])}% of the prefill, goal {LAG_GOAL_PERCENT:g}%."
        for one in lag
        if one["compress_percent_of_prefill"] > LAG_GOAL_PERCENT
    ]
    return "\nGoals missed:\n\n" + "\n".join(lines) + "\n" if lines else "\nNo goal is missed.\n"

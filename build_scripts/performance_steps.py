"""The sections of docs/performance.md about whole steps, busy GPUs and the soak, from records of `bench_steps.sh`, `bench_busy.py` and `soak.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtkv.bench.report import cell, commits, plot_steps
from trtkv.runtime.memory import readable

Record = dict[str, Any]
PLOT = "steps.svg"
FLOOR_SHARE = 1.15  # times the least bytes' time that a step of full at batch 1 x 32k may take
BUSY_SHARE, BETWEEN_US = 0.95, 20.0
# Least ratios to full that the project has set itself: model, policy, batch, context.
GOALS = {
    ("qwen2.5-7b", "fier", 8, 131072): 2.8,
    ("llama-3.1-8b", "fier", 8, 131072): 3.8,
    ("llama-2-7b", "fier", 1, 32768): 1.8,
    ("llama-3.1-8b", "minikv", 24, 32768): 1.48,
}
# Of the largest batches that fit: tokens a second and sequences, in times of full's. Model, policy, context.
LARGEST_GOALS = {("llama-3.1-8b", "minikv", 32768): (3.0, 5.0)}
LOSES_FROM = 8192  # tokens of context from which no policy may be slower than full
COLUMNS = {
    "model": "model", "shape": "batch x context", "policy": "policy", "ttft": "TTFT s", "prefill_tokens_per_s": "in tokens/s",
    "itl_p50_ms": "ITL p50 ms", "itl_p90_ms": "p90", "itl_p99_ms": "p99", "decode_tokens_per_s": "out tokens/s",
    "x_full": "x full", "goal": "goal", "x_batch": "x sequences", "kv": "KV", "peak": "peak",
    "x_least": "x least", "weights_us": "weights us", "attention_us": "attention", "selection_us": "selection", "recall_us": "recall",
    "append_us": "append", "norms_us": "norms", "sampling_us": "sampling", "rest_us": "rest", "idle_us": "idle", "gap": "largest gap",
}  # fmt: skip
WORDS = 3  # columns of words, the rest are figures
HEAD = """
## Whole decode steps

`build_scripts/bench_steps.sh` measures these rows with random weights of the models' shapes: {machine}, driver {driver}, torch {torch},
commit {commit}, {date}. *ITL* is the time from one step's tokens to the next one's, sampling included; *x full* compares with `full` of the
same load and run, in a row of the most sequences that fit the memory tokens a second with those of `full` in its own such row; *x least* is the
step over the time that its weights and the cache that it reads take at {copy:.2f} TB/s, what a copy reaches there. The split is from a trace of
the kernels, *idle* what no kernel takes of a step; *largest gap* is the part that takes most beyond the time of its bytes. Where *TTFT* is empty,
caches were filled with copies of a short prompt's pages.

"""
BUSY = """
## Many streams

`build_scripts/bench_busy.py` keeps {streams} streams of {model} ({policy}) going, prompts of {prompt_tokens} tokens and answers of {low} to
{high}: the GPU works {busy:.1%} of the time (goal: {goal:.0%}), prefill included; {gap:.1f} us lie between two decode steps in the median (goal:
{between:.0f}), copies of their inputs included and the profiler on. {machine}, commit {commit}, {date}.
"""
SOAK = """
## Soak

`build_scripts/soak.py` sends {requests} requests of mixed lengths over HTTP to a tiny model on a CPU, at {overload} times the {capacity_per_s}
requests a second that it answers: {answered} were answered whole, {refused} refused with 429 or 503, {cancelled} cancelled half-way by their
clients, {vanished} left by clients that vanished. Every page and place came back; memory rose by {rise} from the third to the fourth quarter.
{machine}, commit {commit}, {date}.
"""


def section(records: Sequence[Record], docs: Path) -> str:
    """Return the sections of what was measured, of every row the newest record; draws the plot into docs where a line has two points."""
    steps = [one for one in records if one["benchmark"] == "step" and one["status"] == "ok" and "recall" not in one]
    text = _steps(list({_row(one): one for one in steps}.values()), docs) if steps else ""
    for kind, write in (("busy", _busy), ("soak", _soak)):
        newest = [one for one in records if one["benchmark"] == kind and one["status"] == "ok"][-1:]
        text += "".join(map(write, newest))
    return text


def _row(one: Record) -> tuple[Any, ...]:
    batch = "largest" if one.get("largest") else one["batch"]
    return one["model"], batch, one["context"], one["policy"], one["budget"], tuple(one.get("sets", ()))


def _facts(*rows: Record) -> Record:
    newest = rows[-1]["environment"]
    return {**newest, "date": newest["date"][:10], "commit": commits(rows)}


def _steps(rows: list[Record], docs: Path) -> str:
    rows.sort(key=lambda one: (one["model"], one["batch"], one["context"]))
    shown = [_shown(one, rows) for one in rows]
    used = {name: title for name, title in COLUMNS.items() if any(one.get(name) is not None for one in shown)}
    lines = ["| " + " | ".join(used.values()) + " |", "|" + "---|" * WORDS + "---:|" * (len(used) - WORDS)]
    lines += ["| " + " | ".join(cell(one.get(name)) for name in used) + " |" for one in shown]
    text = HEAD.format(**_facts(*rows), copy=rows[-1]["copy_GBps"] / 1e3) + "\n".join(lines) + "\n" + _missed(shown)
    lines_of = [(one["model"], one["batch"], one["policy"]) for one in rows]
    drawn = [one for one in rows if lines_of.count((one["model"], one["batch"], one["policy"])) > 1]
    if drawn:
        plot_steps(drawn, docs / PLOT)
        text += f"\n![Tokens a second against context]({PLOT})\n"
    return text


def _shown(one: Record, rows: Sequence[Record]) -> Record:
    alike = [other for other in rows if other["policy"] == "full" and _load(other) == _load(one)]
    x_full = x_batch = None
    goal, batch_goal = GOALS.get((one["model"], one["policy"], one["batch"], one["context"])), None
    if alike and one["policy"] != "full" and one.get("largest"):
        x_full, x_batch = one["decode_tokens_per_s"] / alike[0]["decode_tokens_per_s"], one["batch"] / alike[0]["batch"]
        goal, batch_goal = LARGEST_GOALS.get((one["model"], one["policy"], one["context"]), (None, None))
    elif alike and one["policy"] != "full":
        x_full = one.get("ratio", alike[0]["itl_p50_ms"] / one["itl_p50_ms"])  # of the run that measured both
    return {
        **one, "shape": f"{one['batch']} x {one['context'] // 1024}k{', the most' if one.get('largest') else ''}",
        "ttft": one["ttft_ms"] / 1e3 if "ttft_ms" in one else None, "x_full": x_full, "x_batch": x_batch, "batch_goal": batch_goal,
        "goal": goal, "kv": readable(one["kv_bytes"]),
        "peak": readable(one["peak_memory_bytes"]) if "peak_memory_bytes" in one else None, "x_least": 1 / one["bandwidth_share"],
        "gap": f"{one['largest_gap']}, {one['largest_gap_us']:.0f} us" if "largest_gap" in one else None,
    }  # fmt: skip


def _load(one: Record) -> tuple[Any, ...]:
    return one["model"], "largest" if one.get("largest") else one["batch"], one["context"]


def _missed(rows: Sequence[Record]) -> str:
    """Name the goals that are missed."""
    lines = []
    for one in rows:
        where = f"- {one['model']} {one['shape']}, {one['policy']}"
        if one["policy"] == "full" and (one["batch"], one["context"]) == (1, 32768) and one["x_least"] > FLOOR_SHARE:
            lines.append(f"{where}: {cell(one['x_least'])} times the least, goal {FLOOR_SHARE}.")
        if one["x_full"] is not None and one["goal"] is not None and one["x_full"] < one["goal"]:
            lines.append(f"{where}: {cell(one['x_full'])} times full, goal {cell(one['goal'])}.")
        if one["x_batch"] is not None and one["batch_goal"] is not None and one["x_batch"] < one["batch_goal"]:
            lines.append(f"{where}: {cell(one['x_batch'])} times the sequences of full, goal {cell(one['batch_goal'])}.")
        if one["x_full"] is not None and one["x_full"] < 1 and one["context"] >= LOSES_FROM:
            lines.append(f"{where}: slower than full.")
    return "\nGoals missed:\n\n" + "\n".join(lines) + "\n" if lines else "\nNo goal is missed.\n"


def _busy(one: Record) -> str:
    low, high = one["answer_tokens"] // 2, one["answer_tokens"] // 2 + one["answer_tokens"] - 1
    return BUSY.format(
        **{**one, **_facts(one)}, low=low, high=high, busy=one["busy_share"], goal=BUSY_SHARE, gap=one["between_steps_p50_us"], between=BETWEEN_US
    )


def _soak(one: Record) -> str:
    return SOAK.format(**{"refused": 0, **one, **_facts(one)}, rise=readable(max(0, one["memory_rise_bytes"])))

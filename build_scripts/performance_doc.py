"""Writes docs/performance.md and its plot from engines/results.jsonl: of every row the latest record, goals beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trtkv.bench.records import read_records
from trtkv.bench.report import by_kernel, cell, commits, label, plot

ROOT = Path(__file__).parent.parent
PLOT = "retrieval.svg"
Record = dict[str, Any]

# Least ratios to dense attention that the project has set itself: geometry, batch, context: FIER, pages of 32 tokens.
GOALS = {
    ("qwen2.5-7b", 1, 32768): (2.0, 2.5),
    ("qwen2.5-7b", 1, 131072): (4.0, 5.0),
    ("qwen2.5-7b", 8, 131072): (8.0, 12.0),
    ("llama-3.1-8b", 1, 131072): (5.0, 7.0),
    ("llama-3.1-8b", 8, 131072): (9.0, 14.0),
    ("llama-2-7b", 1, 32768): (5.0, 6.0),
}
CHOICE_GOALS_US = {(4, 131072): 6.0, (64, 131072): 15.0}  # rows (sequences times KV heads), context: choosing alone
SHORT_CONTEXT = 8192  # up to here a policy must not lose against dense attention: the step may take the dense route
OLD_ROWS = {"qwen": "qwen2.5-7b", "llama3": "llama-3.1-8b", "llama2": "llama-2-7b"}

HEAD = """# Performance

Written by `build_scripts/performance_doc.py` from `engines/results.jsonl`; do not edit. `build_scripts/bench_retrieval.sh` measures every row anew.

## One layer of one decode step

"""
ABOUT = """{machine}, driver {driver}, torch {torch}, CUDA {cuda}, {dtype}, commit {commit}, {date}. Medians in microseconds of CUDA-graph
replays; every launch reads another layer's buffers, so caches are cold. Every result was checked against torch in the run that timed it.

*dense* is the fastest library attention of the same run ({libraries}); *whole* is append, select and attend of one layer as
engines run them, *dense route* the same with everything read; *ratio* is dense over whole. Stages are timed alone, kernels by the
profiler. *bound* is the time that the least bytes take at {copy:.1f} TB/s, what a copy reaches there; *GB/s* are the bytes moved over
the time. The same thing twice differed by up to {spread:.1f} %. Goals are the project's own.

"""
OLD = """These are figures of the kernels' first form, timed without the ops around them; `build_scripts/bench_retrieval.sh` has not run since.

"""
DECODE = {
    "geometry": "geometry", "shape": "batch x context", "label": "policy", "dense_us": "dense", "append_us": "append", "select_us": "select",
    "attend_us": "attend", "whole_us": "whole", "dense_route_us": "dense route", "ratio": "ratio", "goal": "goal",
    "bound_us": "bound", "times_bound": "x bound", "moved": "MB moved", "achieved_GBps": "GB/s",
    "by_kernel": "select by kernel",
}  # fmt: skip
CHOICE = {
    "shape": "rows x context", "label": "policy", "select_us": "select", "bound_us": "bound", "by_kernel": "by kernel", "choice": "without scoring",
    "goal": "goal",
}  # fmt: skip
APPEND = {
    "geometry": "geometry", "shape": "batch x context", "label": "policy", "new_tokens": "new tokens", "append_us": "append",
    "bound_us": "bound", "times_bound": "x bound",
}  # fmt: skip
WORDS = ("geometry", "batch x context", "rows x context", "policy", "by kernel", "select by kernel")


def main() -> None:
    """Write page and plots."""
    sys.path.insert(0, str(Path(__file__).parent))
    from performance_offload import section as offload_section
    from performance_prompts import section as prompts_section
    from performance_steps import section as steps_section
    from performance_stores import section

    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "engines" / "results.jsonl"
    every = read_records(file)
    text = page(latest(every), ROOT / "docs" / PLOT) + section(every) + prompts_section(every) + steps_section(every, ROOT / "docs")
    text += offload_section(every, ROOT / "docs")
    (ROOT / "docs" / "performance.md").write_text(text, encoding="utf-8")


def page(records: list[Record], drawing: Path) -> str:
    """Write the page, and the plot where records of the command stand behind it."""
    by_op = {op: [record for record in records if record["op"] == op] for op in ("retrieve", "select", "append")}
    retrieve = by_op["retrieve"]
    if not retrieve:
        return HEAD.partition("\n## ")[0] + "\n"
    text = HEAD + about(retrieve) + markdown([decode_row(record) for record in retrieve], DECODE) + missed(retrieve)
    if "environment" in retrieve[0]:
        plot(drawn(retrieve), drawing)
        text += f"\n![Microseconds against context]({drawing.name})\n"
    if by_op["select"]:
        text += "\n## Selection alone\n\n" + markdown([choice_row(record) for record in by_op["select"]], CHOICE)
    if by_op["append"]:
        text += "\n## Appending alone\n\n" + markdown([decode_row(record) for record in by_op["append"]], APPEND)
    return text


def latest(records: list[Record]) -> list[Record]:
    """Return the kernel records with a time, the newest of every row; those of the kernels' first form where there are no others."""
    own = [record for record in records if record["benchmark"] == "kernel" and record["status"] == "ok" and record["dtype"] == "bfloat16"]
    own = own or [from_first_form(record) for record in records if record["benchmark"] == "retrieval" and record["correct"]]
    names = ("op", "geometry", "batch", "context", "policy", "pooling", "unit", "budget", "new_tokens")
    return list({tuple(record.get(name) for name in names): record for record in own}.values())


def from_first_form(record: Record) -> Record:
    """Read a record that the script before `trtkv bench` wrote."""
    unit = 32 if record["policy"] == "page" else 1
    return {
        **record, "op": "retrieve", "geometry": OLD_ROWS[record["row"].partition("-")[0]], "unit": unit,
        "select_us": record["score_us"] + record["select_us"],
        "select_kernels_us": {"score": record["score_us"], "select_units": record["select_us"]},
        "dense_route_us": record["attend_dense_kernel_us"] or None, "moved_bytes": record["bytes_moved"],
        "times_bound": record["whole_us"] / record["bound_us"],
    }  # fmt: skip


def about(records: list[Record]) -> str:
    """Say where and how the figures were measured."""
    first = records[-1]
    if "environment" not in first:
        return (
            OLD + f"{first['machine']}, torch {first['torch']}, CUDA {first['cuda']}, {first['dtype']}, {first['date']}, 4.3 TB/s for the bound.\n\n"
        )
    libraries = ", ".join(sorted({record["dense"] for record in records}))
    spread, copy = max(record["spread_percent"] for record in records), first["copy_GBps"] / 1e3
    facts = {**first["environment"], "date": first["environment"]["date"][:10], "dtype": first["dtype"], "commit": commits(records)}
    return ABOUT.format(**facts, libraries=libraries, spread=spread, copy=copy)


def goal(record: Record) -> float | None:
    """Return the least ratio that a row should reach."""
    pair = GOALS.get((record["geometry"], record["batch"], record["context"]))
    return None if pair is None or record["policy"] == "full" else pair[record.get("unit", 1) > 1]


def decode_row(record: Record) -> Record:
    """Add what the table shows beside the figures."""
    shape = f"{record['batch']} x {record['context'] // 1024}k"
    return {
        **record,
        "shape": shape,
        "label": label(record),
        "goal": goal(record),
        "moved": record["moved_bytes"] / 1e6,
        "by_kernel": by_kernel(record),
    }


def choice_row(record: Record) -> Record:
    """Add rows and goal of a selection alone."""
    rows = record["batch"] * record["kv_heads"]
    limit, kernels = CHOICE_GOALS_US.get((rows, record["context"])), record.get("select_kernels_us", {})
    scoring = ["fier_list"] if "fier_list" in kernels else [name for name in kernels if "score" in name]
    choice = sum(took for name, took in kernels.items() if name not in scoring) if scoring else None
    return {**decode_row(record), "shape": f"{rows} x {record['context'] // 1024}k", "choice": choice, "goal": limit}


def drawn(records: list[Record]) -> list[Record]:
    """Leave out of the plot what was measured at one context only."""
    line = lambda record: (record["geometry"], record["batch"], label(record))  # noqa: E731
    return [record for record in records if sum(line(one) == line(record) for one in records) > 1]


def missed(records: list[Record]) -> str:
    """Name the goals that are missed, each with the stage that takes longest, and the short contexts at which both routes lose."""
    lines = []
    for record in records:
        want, where = goal(record), f"{record['geometry']} {record['batch']} x {record['context'] // 1024}k, {label(record)}"
        stages = stages_of(record)
        if want is not None and record["ratio"] < want and stages:
            longest = max(stages, key=lambda name: stages[name])
            share = f"{cell(stages[longest])} of {cell(record['whole_us'])} us"
            lines.append(f"- {where}: {cell(record['ratio'])} of {cell(want)}; longest is {longest} with {share}.")
        best = min(record["whole_us"], record.get("dense_route_us") or record["whole_us"])
        if record["context"] <= SHORT_CONTEXT and best > record["dense_us"]:
            lines.append(f"- {where}: the faster route takes {cell(best)} us, dense attention {cell(record['dense_us'])} us.")
    return "\nGoals missed ([why](retrieval-kernels.md)):\n\n" + "\n".join(lines) + "\n" if lines else "\nNo goal is missed.\n"


def stages_of(record: Record) -> dict[str, float]:
    """Return the microseconds of append and attend, and of the selection by kernel."""
    ops = {name: record[f"{name}_us"] for name in ("append", "attend") if f"{name}_us" in record}
    select = {"select": record["select_us"]} if "select_us" in record else {}
    return {**ops, **(record.get("select_kernels_us") or select)}


def markdown(rows: list[Record], columns: dict[str, str]) -> str:
    """Write rows as a Markdown table, without columns that no row fills."""
    used = {name: title for name, title in columns.items() if any(row.get(name) is not None for row in rows)}
    lines = ["| " + " | ".join(used.values()) + " |", "|" + "".join("---|" if title in WORDS else "---:|" for title in used.values())]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in used) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

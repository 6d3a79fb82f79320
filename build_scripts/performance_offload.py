"""The section of docs/performance.md about pages in host memory, from the records of `build_scripts/bench_offload.sh`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtkv.bench.report import cell, commits
from trtkv.runtime.memory import readable

Record = dict[str, Any]
BUS_SHARE, BUS_PAGES = 0.85, 64  # of the pinned bandwidth, when a launch brings so many pages of every head
X_RESIDENT, X_PAGE_BY_PAGE = 1.10, 13.0
BELOW_FULL_FROM = 65536  # tokens of context from which an offloaded step may not be slower than one of full
MILLION, MILLION_BYTES = 1 << 20, 24 << 30
BASELINE = "page by page tokens first"  # what systems that copy page by page do
LAUNCHES = {
    "geometry": "geometry", "batch": "sequences", "store": "stored as", "pages": "pages a head", "order": "first on the host", "recall_us": "us",
    "GBps": "GB/s", "bus_GBps": "bus", "share": "of the bus",
}  # fmt: skip
ANSWERS = {
    "model": "model", "shape": "batch x prompt", "label": "pages", "answer": "answer", "ttft": "TTFT s", "answer_s": "answer s", "whole_s": "whole s",
    "decode_tokens_per_s": "tokens/s", "x_resident": "x resident", "x_page_by_page": "x faster than page by page", "moved": "pages a head and step",
    "begin": "KV on device", "end": "at the end", "peak": "peak beside weights", "sampled": "sampled at",
}  # fmt: skip
PICTURE = "offload-step.svg"
TRACED = (
    "- {model} {shape}, {label}: {step_us} us, recall in front of attention {recall_in_front_us} us, beside {beside_us} us, of which {hidden_us} us "
    "while others compute.\n"
)
STEPS = {
    "model": "model", "shape": "batch x context", "label": "pages", "moved": "pages a head and step", "query_cosine": "queries' cosine",
    "ttft": "TTFT s", "itl_p50_ms": "step p50 ms", "itl_p90_ms": "p90", "x_resident": "x resident", "x_full": "x full's time",
    "device": "KV on device", "host": "on host", "peak": "peak beside weights", "fill": "while filled",
}  # fmt: skip
HEAD = """
## Pages in host memory

`build_scripts/bench_offload.sh` measures these rows: {machine}, driver {driver}, torch {torch}, commits {commit}, {date}; {bus:.1f} GB/s come from
pinned memory by the copy engine.
"""
LAUNCHES_HEAD = """
One launch of the recall kernel that finds none of its pages resident, pages of {page} tokens, {dtype}; every page was compared with the host's.

"""
PLANNED = {"geometry": "geometry", "batch": "sequences", "selected": "pages selected", "pages": "of them missing", "recall_us": "us"}
PLANNED_HEAD = """
Launches whose selections are in the frames but for some pages, the mean over the heads:

"""
ANSWERS_HEAD = """
Whole answers with random weights, `{policy}` with a budget of {budget}: a prompt is read, then every token is a step, and only the last is waited
for. The whole counts the prompts of all sequences, of which one was read. Where *sampled at* is a number, steps were timed at so many contexts along
the answer and integrated (of 1, multiplied). *x resident* is the answer's time over that of the engine that keeps all pages on the device. Tokens are
drawn towards one another by a drift of {drift}, which decides how many pages move.

"""
CHOICE_HEAD = """
What an engine measures where `--recall` is left to it (`auto`), and what it chose:

"""
CHOICE = "- {model} {shape}, {policy}: {line}.\n"
STEPS_HEAD = """
Whole decode steps with random weights, `{policy}` with a budget of {budget}; queries change from step to step, by a drift looked for to miss
{miss} pages of every KV head; the table says how many it was. *x resident* is the step over that of the engine that keeps all pages on the device,
*x full's time* over that of `full` on the device. *page by page* is a host that reads each layer's selection and copies; *tokens first* parts a page
of a head into rows. Where TTFT is empty, caches were filled with random pages. The peak is the most that was taken beside the weights: cache,
activations, captured steps.

"""


def section(records: Sequence[Record], docs: Path) -> str:
    """Return the section, of every row the newest record with a time; nothing where there is none. A picture of steps is shown where docs has it."""
    good = [one for one in records if one.get("status") == "ok" and "bus_GBps" in one]  # measured on a GPU
    kernels = [{"store": "bf16", **one} for one in good if one["benchmark"] == "kernel" and one.get("op") == "recall"]
    launches = _newest([one for one in kernels if "selected" not in one], ("geometry", "batch", "store", "pages", "order"))
    planned = _newest([one for one in kernels if "selected" in one], ("geometry", "batch", "selected", "pages"))
    steps = [one for one in good if one["benchmark"] == "step" and "recall" in one and "miss_pages" in one and "timeline" not in one]
    steps = _newest(steps, ("model", "batch", "context", "policy", "recall"))
    answers = _newest([one for one in good if one["benchmark"] == "answer"], ("model", "batch", "context", "answer", "policy", "recall"))
    if not launches and not steps and not answers:
        return ""
    newest = (launches + steps + answers)[-1]
    place, every = newest["environment"], launches + planned + steps + answers
    facts = {**place, "date": place["date"][:10], "commit": commits(every), "bus": newest["bus_GBps"]}
    text = HEAD.format(**{"driver": "", **facts})
    if launches:
        text += LAUNCHES_HEAD.format(**launches[-1]) + _table(launches, LAUNCHES, 1)
    if planned:
        text += PLANNED_HEAD + _table(planned, PLANNED, 1)
    if steps:
        about = next((one for one in steps if one["policy"] != "full"), steps[0])
        names = "`, `".join(dict.fromkeys(one["policy"] for one in steps if one["budget"] is not None)) or about["policy"]
        text += STEPS_HEAD.format(policy=names, budget=about["budget"], miss=cell(about["miss_pages"])) + _steps(steps)
        text += _chosen(steps)
        text += _traced([one for one in good if "timeline" in one], docs)
    if answers:
        text += ANSWERS_HEAD.format(**answers[-1]) + _table([_answer(one, answers) for one in answers], ANSWERS, 3)
    missed = _missed(launches, steps) + _missed_answers(answers)
    return text + ("\nGoals missed:\n\n" + "\n".join(missed) + "\n" if missed else "\nNo goal is missed.\n")


def _traced(records: Sequence[Record], docs: Path) -> str:
    """Say where the time of traced steps went."""
    newest = _newest(records, ("model", "batch", "context", "policy", "recall"))
    lines = [TRACED.format(**_shown(one, newest), **{name: cell(took) for name, took in one["timeline"].items()}) for one in newest]
    picture = [f"\n![When steps compute and when pages move]({PICTURE})\n"] if lines and (docs / PICTURE).exists() else []
    return "\nTraced steps:\n\n" + "".join(lines) + "".join(picture) if lines else ""


def _chosen(steps: Sequence[Record]) -> str:
    """Say what was measured to choose what moves pages."""
    lines = [CHOICE.format(**_shown(one, steps), line=_choice(one["choice"])) for one in steps if "measured" in one.get("choice", {})]
    return CHOICE_HEAD + "".join(lines) if lines else ""


def _choice(choice: Record) -> str:
    took = choice["measured"]
    step = f"kernel {took['step_kernel_us']:.0f} us, copies {took['step_copies_us']:.0f} us for {took['pages']} pages of every head"
    bulk = f"kernel {took['bulk_kernel_us']:.0f} us, copies {took['bulk_copies_us']:.0f} us for {took['run_pages']} pages in a row"
    return f"steps by {choice['step']} ({step}), prompts by {choice['bulk']} ({bulk})"


def _answer(one: Record, answers: Sequence[Record]) -> Record:
    size = lambda name: readable(one[name]) if name in one else None  # noqa: E731
    slow = _slow(one, answers, "page by page") if one["recall"] == "ahead" else None
    context = one["context"]
    where = "on the device" if one["recall"] == "resident" else one["recall"]
    return {
        **one, "shape": f"{one['batch']} x {f'{context // 1024}k' if context >= 1024 else context}", "label": f"{one['policy']}, {where}",
        "ttft": one["ttft_ms"] / 1e3 if "ttft_ms" in one else None, "moved": _moved(one), "begin": size("kv_begin_bytes"),
        "end": size("kv_end_bytes"), "peak": size("kv_peak_bytes"), "x_page_by_page": slow["answer_s"] / one["answer_s"] if slow else None,
    }  # fmt: skip


def _slow(one: Record, answers: Sequence[Record], recall: str) -> Record | None:
    load = ("model", "batch", "context", "answer", "policy")
    return next((other for other in answers if other["recall"] == recall and all(other[name] == one[name] for name in load)), None)


def _missed_answers(answers: Sequence[Record]) -> list[str]:
    """Name the goals that whole answers miss."""
    lines = []
    for one in (_answer(each, answers) for each in answers if each["recall"] == "ahead"):
        where = f"- {one['model']} {one['shape']} to {one['answer']} tokens, {one['policy']}"
        if one.get("x_resident", 0) > X_RESIDENT:
            lines.append(f"{where}: {cell(one['x_resident'])} times resident, goal {cell(X_RESIDENT)}.")
        slow = _slow(one, answers, BASELINE)
        if slow and slow["answer_s"] < X_PAGE_BY_PAGE * one["answer_s"]:
            lines.append(f"{where}: {cell(slow['answer_s'] / one['answer_s'])} times as fast as {BASELINE}, goal {cell(X_PAGE_BY_PAGE)}.")
    return lines


def _newest(records: Sequence[Record], names: tuple[str, ...]) -> list[Record]:
    return list({tuple(one.get(name) for name in names): one for one in records}.values())


def _steps(steps: list[Record]) -> str:
    steps.sort(key=lambda one: (one["model"], one["batch"], one["context"]))
    return _table([_shown(one, steps) for one in steps], STEPS, 3)


def _shown(one: Record, steps: Sequence[Record]) -> Record:
    size = lambda name: readable(one[name]) if name in one else None  # noqa: E731
    full = _other(one, steps, "resident", "full")
    where = "on the device" if one["recall"] == "resident" else one["recall"]
    return {
        **one, "shape": f"{one['batch']} x {one['context'] // 1024}k", "label": f"{one['policy']}, {where}", "moved": _moved(one),
        "ttft": one["ttft_ms"] / 1e3 if "ttft_ms" in one else None, "x_full": one["itl_p50_ms"] / full["itl_p50_ms"] if full else None,
        "device": size("device_kv_bytes"), "host": size("host_kv_bytes"), "peak": size("kv_peak_bytes"), "fill": size("fill_peak_bytes"),
    }  # fmt: skip


def _moved(one: Record) -> float | None:
    return one["pages_in_front"] + one["pages_ahead"] if "pages_in_front" in one else None


def _other(one: Record, steps: Sequence[Record], recall: str, policy: str) -> Record | None:
    """Return another row of the same load, if it was measured; never the row itself."""
    load = ("model", "batch", "context")
    alike = (other for other in steps if all(other[name] == one[name] for name in load) and other is not one)
    return next((other for other in alike if (other["recall"], other["policy"]) == (recall, policy)), None)


def _table(rows: Sequence[Record], columns: dict[str, str], words: int) -> str:
    used = {name: title for name, title in columns.items() if any(row.get(name) is not None for row in rows)}
    lines = ["| " + " | ".join(used.values()) + " |", "|" + "---|" * words + "---:|" * (len(used) - words)]
    return "\n".join([*lines, *("| " + " | ".join(cell(row.get(name)) for name in used) + " |" for row in rows)]) + "\n"


def _missed(launches: Sequence[Record], steps: Sequence[Record]) -> list[str]:
    """Name the goals that are missed."""
    lines = [
        f"- {one['geometry']}, {one['batch']} sequences, {one['pages']} pages a head, {one['store']}: {one['share']:.0%} of the bus, "
        f"goal {BUS_SHARE:.0%}."
        for one in launches
        if one["pages"] >= BUS_PAGES and one["order"] == "heads" and one["share"] < BUS_SHARE
    ]
    for one in (_shown(step, steps) for step in steps if step["recall"] == "ahead"):
        where = f"- {one['model']} {one['shape']}, {one['policy']}"
        if one.get("x_resident", 0) > X_RESIDENT:
            lines.append(f"{where}: {cell(one['x_resident'])} times resident, goal {cell(X_RESIDENT)}.")
        if one["context"] >= BELOW_FULL_FROM and one["x_full"] is not None and one["x_full"] >= 1:
            lines.append(f"{where}: slower than full.")
        slow = _other(one, steps, BASELINE, one["policy"])
        if slow and slow["itl_p50_ms"] < X_PAGE_BY_PAGE * one["itl_p50_ms"]:
            lines.append(f"{where}: {cell(slow['itl_p50_ms'] / one['itl_p50_ms'])} times as fast as {BASELINE}, goal {cell(X_PAGE_BY_PAGE)}.")
        if one["context"] >= MILLION and one.get("kv_peak_bytes", 0) > MILLION_BYTES:
            lines.append(f"{where}: {one['peak']} beside the weights, goal {readable(MILLION_BYTES)}.")
    return lines

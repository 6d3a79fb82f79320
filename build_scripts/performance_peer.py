"""The table of docs/performance.md that stands first: trtkv beside vLLM on one machine, from the records of bench_peer.py."""

from __future__ import annotations

from collections.abc import Sequence

from performance_rows import Missed, Record, above, facts, goals, load, newest, table

FIGURES = {"load": ("seconds", "load, s"), "ttft": ("ttft_ms", "first token, ms"), "decode": ("itl_ms", "decode step, ms")}
# Goals over vLLM's time, of `full` and of the best policy.
GOALS = {"load:64x8192/256": (0.95, 0.80), "load:16x32768/512": (0.95, 0.65), "load:8x131072/512": (0.98, 0.75)}
PROMPT_GOAL = 0.95  # of the time to a first token, of `full`
SPARSE_GOAL = {"ttft:131072": 0.5}  # with a prefill role


def beside_peer(records: Sequence[Record]) -> str:
    """Write the table: rows down; vLLM, `full` and the policy that takes least time across. All are of the GPU on which vLLM was measured last."""
    every = [one for one in records if one["benchmark"] == "peer"]
    last = max((one["environment"] for one in every if one["side"] == "vllm"), key=lambda place: str(place["date"]), default={"machine": None})
    here = (one for one in every if one["environment"]["machine"] == last["machine"])
    own = newest(here, "kind", "context", "batch", "answer", "side", "policy", "model")
    own.sort(key=lambda one: list(FIGURES).index(one["kind"]))
    rows, missed, shown = [], list[Missed](), list[Record]()
    peers = [one for one in own if one["side"] == "vllm"]
    for peer in peers:
        beside = [one for one in own if one["side"] == "trtkv" and (one["row"], one["model"]) == (peer["row"], peer["model"])]
        full = next((one for one in beside if one["policy"] == "full"), None)
        best = min((one for one in beside if one is not full), key=figure, default=None)
        ratios = [figure(one) / figure(peer) if one else None for one in (full, best)]
        where = load(peer) + (f" / {peer['answer']}" if peer["kind"] == "load" else "")
        times = [figure(one) if one else None for one in (peer, full, best)]
        rows += [[FIGURES[peer["kind"]][1], where, best and named(best), *times, *ratios]] if beside else []
        shown += beside
        limits = GOALS.get(peer["row"], (PROMPT_GOAL, SPARSE_GOAL.get(peer["row"])) if peer["kind"] == "ttft" else (None, None))
        for what, ratio, limit in zip(("full", "best policy"), ratios, limits, strict=True):
            missed += above(f"{what} over vLLM", f"{peer['kind']} {where}", ratio, limit) if limit else []
    if not rows:
        return ""
    versions = ", ".join(dict.fromkeys(f"vLLM {one['version']}" for one in peers))
    models = ", ".join(dict.fromkeys(one["model"] for one in peers))
    return f"""
## Beside vLLM

{models} with the same prompts, steps and greedy answers. A load is prompts x tokens / tokens of each answer, submitted at once, and takes until the
last answer ends. *best* is the policy that takes least time; ratios are to vLLM's time, so less is better. With random weights nothing says
which blocks of a prompt matter, so `xattention` reads a given share of them. {versions}, {facts(shown)} (`build_scripts/bench_peer.py`).

{table(["figure", "load", "best", "vLLM", "full", "best policy", "full / vLLM", "best / vLLM"], rows, 3)}
{goals(missed)}
"""


def named(one: Record) -> str:
    """Return a record's policy, with the share of blocks that its prompts read where one was given."""
    share = next((float(field.partition("=")[2]) for field in one.get("sets", ()) if field.startswith("prefill.most=")), None)
    return f"{one['policy']}" + (f" ({share:.0%})" if share and one["kind"] != "decode" else "")


def figure(one: Record) -> float:
    """Return what a row is compared by: seconds or milliseconds."""
    return float(one[FIGURES[one["kind"]][0]])

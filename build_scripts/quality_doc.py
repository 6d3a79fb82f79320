"""Writes docs/quality.md and its plots from the records that `quality.py` and `quality_peer.py` made, and from those of `trtkv eval` beside them.

python build_scripts/quality_doc.py docs/quality.jsonl
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from quality import everything
from quality_cells import VARIED, standard_error
from quality_tables import MARKERS, Record, rows_of, sections, table

from trtkv.presets import policy_presets

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "quality.md"
TASKS = ("passkey", "needle")
BEHIND = ("eb3aa79", "d88f514", "b5d7935")  # commits at which MiniKV's definition differed
FAMILIES = {  # what shares a hue: retrieval reads less, the others store less
    "retrieval": ("fier", "quest", "freekv", "arkvale", "shadowkv"),
    "eviction": ("lagkv", "snapkv", "streaming", "h2o", "keydiff", "tova", "raas", "razor", "pyramidkv", "knorm"),
    "compression": ("minikv", "minikv-pyramid", "arkv", "qhitter", "kivi"),
}


class Records:
    """Finished cells, found by what they are."""

    def __init__(self, file: Path) -> None:
        rows = rows_of(file)
        self.own = [row for row in rows if "preset" in row]
        self.peers = {(row["task"], row["peer"], row["percent"], row["length"]): row for row in rows if "peer" in row}
        self._by_key = {key_of(row): row for row in self.own}  # the newest of a cell: files grow at their end

    def find(self, task: str, preset: str, percent: int, length: int, sets: tuple[str, ...] = (), blind: bool = True, seed: int = 0) -> Record | None:
        """Return a cell's record, None where it was not run."""
        return self._by_key.get((task, preset, sets, percent, length, blind, seed))

    def share(self, record: Record) -> float:
        """Return stored bytes relative to the whole cache on the same samples."""
        full = self.find(record["task"], "full", 0, record["length"], seed=record["seed"])
        assert full is not None, "the reference was not run"
        return record["stored_bytes"] / full["stored_bytes"]

    def again(self) -> list[tuple[Record, Record]]:
        """List the cells that were run at two commits, the older record first."""
        first = {key_of(row): row for row in reversed(self.own)}
        return [(first[key], row) for key, row in self._by_key.items() if first[key] is not row]

    def newest(self) -> list[Record]:
        """Return every cell's newest record."""
        return list(self._by_key.values())

    def missing(self) -> int:
        """Count the cells with answers that have no record."""
        return sum(one not in self._by_key for one in asked())


def asked() -> list[tuple[Any, ...]]:
    """List the cells with answers that are to be measured."""
    every = (cell for cell in everything() if cell.task in TASKS)
    return [(cell.task, cell.preset, cell.sets, cell.percent, cell.length, cell.blind, cell.seed) for cell in every]


def key_of(row: Record) -> tuple[Any, ...]:
    """Tell a record from others."""
    return (row["task"], row["preset"], tuple(row["sets"]), row["percent"], row["length"], row["blind"], row["seed"])


def main() -> None:
    """Write the document whole or not at all, then the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    records = Records(options.records)
    lengths = sorted({row["length"] for row in records.own})
    parts = [head(records, lengths), goals(records), *(section(records, length) for length in lengths), inside(records)]
    parts += sections(options.records.parent)
    part = options.out.with_suffix(".partial")
    part.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    part.replace(options.out)
    for length in lengths:
        plot(records, length, options.out.with_name(f"quality-{length}.png"))


def head(records: Records, lengths: list[int]) -> str:
    """Say what was measured and how."""
    full = records.find("passkey", "full", 0, lengths[0])
    assert full is not None
    missing, total = records.missing(), len(asked())
    absent = (
        f"- {missing} of the {total} cells with answers that `quality.py list` names were not run; a dash stands in their place." if missing else ""
    )
    versions = next(iter(records.peers.values()))["versions"] if records.peers else {}
    peer = f"kvpress {versions['kvpress']} with transformers {versions['transformers']}" if versions else "no peer"
    return f"""# Quality

Written by `python build_scripts/quality_doc.py docs/quality.jsonl` from the records of `build_scripts/quality.py` and `quality_peer.py`, and of
`trtkv eval` in the files beside it; do not edit. SmolLM2-135M-Instruct in {full["dtype"]} on one {full["device"]} (torch executor); peer: {peer},
same weights. Sections that say `--device cpu` ran there in float32.

{commits(records)}

How to read the tables:

- Every preset runs at budgets of 5, 11, 25 and 50% of the context; "own" is a preset's own size. A budget counts tokens of each KV head.
- The document is the prompt and the question is fed behind it, token by token, so what is evicted at the prompt's end is chosen without the
  question, and retrieval selects for question and answer alike. The haystack is prose from Python's documentation.
- **passkey** and **needle**: share of samples whose answer is predicted right token by token, which is when greedy generation gives it; then the
  share of right digits (passkey) or tokens (needle; about a third of them can be guessed without the document), and the answer's negative
  log-likelihood in nats a token.
- **bytes**: what one sequence stores at its fullest behind the prompt, summaries and metadata included, over what `full` stores. **read**: tokens
  whose keys and values a decoded token reads, mean over layers.
- **perplexity** of 256 tokens of the same prose behind 1,920 (two windows): too few to rank presets that are close.
- **kvpress**: passkey and needle, right answers, of the press of the same name that keeps as many tokens, on the same prompts.{peer_check(records)}
- 20 samples a cell for `full`, the five systems, `quest`, `snapkv`, `streaming` and `h2o`, 10 for the others. A share of 0.5 has a standard error of
  0.11 at 20 samples and 0.16 at 10: smaller differences say nothing. Haystacks and keys are the same for all presets.
{absent}

One small model, few tasks: enough to see what a policy loses, not to rank the papers. LagKV's lag is chosen for the budget (`trtkv eval` does the
same), and sinks and windows that do not fit a budget are made smaller: `changed` in the records."""


def commits(records: Records) -> str:
    """Say how many cells are of which commit, and how those that were run at two compare."""
    counts = Counter(row["commit"] for row in records.newest())
    parts = ", ".join(f"{count} at {commit}" for commit, count in counts.most_common())
    pairs = [(old, new) for old, new in records.again() if "exact" in new]
    text = f"Cells by commit: {parts} (`commit` in the records)."
    if any(row["preset"].startswith("minikv") and row["commit"] in BEHIND for row in records.newest()):
        text += " `minikv` and `minikv-pyramid` were measured when a complete run was encoded behind its step's attention; now it is in front of it."
    if not pairs:
        return text
    same = sum(old["each"]["exact"] == new["each"]["exact"] for old, new in pairs)
    apart = max(abs(old["nll"] - new["nll"]) for old, new in pairs)
    names = ", ".join(f"`{new['preset']}` on {new['task']}" for _, new in pairs)
    return (
        f"{text} Run at both: {names}; in {same} of {len(pairs)} the\nsame samples are answered right, and mean losses differ by at most {apart:.4f}."
        " The newer record stands in the tables."
    )


def peer_check(records: Records) -> str:
    """Set the peer's answers beside the product's, sample by sample where both have as many: the whole cache shows whether the prompts are equal."""
    pairs: dict[str, list[tuple[Record, Record]]] = {}
    for (task, name, percent, length), row in records.peers.items():
        own = records.find(task, name, 0 if name == "full" else percent, length)
        if own and "exact" in own and own["samples"] == row["samples"]:
            pairs.setdefault(name, []).append((own, row))
    if "full" not in pairs:
        return ""
    apart = max(abs(own["nll"] - row["nll"]) for own, row in pairs["full"])
    others = ", ".join(f"`{name}` {alike(rows)}" for name, rows in pairs.items() if name != "full")
    return f"""
  Samples of which both answer right or both wrong: {alike(pairs["full"])} with the whole cache, whose mean losses differ by at most {apart:.4f};
  {others}."""


def alike(pairs: list[tuple[Record, Record]]) -> str:
    """Say in how many samples two records agree."""
    same = [int(x) == int(y) for own, row in pairs for x, y in zip(own["each"]["exact"], row["each"]["exact"], strict=True)]
    return f"{sum(same)} of {len(same)}"


def goals(records: Records) -> str:
    """Set each goal beside what came of it."""
    rows = [[goal, result] for goal, result in results(records)]
    about = "The goals were set before the measurement; 60 samples unless said. Intervals are 95% (Wilson); differences are paired, with their"
    return f"## Goals\n\n{about}\nstandard error.\n\n" + table(["goal", "result"], rows)


def both(tell: Callable[[str], str]) -> str:
    """Say something of both tasks."""
    return "; ".join(f"{task}: {tell(task)}" for task in TASKS)


def results(records: Records) -> Iterator[tuple[str, str]]:
    """Compute what the goals ask for; cells of seed 1 have 60 samples."""

    def cell(task: str, name: str, percent: int, *sets: str, seed: int = 1) -> Record:
        found = records.find(task, name, percent, 2048, sets, seed=seed)
        assert found is not None, (task, name, percent, sets, seed)
        return found

    def exact(task: str, name: str, percent: int) -> str:
        return f"{cell(task, name, percent, seed=0)['exact']:.2f}"

    def rates(name: str, percent: int, *sets: str, seed: int = 1) -> str:
        return both(lambda task: rate(cell(task, name, percent, *sets, seed=seed)))

    yield (
        "`fier` at 11% within 1 point of full on passkey and needle",
        f"{rates('fier', 11)}, full {rates('full', 0)}. **Missed.** With `retrieve.sink=4`, which is not the paper's: "
        f"{rates('fier', 11, 'retrieve.sink=4')}.",
    )
    against = both(lambda task: difference(cell(task, "fier", 11), cell(task, "quest", 11)))
    others = both(lambda task: ", ".join(f"{exact(task, 'fier', p)} to {exact(task, 'quest', p)}" for p in (5, 25, 50)))
    yield (
        "`fier` above `quest` at equal budget",
        f"At 11% {against}. At 5, 25 and 50% (20 samples) {others}. **Reached** where not both find everything; passkey at 11% within two errors.",
    )
    yield "`lagkv` above `snapkv` and `streaming` when compression does not see the question", lag_result(cell, exact)
    size = records.share(cell("passkey", "minikv-pyramid", 0))
    yield (
        "`minikv-pyramid` within 2% of full at 14% of the bytes",
        f"{rates('minikv-pyramid', 0)} at {size:.0%} of the bytes. **Missed.** Two bits cost more than the goal: `kivi`, which keeps all tokens, has "
        f"{rates('kivi', 0, seed=0)}.",
    )
    size = records.share(cell("passkey", "arkv", 25))
    yield (
        "`arkv` within 3% of full at a quarter of the bytes",
        f"{rates('arkv', 25)} at {size:.0%} of the bytes. **Missed**, and by the same eviction without fp8 too: `arkv-origin` has "
        f"{rates('arkv-origin', 25, seed=0)}.",
    )
    against = both(lambda task: difference(cell(task, "freekv", 11), cell(task, "freekv", 11, "retrieve.tau=1")))
    yield (
        "`freekv` within 0.5 point of blocking retrieval (`retrieve.tau=1`)",
        f"At 11% {against}. **Not established**: the differences are about their error, greater than the goal. Both find far less than `fier` "
        "at the same budget.",
    )


def lag_result(cell: Callable[..., Record], exact: Callable[[str, str, int], str]) -> str:
    """Set LagKV beside its rivals at three budgets."""
    places = [(task, percent) for task in TASKS for percent in (11, 25, 50)]
    digits = lambda name, place: cell(place[0], name, place[1], seed=0)["digits"]  # noqa: E731
    won = {name: sum(digits("lagkv", place) > digits(name, place) for place in places) for name in ("snapkv", "streaming")}
    text = "; ".join(f"more right digits or tokens than `{name}` in {count} of {len(places)} cells" for name, count in won.items())
    whole = both(
        lambda task: ", ".join(
            f"{exact(task, 'lagkv', p)} ({exact(task, 'snapkv', p)} and {exact(task, 'streaming', p)}) at {p}%" for p in (11, 25, 50)
        )
    )
    return (
        f"{text}. Whole answers, `snapkv` and `streaming` in brackets: {whole}. **Partly**: above `snapkv`; `streaming` finds what its window holds "
        "and nothing else, so it leads in whole answers at 11 and 25%."
    )


def rate(record: Record) -> str:
    """Write a share of right answers with its interval."""
    low, high = wilson(record["exact"], record["samples"])
    return f"{record['exact']:.3f} [{low:.2f}, {high:.2f}]"


def difference(a: Record, b: Record) -> str:
    """Write two shares on the same samples and their difference."""
    pairs = [int(x) - int(y) for x, y in zip(a["each"]["exact"], b["each"]["exact"], strict=True)]
    return f"{a['exact']:.2f} to {b['exact']:.2f}, difference {sum(pairs) / len(pairs):+.2f} ± {standard_error(pairs):.2f}"


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95% interval of a share (Wilson, 1927)."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def section(records: Records, length: int) -> str:
    """Write the table of one length under its plot."""
    rows = []
    for name in policy_presets():
        sets = sorted({tuple(row["sets"]) for row in records.own if row["preset"] == name and row["length"] == length})
        for own in sets or [()]:
            rows += [row_of(records, name, own, percent, length) for percent in percents_of(records, name, own, length)]
    columns = ["preset", "budget", "bytes", "read", "passkey", "digits", "nll", "needle", "tokens", "nll", "perplexity", "kvpress"]
    return f"## {length:,} tokens\n\n![quality against stored bytes and against tokens read](quality-{length}.png)\n\n" + table(columns, rows)


def inside(records: Records) -> str:
    """Write what changes where the question belongs to the prompt that is compressed."""
    rows = []
    for name in policy_presets():
        for sets in sorted({tuple(row["sets"]) for row in records.own if row["preset"] == name and not row["blind"]}):
            percents = {cell.percent for cell in everything() if (cell.preset, cell.sets, cell.blind) == (name, sets, False)}
            for percent in sorted(percents):
                seen = [records.find(task, name, percent, 2048, sets, blind=False) for task in TASKS]
                apart = [records.find(task, name, percent, 2048, sets) for task in TASKS]
                scores = [f"{one['exact']:.2f}" if one and "exact" in one else "-" for pair in zip(apart, seen, strict=True) for one in pair]
                rows.append(["".join(f"`{one}` " for one in (name, *sets)).strip(), f"{percent}%" if percent else "own", *scores])
    columns = ["preset", "budget", "passkey, question apart", "question inside", "needle, question apart", "question inside"]
    return f"""## The question inside the prompt

The same cells at 11% of 2,048 tokens with the question as part of the prompt, so that what is evicted at its end can be chosen for the question:
right answers, beside those of the table above. A dash: not run; presets of which neither task was run are left out.

{table(columns, rows)}"""


def percents_of(records: Records, name: str, sets: tuple[str, ...], length: int) -> list[int]:
    """Return the budgets of a preset that were asked for."""
    asked = {cell.percent for cell in everything() if (cell.preset, cell.sets, cell.length) == (name, sets, length) and cell.blind and not cell.seed}
    return sorted(asked & ({*VARIED} if sets else asked))


def row_of(records: Records, name: str, sets: tuple[str, ...], percent: int, length: int) -> list[str]:
    """Write the figures of one preset and budget."""
    found = [records.find(task, name, percent, length, sets) for task in TASKS]
    text = records.find("agreement", name, percent, length, sets) or records.find("perplexity", name, percent, length, sets)
    label = f"`{name}`" + "".join(f" `{one}`" for one in sets)
    budget = f"{percent}%" if percent else "own"
    peers = [records.peers.get((task, name, 100 if name == "full" else percent, length)) for task in TASKS] if not sets else []
    peer = " / ".join(f"{one['exact']:.2f}" for one in peers if one)
    if any(one and "refused" in one for one in found):
        return [label, budget, "does not fit", *[""] * 8, peer]
    first = next((one for one in found if one), None)
    if first is None:
        return [label, budget, *["-"] * 8, perplexity(text), peer]
    cells = [cell for one in found for cell in ([f"{one['exact']:.2f}", f"{one['digits']:.2f}", f"{one['nll']:.2f}"] if one else ["-"] * 3)]
    return [label, budget, f"{records.share(first):.1%}", f"{first['tokens_read_per_step']:,.0f}", *cells, perplexity(text), peer]


def perplexity(record: Record | None) -> str:
    """Write the perplexity of a record, with its agreement with full and its divergence where they were measured."""
    if not record or "nll" not in record:
        return ""
    return f"{math.exp(record['nll']):.1f}" + (f" ({record['agreement']:.0%}, {record['kl']:.2f})" if "agreement" in record else "")


def plot(records: Records, length: int, target: Path) -> None:
    """Draw right answers (mean of both tasks) against stored bytes, and against tokens read for presets that store everything."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "quality"})
    panels = (("compression", "bytes"), ("eviction", "bytes"), ("retrieval", "tokens read"))
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), sharey=True, layout="constrained")
    for axis, (family, against) in zip(axes, panels, strict=True):
        _panel(axis, records, family, against, length)
    axes[0].set_ylabel("right answers, mean of passkey and needle")
    figure.suptitle(f"SmolLM2-135M-Instruct, {length:,} tokens; the question is not seen when the document is compressed")
    part = target.with_name(f".{target.name}")
    figure.savefig(part, dpi=130, format="png", metadata={"Software": None})
    plt.close(figure)
    part.replace(target)


def _panel(axis: Any, records: Records, family: str, against: str, length: int) -> None:
    full = [records.find(task, "full", 0, length) for task in TASKS]
    top = sum(one["exact"] for one in full if one) / len(full)
    whole = 1.0 if against == "bytes" else full[0]["tokens_read_per_step"]  # type: ignore[index]
    axis.axhline(top, color="0.6", linewidth=1)
    axis.annotate("full", (0.02, top), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", color="0.35")
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for index, name in enumerate(FAMILIES[family]):
        points = sorted(_points(records, name, against, whole, length))
        if points:
            axis.plot(*zip(*points, strict=True), marker=MARKERS[index], color=colours[index % 10], label=name, markersize=5, linewidth=1.3)
    axis.set_xscale("log")
    ticks = [one for one in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if axis.get_xlim()[0] <= one <= axis.get_xlim()[1]]
    axis.set_xticks(ticks, [f"{one:.0%}" for one in ticks])
    axis.minorticks_off()
    axis.set_ylim(-0.03, 1.08)
    axis.set_title(family)
    axis.set_xlabel(f"{against}, of full")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.0, (top + 0.02) / 1.11))


def _points(records: Records, name: str, against: str, whole: float, length: int) -> Iterator[tuple[float, float]]:
    for percent in (0, 5, 11, 25, 50):
        found = [records.find(task, name, percent, length) for task in TASKS]
        rows = [one for one in found if one and "exact" in one]
        if len(rows) == len(TASKS):
            place = records.share(rows[0]) if against == "bytes" else rows[0]["tokens_read_per_step"] / whole
            yield place, sum(one["exact"] for one in rows) / len(rows)


if __name__ == "__main__":
    main()

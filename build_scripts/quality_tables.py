"""Tables and plots of docs/quality.md from records of `trtkv eval`, a file of records each; `quality_doc.py` puts them together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

MARKERS = "osD^vP*X<>h"
Record = dict[str, Any]


def sections(folder: Path) -> list[str]:
    """Write every section whose records are there, in the order of the document."""
    makers: Mapping[str, Callable[[Path], str]] = {"ruler": ruler, "agreement": agreement, "attention": attention, "long": long_generation}
    files = {name: folder / f"quality-{name}.jsonl" for name in makers}
    return [makers[name](file) for name, file in files.items() if file.is_file()]


def rows_of(file: Path) -> list[Record]:
    """Read records."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a Markdown table."""
    lines = [list(columns)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def command(rows: list[Record], task: str, rest: str = "") -> str:
    """Write the command that makes such records."""
    about = rows[0]
    shared = f"--length {about['length']} --samples {about['samples']} --dtype {about['dtype']}"
    return f"`trtkv eval --model {about['model']} --task {task} {shared}{rest}`"


def costs(row: Record, full: Record) -> list[str]:
    """Write a record's preset, budget, bytes relative to full's, and tokens read."""
    budget = f"{row['budget']:,}" if row["budget"] else "own"
    return [f"`{row['policy']}`", budget, f"{row['stored_bytes'] / full['stored_bytes']:.1%}", f"{row['tokens_read_per_step']:,.0f}"]


def full_of(rows: list[Record]) -> Record:
    """Return the record of the whole cache."""
    return next(row for row in rows if row["policy"] == "full")


def ruler(file: Path) -> str:
    """Write the scores of RULER's tasks: a row a preset and budget, a column a task."""
    rows = rows_of(file)
    by_task = {(row["policy"], row["budget"], row["task"]): row for row in rows}
    tasks = [row["task"] for row in rows if row["policy"] == "full"]
    tasks = sorted(tasks, key=lambda name: (not name.startswith("niah"), name))
    subjects = list(dict.fromkeys((row["policy"], row["budget"]) for row in sorted(rows, key=lambda row: row["policy"] != "full")))
    subjects.sort(key=lambda one: (-len([task for task in tasks if (*one, task) in by_task]), one[0], one[1] or 0))
    cells = [
        [f"`{policy}`", f"{budget:,}" if budget else "own"]
        + [f"{by_task[policy, budget, task]['figures']['score']:.2f}" if (policy, budget, task) in by_task else "-" for task in tasks]
        for policy, budget in subjects
    ]
    about, commits = rows[0], ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return f"""## RULER's tasks

{command(rows, "ruler", " --policy ... --budget 11%,25% --batch 10")}
on one NVIDIA H200, commits {commits}; records with all answers in `{file.name}`. Greedy answers to
whole prompts: here a policy sees the question.

Scores are the share of wanted strings in the answer, mean of {about["samples"]} samples: a standard error of up to 0.16. The model itself fails
where `full` is low, and a policy can then not be told from it. The budget is in tokens of each KV head, of {about["length"]:,}. A dash: not run.

{table(["preset", "budget", *tasks], cells)}"""


def agreement(file: Path) -> str:
    """Write the table of agreement with full on the same text."""
    rows = rows_of(file)
    full = full_of(rows)
    tokens = int(full["task_identity"].split()[1]) * full["samples"]
    cells = []
    for row in rows:
        values = row["figures"]
        cells.append([*costs(row, full), f"{values['agreement']:.2f}", f"{values['kl']:.3f}", f"{values['nll']:.2f}"])
    columns = ["preset", "budget", "bytes", "read", "same next token", "KL", "nll"]
    return f"""## Agreement with full

`trtkv eval --task agreement --length {full["length"]} --samples {full["samples"]} --budget 11%,25% --device cpu`, {full["dtype"]}; records
in `{file.name}`. {tokens} tokens of Python's documentation, each predicted behind the true text before it.

- **same next token**: share of tokens at which the likeliest next one is full's; its standard error is about 0.03.
- **KL**: mean divergence from full's distribution, in nats. **nll**: the text's own loss, {full["figures"]["nll"]:.2f} under `full`.

Presets whose sinks and windows do not fit a budget are left out.

{table(columns, cells)}"""


def attention(file: Path) -> str:
    """Write the table of attention error and recall, and draw both by layer."""
    rows = rows_of(file)
    full = full_of(rows)
    layers = sum(name.startswith("error_layer_") for name in full["figures"])
    cells = []
    for row in rows:
        values = row["figures"]
        if row["policy"] == "full":
            continue
        errors, recalls = ([values[f"{what}_layer_{layer}"] for layer in range(layers)] for what in ("error", "recall"))
        worst, least = max(range(layers), key=errors.__getitem__), min(range(layers), key=recalls.__getitem__)
        means = [f"{values['error']:.3f}", f"{errors[worst]:.2f} ({worst})", f"{values['recall']:.2f}", f"{recalls[least]:.2f} ({least})"]
        cells.append([*costs(row, full), *means, f"{values['covered']:.3f}"])
    plot = file.with_name("quality-attention.png")
    draw_layers(rows, layers, plot)
    return f"""## Attention by layer

{command(rows, "attention", " --policy ... --budget 11%,25% --device cpu")},
commit {full["commit"]}; records with all {layers} layers in `{file.name}`. Each layer's attention over what a policy kept and read, against full
attention over the same queries, keys and values: errors of one layer do not reach the next.

- **error**: L2 norm of the difference of the attention's output, relative to full's. **recall**: share of the 32 tokens of highest attention
  that were read. **covered**: share of full attention's probability on what was read. Means over layers and 16 tokens behind each of
  {full["samples"]} prompts; in brackets the layer of the greatest error and of the lowest recall.
- Under `full` the error is {full["figures"]["error"]:.0e}: rounding.

![error and recall by layer]({plot.name})

{table(["preset", "budget", "bytes", "read", "error", "worst layer", "recall", "worst layer", "covered"], cells)}"""


def draw_layers(rows: list[Record], layers: int, target: Path) -> None:
    """Draw error and recall of every layer at each preset's smallest budget."""
    smallest: dict[str, Record] = {}
    for row in sorted((row for row in rows if row["policy"] != "full"), key=lambda row: row["budget"]):
        smallest.setdefault(row["policy"], row)
    shown = [row for row in smallest.values() if row["budget"] == min(one["budget"] for one in smallest.values())]
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for axis, what in zip(axes, ("error", "recall"), strict=True):
        for index, row in enumerate(shown):
            values = [row["figures"][f"{what}_layer_{layer}"] for layer in range(layers)]
            axis.plot(range(layers), values, marker=MARKERS[index], color=f"C{index}", markersize=4, linewidth=1, label=row["policy"])
        axis.set_xlabel("layer")
        axis.set_title(f"{what}, {shown[0]['budget']} of {shown[0]['length']:,} tokens", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    part = target.with_name(f".{target.name}")
    figure.savefig(part, dpi=130, format="png", metadata={"Software": None})
    plt.close(figure)
    part.replace(target)


def long_generation(file: Path) -> str:
    """Write how long policies write what full writes: a table a dtype and device."""
    rows = rows_of(file)
    full = full_of(rows)
    generated = int(full["task_identity"].split()[-1])
    settings = dict.fromkeys((row["dtype"], row["device"]) for row in rows)
    tables = "\n\n".join(_long_table([row for row in rows if (row["dtype"], row["device"]) == setting]) for setting in settings)
    return f"""## Long generation

{command(rows, "long-generation", " --policy ... --budget 25%").replace(f" --dtype {full['dtype']}", "")};
records in `{file.name}`. Greedy generation of {generated:,} tokens behind {full["samples"]} prompts of
{full["length"] - generated} tokens, so nearly all that a policy compresses or selects from is text that the model wrote. `full` has a loss of
{full["figures"]["nll"]:.3f} nats a token on it, so the model is nearly certain of what it writes and such texts are easier to agree with than what
people write. Presets that were not run are left out.

- **same next token**: share of full's tokens that the policy would have written behind full's own text; **nll**: its loss on that text in nats a
  token.
- **differs from**: tokens before the freely generated texts differ for the first time; **same place**: share of places at which they hold the same
  token. Behind a first difference texts go their own ways, whatever the policy.

{tables}"""


def _long_table(rows: list[Record]) -> str:
    full, cells = full_of(rows), []
    for row in rows:
        values = row["figures"]
        shares = [f"{values['agreement']:.3f}", f"{values['nll']:.3f}", f"{values['diverged']:,.0f}", f"{values['same']:.2f}"]
        cells.append([*costs(row, full), *shares])
    where = {"cuda": "one NVIDIA H200", "cpu": "a CPU"}[full["device"]]
    columns = ["preset", "budget", "bytes", "read", "same next token", "nll", "differs from", "same place"]
    return f"`--dtype {full['dtype']}` on {where}, commit {', '.join(dict.fromkeys(row['commit'] for row in rows))}:\n\n{table(columns, cells)}"

"""Writes docs/policies.md: the catalogue of presets and roles, which presets may be joined, and what each does to a real model's attention.

Everything in it is found by asking the code or by running it; `trtkv pull smollm2-135m` must have been run.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from passage_tensors import Captured, capture

from trtkv import simulate
from trtkv.cli.output import progress
from trtkv.engine.predict import predict
from trtkv.errors import ConfigError, PolicyConflict
from trtkv.plan import CacheView, Occupancy
from trtkv.policies.base import CAPABILITIES, KINDS
from trtkv.policies.fields import field_table
from trtkv.policies.policy import Policy
from trtkv.policies.registry import describe, parse_policy, role_class, role_names
from trtkv.presets import policy_presets

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "policies.md"
BUDGETS = (128, 256, 512)
VARIANTS = {"fier": "retrieve.sink=4", "quest": "retrieve.sink=16", "raas": "evict.sink=16"}  # shown beside the preset
QUESTIONS = {
    "allocate": "How many tokens may each layer and KV head keep?",
    "evict": "Which stored tokens go for good?",
    "quantize": "How is a stored token encoded?",
    "retrieve": "Which stored tokens does a decode query read?",
    "offload": "Where does a page live, when does it move?",
}
Report = Callable[[str, float], None]


def main() -> None:
    """Write the document whole or not at all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--decoded", type=int, default=16, help="tokens behind it that are decoded one by one")
    parser.add_argument("--layers", type=int, default=6, help="layers that are compared, evenly spread")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    with progress("policies.md") as report:
        text = "\n\n".join([head(options), catalogue(), roles(), matrix(report), measured(options, report)])
    part = options.out.with_suffix(".partial")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(options.out)


def head(options: argparse.Namespace) -> str:
    """Say what the document is and where its figures come from."""
    run = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: E731
    commit = run("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if run("status", "--porcelain", "trtkv", "plugins") else "")
    machine = f"{os.cpu_count()}-core {platform.machine()} CPU, torch {torch.__version__.partition('+')[0]}"
    return f"""# Policies

Written by `python build_scripts/policies_doc.py` from the code and from running it; do not edit. Commit {commit},
{machine}, model {options.model}.

Contents: [presets](#presets), [roles](#roles), [which presets may be joined](#which-presets-may-be-joined),
[what they do to a real model](#what-they-do-to-a-real-model). A policy of your own: [adding-a-policy.md](adding-a-policy.md)."""


def catalogue() -> str:
    """List the presets with their roles and the fields in which they differ from the roles' defaults."""
    rows = []
    for name in policy_presets():
        policy, row = parse_policy(name), describe(parse_policy(name))
        cells = []
        for kind, role in policy.roles.items():
            file = type(role).__module__.rpartition(".")[2]
            differing = [f"`{field}={value}`" for field, value in role if value != type(role).model_fields[field].default]
            cells.append(" ".join([f"[{kind}: {file}](#{kind}-{file})", *differing]))
        rows.append([f"`{name}`", row["summary"], "<br>".join(cells), row["paper"]])
    return "## Presets\n\n" + table(["preset", "what it does", "roles, and fields that differ from the role's defaults", "paper"], rows)


def roles() -> str:
    """Describe every role: what it follows, where it deviates, its fields."""
    parts = [
        "## Roles\n\nEach text says what a role follows and where it deviates. Fields are set with `--set kind.field=value`,\n"
        "such as `--set retrieve.window=64`."
    ]
    for kind in KINDS:
        for name in role_names(kind):
            cls = role_class(kind, name)
            paragraphs = (importlib.import_module(cls.__module__).__doc__ or "").strip().split("\n\n")
            text = "\n\n".join([f"**{paragraphs[0].rstrip('.')}.** {QUESTIONS[kind]}", *paragraphs[1:]])
            fields = [[f"`{field}`", f"`{one['default']}`", one["type"], one["meaning"]] for field, one in field_table(cls).items()]
            parts.append(f"### {kind}: {name}\n\n{text}" + (f"\n\n{table(['field', 'default', 'type', 'meaning'], fields)}" if fields else ""))
    return "\n\n".join(parts)


def matrix(report: Report) -> str:
    """Join every pair of presets, simulate those that are accepted, and show what came of it."""
    names = [name for name in policy_presets() if name != "full"]
    pairs = list(itertools.combinations(names, 2))
    outcome, reasons = {}, dict[str, tuple[str, str]]()
    for index, (first, second) in enumerate(pairs):
        report(f"{first}+{second}", 0.4 * index / len(pairs))
        symbol, reason = joined(first, second)
        outcome[first, second] = outcome[second, first] = symbol
        if reason:
            reasons.setdefault(symbol, (f"{first}+{second}", reason))
    rows = [[f"**{number}** `{row}`", *("" if row == column else outcome[row, column] for column in names)] for number, row in enumerate(names, 1)]
    notes = [[f"`{symbol}`", CAPABILITIES[symbol][1], f"`{example}`: {reason}"] for symbol, (example, reason) in sorted(reasons.items())]
    short = dict(zip(sorted(reasons), "abcdefghijkl", strict=False))
    rows = [[short.get(cell, cell) for cell in row] for row in rows]
    notes = [[short[note[0].strip("`")], *note] for note in notes]
    works = sum(symbol == "✓" for symbol in outcome.values()) // 2
    return f"""## Which presets may be joined

`--policy a+b` joins presets that fill different roles. All {len(pairs)} pairs were joined; the {works} that are accepted were run on random
tensors of 2,400 tokens. ✓ works; · both fill the same role; a letter names the capability that one role needs and the other takes away or
nobody gives. `full` joins with everything and changes nothing.

{table(["", *(f"{number}" for number in range(1, len(names) + 1))], rows)}

{table(["", "capability", "what it is", "such as"], notes)}"""


def joined(first: str, second: str) -> tuple[str, str | None]:
    """Join two presets: a symbol or the capability that is lacking, and the error's words."""
    if set(parse_policy(first).roles) & set(parse_policy(second).roles):
        return "·", None
    try:
        policy = parse_policy(f"{first}+{second}")
    except PolicyConflict as error:
        lacking = re.search(r"needs (\w+) \(", error.problem)
        assert lacking, error.problem
        return lacking[1], error.problem.partition(": ")[2]
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2400, heads, 16, generator=made) for heads in (2, 1, 1))
    done = simulate(policy, q, k, v, prefill=2390)
    assert bool(torch.isfinite(done.output).all()), policy.name
    return "✓", None


def measured(options: argparse.Namespace, report: Report) -> str:
    """Run every preset over a real model's queries, keys and values at three budgets."""
    report("reading the passage", 0.4)
    seen = capture(options.model, options.tokens + options.decoded)
    chosen = [round((index + 0.5) * seen.model.num_layers / options.layers) for index in range(options.layers)]
    shown = [(name, setting) for name in policy_presets() for setting in ("", *([VARIANTS[name]] if name in VARIANTS else []))]
    rows = []
    for index, (name, setting) in enumerate(shown):
        tell = lambda budget, turn, name=name, index=index: report(f"{name} at {budget}", 0.5 + 0.5 * (index + turn / 3) / len(shown))  # noqa: E731
        rows.append(row_of(name, setting, seen, chosen, options.tokens, tell))
    columns = ["preset", *(f"{what} {budget}" for what in ("bytes a token", "error", "recall") for budget in BUDGETS), "fields changed"]
    full = int(predict(seen.model, parse_policy("full"), options.tokens, 1)["bytes_per_token"])
    return f"""## What they do to a real model

{options.model} in {seen.model.dtype}, a passage of {options.tokens:,} tokens of English prose as the prompt, then {options.decoded} tokens of
the same text decoded one by one; layers {", ".join(map(str, chosen))} of {seen.model.num_layers}. Budgets of 128, 256 and 512 tokens of each KV head.

- **bytes a token**: what all layers store behind the prompt, summaries and codes with their metadata included, divided by its tokens; `full` stores
  {full:,}. Retrieval stores everything and reads the budget.
- **error**: L2 distance of a layer's attention output from full attention's, relative to it, mean over layers and decoded tokens.
- **recall**: share of the 32 tokens with the highest full attention that were read.
- **fields changed**: where the paper's sizes refuse the budget, sink, window and outliers were made smaller; LagKV has no budget, so lag and
  ratio were chosen for it. Presets without a budget have one column. Rows with a sink stand beside presets that have none: in a layer whose
  attention rests on the first token, a selection without it is off by more than the output's own size.

One passage of one small model: enough to see that a policy does what it should, not to rank the papers.

{table(columns, rows)}"""


def row_of(name: str, setting: str, seen: Captured, chosen: list[int], prompt: int, tell: Callable[[int, int], None]) -> list[str]:
    """Return a preset's row: nine figures and what was changed."""
    cells: list[list[str]] = [[], [], []]
    changes = [f"`{setting}`"] if setting else []
    for turn, budget in enumerate(BUDGETS):
        tell(budget, turn)
        policy, note = at_budget(name, budget, prompt)
        if policy is None:
            continue
        if setting:
            policy = policy.with_field(*setting.split("="))
        for column, cell in zip(cells, figures(policy, seen, chosen, prompt), strict=True):
            column.append(cell)
        changes += [f"{budget}: {note}"] if note else []
    return [f"`{name}`", *(cell for column in cells for cell in [*column, "", "", ""][:3]), "<br>".join(changes)]


def figures(policy: Policy, seen: Captured, chosen: list[int], prompt: int) -> tuple[str, str, str]:
    """Return stored bytes a token, error and recall of a policy, as cells."""
    measures = None
    if policy.allocate and policy.allocate.measured:
        measures = torch.stack([policy.allocate.measure(view_of(seen, layer, prompt)).float() for layer in range(seen.model.num_layers)])
    settings = {"num_layers": seen.model.num_layers, "measures": measures, "prefill": prompt}
    done = [simulate(policy, *seen.layers[layer], layer=layer, **settings) for layer in chosen]
    if measures is None:
        stored = predict(seen.model, policy, prompt, 1)["stored_bytes"]
    else:  # what a layer gets depends on all others, so all are run
        every = (simulate(policy, *(x[:prompt] for x in own), layer=layer, **settings) for layer, own in enumerate(seen.layers))
        stored = sum(one.stored_bytes[0] for one in every)
    error = sum(one.mean_error for one in done) / len(done)
    recall = sum(one.mean_recall for one in done) / len(done)
    return f"{stored / prompt:,.0f}", f"{error:.3f}", f"{recall:.2f}"


def view_of(seen: Captured, layer: int, prompt: int) -> CacheView:
    """Return a layer behind the prompt as an allocate role measures it."""
    q, k, v = seen.layers[layer]
    heads = seen.model.num_kv_heads
    at = Occupancy(prompt, (prompt,) * heads, prompt, 0, "prefill", True, prompt, layer, seen.model.num_layers)
    keys, values = (x[:prompt].float().transpose(0, 1) for x in (k, v))
    return CacheView(at, keys, values, torch.arange(prompt).expand(heads, -1), q.shape[2] ** -0.5, queries=q[:prompt].float())


def at_budget(name: str, budget: int, prompt: int) -> tuple[Policy | None, str]:
    """Return a preset at a budget and what had to be changed for it; None for a second budget where a preset has none."""
    policy = parse_policy(name)
    if policy.evict and "lag" in type(policy.evict).model_fields:
        return with_lag(policy, budget, prompt)
    try:
        policy = policy.with_budget(budget)
    except ConfigError:
        return (policy, "") if budget == BUDGETS[0] else (None, "")
    try:
        return policy.check(), ""
    except ConfigError:
        assert policy.retrieve, name
    changes = []
    for field, size in (("sink", budget // 8), ("window", budget // 8), ("outliers", budget // 4 // policy.retrieve.unit)):
        if getattr(policy.retrieve, field, 0) > size:
            policy = policy.with_field(f"retrieve.{field}", str(size))
            changes.append(f"{field} {size}")
    return policy.check(), ", ".join(changes)


def with_lag(policy: Policy, budget: int, prompt: int) -> tuple[Policy, str]:
    """Choose LagKV's lag as a quarter of the budget and the ratio that leaves at most the budget."""
    lag = budget // 4
    role = policy.with_field("evict.lag", str(lag)).evict
    ratio = int(role.ratio_for(prompt, budget) * lag) / lag
    return policy.with_field("evict.lag", str(lag)).with_field("evict.ratio", str(ratio)).check(), f"lag {lag}, ratio {ratio:.3g}"


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Write a Markdown table; bars inside cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    main()

"""The choice among listed scores on the GPU, against all scores stored and against the lists: fresh random inputs, poisoned outputs, margins.

Run it on a machine with a GPU: python tests/gpu/check_listed.py [--short] [--seed N]; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import check_retrieval as checks
import torch
from check_retrieval import LOG2E, Case, Guarded, expect, told_words
from torch import Tensor

from trtkv.plugins.kv_select import launch as select
from trtkv.plugins.kv_select import launch_listed
from trtkv.plugins.kv_select.launch_listed import Listed, Regions

NEAR = 0.006  # of the cut: pooled scores so near to it may be rounded to either side of it, because the references of parts differ
LEAST_EQUAL = 0.995  # of the units that two ways choose
RUNS = 20


class Index(Case):
    """An index of random one-bit keys with outlier channels, without the keys, of sequences of so many tokens; room for more."""

    def __init__(self, heads: int, group: int, dim: int, page: int, lens: Sequence[int], dtype: torch.dtype, more: int = 0) -> None:
        self.heads, self.group, self.dim, self.page, self.dtype, self.pages = heads, group, dim, page, dtype, False
        self.guard, batch, dev = Guarded(), len(lens), checks.DEV
        most = -(-(max(lens) + more + 1) // page)
        pool, groups = batch * most + 3, page // 32
        self.table = torch.randperm(pool, device=dev)[: batch * most].view(batch, most).int()
        self.lens = torch.tensor(lens, dtype=torch.int32, device=dev)
        self.bits = self.guard.like((pool, heads, groups, dim), torch.int32, 0)
        self.bits.random_(-(2**31), 2**31 - 1)
        self.meta = self.guard.like((pool, heads, groups, 2, dim), torch.float16, 0)
        self.meta[:, :, :, 0] = (torch.randn(heads, 1, dim, device=dev) * 3 - 2 + 0.3 * torch.randn(pool, heads, groups, dim, device=dev)).half()
        self.meta[:, :, :, 1] = (4 + 0.5 * torch.randn(pool, heads, groups, dim, device=dev)).clamp(min=0).half()
        self.q = torch.randn(batch, heads * group * dim, device=dev).to(dtype)

    def raise_groups(self, b: int, which: Tensor, by: float) -> None:
        """Raise the scores of all tokens of some groups of a sequence by so many nats, more for heads whose query is longer."""
        direction = self.q[b].view(self.heads, self.group, self.dim).float().mean(1)
        most = (self.q[b].view(self.heads, self.group, self.dim).float() @ direction[:, :, None]).amax(1)  # [Hk, 1]
        step = (direction * by * self.dim**0.5 / most)[None]
        pages, inside = self.table[b].long()[which * 32 // self.page], which % (self.page // 32)
        self.meta[pages, :, inside, 0] = (self.meta[pages, :, inside, 0].float() + step).half()

    def alike(self) -> None:
        """Let all tokens have the same scores."""
        self.bits.fill_(0)
        self.meta[:] = 0.25


@dataclass
class Ask:
    """What is asked of a step: K, forced tokens, pooling, requests' own budgets."""

    budget: int = 2048
    sink: int = 4
    window: int = 64
    pooling: str = "softmax-mean"
    own: select.OwnBudgets | None = None
    scores_from: int = 0  # 0: the budget

    @property
    def choice(self) -> dict[str, Any]:
        """Arguments of the launches that choose."""
        return {"budget": self.budget, "sink": self.sink, "window": self.window, "unit": 1, "group": 32, "pooling": self.pooling, "own": self.own}

    def score(self, case: Index) -> dict[str, Any]:
        """Arguments of the scorers."""
        return {"page_size": case.page, "budget": self.scores_from or self.budget, "scale": case.dim**-0.5, "pooling": self.pooling}


@dataclass
class Bench:
    """Scratch and results of both ways for a case."""

    case: Index
    ask: Ask
    plan: Listed
    told: Tensor | None = None
    made: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(case: Index, ask: Ask, parts: int = 0) -> Bench:
        """Lay out lists as `Listed.plan` does where it lays out any, and otherwise all the same; parts: of a row, 0 as planned."""
        rows, sms = len(case.lens) * case.heads, torch.cuda.get_device_properties(0).multi_processor_count
        scratch = select.Scratch.plan(rows, case.group, ask.pooling, case.table.shape[1] * case.page, sms)
        parts = parts or scratch.parts
        plan = Listed(rows, scratch.heads, scratch.stride, parts, Regions.of(scratch.heads, scratch.stride, parts).capacity)
        bench, like, counts = Bench(case, ask, plan), case.guard.like, (rows, parts, 8)
        scores, shares, lists = (rows, plan.heads, plan.stride), (rows, parts, plan.heads, 4), (len(case.lens), case.heads, ask.budget + 1)
        for name in ("listed", "stored"):
            bench.made[f"{name} scores"] = like(scores, torch.float16, float("nan"))
            bench.made[f"{name} parts"] = like(shares, torch.float32, float("nan"))
            bench.made[f"{name} choice"] = like(lists, torch.int32, -7)
        bench.made |= {"counts": like(counts, torch.int32, -5), "failed": like((rows,), torch.int32, -5)}
        return bench

    def poison(self) -> None:
        """Leave nothing of a run before."""
        for one in self.made.values():
            one.fill_(float("nan") if one.is_floating_point() else -7)

    def index(self) -> tuple[Tensor, ...]:
        """Return what is scored."""
        case = self.case
        return case.q, case.bits, case.meta, case.table, case.lens

    def lists(self, *, overlap: bool = False) -> None:
        """Choose by lists."""
        made, ask = self.made, self.ask
        score, choice = ask.score(self.case), ask.choice
        launch_listed.score_and_choose_listed(
            *self.index(), made["listed scores"], made["listed parts"], made["counts"], made["failed"], made["listed choice"],
            scores_from=score["budget"], page_size=score["page_size"], scale=score["scale"], overlap=overlap, told=self.told, **choice,
        )  # fmt: skip

    def stores(self) -> None:
        """Choose among all scores."""
        handed = self.made["stored scores"], self.made["stored parts"]
        select.fier_score(*self.index(), *handed, **self.ask.score(self.case))
        select.select_units(*handed, self.case.lens, self.made["stored choice"], **self.ask.choice)


def check(case: Index, ask: Ask, label: str, *, runs: int = 2, parts: int = 0, fails: bool | None = False, exact: bool = True) -> Bench:
    """Compare both ways, lists against what is in them, runs with each other; fails: whether some row's lists do not decide, None: who knows."""
    bench, first = Bench.of(case, ask, parts), None
    for i in range(runs):
        bench.poison()
        bench.lists(overlap=i % 2 == 1)
        found = bench.made["listed choice"].clone(), bench.made["failed"].clone()
        first = first or found
        expect(all(torch.equal(*pair) for pair in zip(first, found, strict=True)), f"{label}: run {i} differs from the first")
    bench.stores()
    counts, failed = bench.made["counts"], bench.made["failed"]
    expect(bool((counts >= 0).all()) and bool(((failed == 0) | (failed == 1)).all()), f"{label}: counts or failures were not written")
    expect(case.guard.intact(), f"{label}: a margin was written")
    if fails is not None:
        expect(bool(failed.any()) == fails, f"{label}: lists of {int(failed.sum())} of {len(failed)} rows do not decide")
    compare(bench, label)
    if exact:
        check_lists(bench, label)
    print(f"{label}: {int(failed.sum())} of {len(failed)} rows failed, {int(counts.sum(dtype=torch.int64)) // len(failed)} packets a row", flush=True)
    return bench


def compare(bench: Bench, label: str) -> None:
    """Compare the choice with that among all scores: the same bits where rows failed or nothing is chosen, elsewhere but for scores near the cut."""
    found, want = (bench.made[f"{name} choice"] for name in ("listed", "stored"))
    failed, case, differing = bench.made["failed"].view(found.shape[:2]), bench.case, (found != want).any(2)
    expect(not bool((differing & (failed > 0)).any()), f"{label}: rows that were scored again differ")
    for b in differing.any(1).nonzero()[:, 0].tolist():
        pooled = pooled_scores(case, b, bench.ask.pooling)
        for h in differing[b].nonzero()[:, 0].tolist():
            mine, other = (one[b, h, : int(one[b, h, -1])].long() for one in (found, want))
            expect(len(mine) == len(other) > 0 and bool((mine[1:] > mine[:-1]).all()), f"{label}: list {b} {h} is not in order")
            taken, left = mine[~torch.isin(mine, other)], other[~torch.isin(other, mine)]
            expect(len(taken) <= (1 - LEAST_EQUAL) * len(mine) + 1, f"{label}: list {b} {h} differs in {len(taken)} of {len(mine)} units")
            if max([-1, *taken.tolist(), *left.tolist()]) >= pooled.shape[1]:
                expect(False, f"{label}: list {b} {h} lacks a forced unit")
                continue
            scores = pooled[h, torch.cat([taken, left])]
            cut = pooled[h, other[(other >= bench.ask.sink) & (other < min(pooled.shape[1], int(case.lens[b]) - bench.ask.window))]].amin()
            expect(bool(((scores - cut).abs() <= NEAR * cut).all()), f"{label}: list {b} {h} is off by {float((scores / cut - 1).abs().max()):.2e}")


def pooled_scores(case: Case, b: int, pooling: str) -> Tensor:
    """Return the pooled scores [Hk, U] in fp64, of the index as stored."""
    weights = torch.softmax(case.true_scores(b) * case.dim**-0.5, -1)
    return weights.amax(1) if pooling == "softmax-max" else weights.mean(1)


def check_lists(bench: Bench, label: str) -> None:
    """Of rows whose lists decide: no unit is listed twice, what is chosen is listed, and no other listed one has a better score as it was listed."""
    case, ask, plan, made = bench.case, bench.ask, bench.plan, bench.made
    failed = made["failed"].tolist()
    for row in range(plan.rows):
        b, h = divmod(row, case.heads)
        chosen, stored = made["listed choice"][b, h], int(case.lens[b])
        width = int(chosen[-1])
        if failed[row] or width < 0 or not bool(made["counts"][row].any()):
            continue
        unit, value = listed_units(bench, row)
        first, last = ask.sink, max(ask.sink, min(stored // 32 * 32, stored - ask.window))
        inside = (unit >= first) & (unit < last)
        unit, value = unit[inside], value[inside]
        expect(len(unit.unique()) == len(unit), f"{label}: row {row} lists units twice")
        own = chosen[:width]
        own = own[(own >= first) & (own < last)]
        hit = torch.isin(unit, own)
        expect(int(hit.sum()) == len(own), f"{label}: row {row} chooses {len(own) - int(hit.sum())} units that are not listed")
        if bool(hit.any()) and not bool(hit.all()):
            expect(bool(value[hit].min() >= value[~hit].max() * (1 - 2e-5)), f"{label}: row {row} leaves better units out")


def listed_units(bench: Bench, row: int) -> tuple[Tensor, Tensor]:
    """Return the units [L] that a row lists and their pooled scores in fp64, with the row's normalizers."""
    plan, made = bench.plan, bench.made
    heads, regions, packet = plan.heads, plan.parts * 8, 16 * ((plan.heads + 1) // 2)
    region = Regions.of(heads, plan.stride, plan.parts).bytes
    memory = made["listed scores"][row].flatten()[: regions * region // 2].view(torch.uint8).view(regions, region)
    there = torch.arange(plan.capacity, device=memory.device) < made["counts"][row].view(-1, 1)
    halves = memory[:, : plan.capacity * packet].contiguous().view(torch.float16).view(regions, plan.capacity, packet // 8, 4)[:, :, :heads]
    starts = memory[:, plan.capacity * packet : plan.capacity * (packet + 4)].contiguous().view(torch.int32)
    parts = made["listed parts"][row].double()
    zero = torch.logsumexp(parts[:, :, 1] / LOG2E, 0) * LOG2E
    at = parts[:, :, 0].repeat_interleave(8, 0)[:, None].expand(-1, plan.capacity, -1)
    weights = torch.exp2(halves[there].double() + (at[there] - zero)[:, :, None])
    pooled = weights.amax(1) if bench.ask.pooling == "softmax-max" else weights.mean(1)
    return (starts[there][:, None] + torch.arange(4, device=memory.device)).flatten(), pooled.flatten()


def check_forced(case: Index, ask: Ask, label: str, which: Callable[[Tensor], Tensor], parts: int = 0) -> None:
    """Rows that are said to have failed are chosen for as ever, bit for bit, and others stay as they are."""
    bench, choose = Bench.of(case, ask, parts), launch_listed.choose_listed
    bench.stores()
    bench.lists()
    before = bench.made["listed choice"].clone()
    rows = which(torch.arange(bench.plan.rows, device=before.device))

    def fail(*given: Any, **named: Any) -> None:
        choose(*given, **named)
        given[5][rows] = 1
        given[4].view(len(rows), -1)[rows] = -9

    with patch.object(launch_listed, "choose_listed", fail):
        bench.lists()
    found, want = (bench.made[f"{name} choice"].view(len(rows), -1) for name in ("listed", "stored"))
    expect(torch.equal(found[rows], want[rows]), f"{label}: rows that are scored again differ")
    expect(torch.equal(found[~rows], before.view(len(rows), -1)[~rows]), f"{label}: rows that are not scored again differ")
    expect(case.guard.intact(), f"{label}: a margin was written")


def check_told(case: Index, ask: Ask, label: str, parts: int = 0) -> None:
    """With queries that are told the same is chosen, and their words are empty behind it."""
    bench = Bench.of(case, ask, parts)
    bench.lists()
    first = bench.made["listed choice"].clone()
    bench.told = told_words(case.q, case.dim)
    for what in ("told", "not told"):
        bench.poison()
        bench.lists(overlap=True)
        expect(torch.equal(first, bench.made["listed choice"]), f"{label}: with a query that is {what} other units are chosen")
        expect(bool((bench.told == -1).all()), f"{label}: the words of the query are not empty")


def check_growth(case: Index, ask: Ask, label: str, steps: int, by: int) -> None:
    """Replay captured launches while sequences grow and one shrinks: what is chosen each time is what is chosen without a graph."""
    bench = Bench.of(case, ask)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        bench.lists(overlap=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.lists(overlap=True)
    most = case.table.shape[1] * case.page
    for i in range(steps):
        case.lens += by
        if i == steps // 2:
            case.lens[0] = 97
        case.lens.clamp_(max=most - 1)
        case.q.normal_()
        bench.poison()
        graph.replay()
        replayed = bench.made["listed choice"].clone()
        bench.poison()
        bench.stores()
        bench.lists()
        expect(torch.equal(replayed, bench.made["listed choice"]), f"{label}: replay {i} differs")
        compare(bench, f"{label} {i}")


def check_own(case: Index, ask: Ask, budgets: Sequence[int], dense_below: int, label: str, parts: int = 0) -> None:
    """Requests with budgets of their own, 0 for none, choose fewer."""
    batch = len(budgets)
    slots, asked = torch.randperm(batch + 2)[:batch].int(), torch.full((batch + 2,), -5, dtype=torch.int32)
    asked[slots.long()] = torch.tensor(budgets, dtype=torch.int32)
    own = select.OwnBudgets(slots.to(checks.DEV), asked.to(checks.DEV), dense_below)
    least = max(min(one for one in (ask.budget, *budgets) if one), dense_below)
    check(case, Ask(max(ask.budget, dense_below), ask.sink, ask.window, ask.pooling, own, least), label, parts=parts, fails=None)


def clustered(case: Index) -> None:
    """Let what is chosen lie at the ends of the rows, or within a few of its groups."""
    for b, stored in enumerate(case.lens.tolist()):
        groups = torch.arange(stored // 32, device=checks.DEV)
        which = groups[-100:] if b % 2 == 0 else groups[torch.randperm(len(groups), device=checks.DEV)[:80]]
        case.raise_groups(b, which, 9.0)


def check_shapes(many: Sequence[int]) -> None:
    """Every geometry, at lengths that differ."""
    bf16, fp16 = torch.bfloat16, torch.float16
    shapes = ((4, 128, bf16), (7, 128, bf16), (2, 64, fp16), (5, 96, bf16), (8, 128, fp16), (4, 64, bf16), (7, 96, fp16), (2, 128, bf16))
    for i, (group, dim, dtype) in enumerate((*shapes, (3, 256, bf16))):
        pooling = "softmax-max" if i % 3 == 1 else "softmax-mean"
        case = Index(4, group, dim, 32 << i % 3, many, dtype)
        label = f"G {group} D {dim} {pooling}"
        check(case, Ask(pooling=pooling), label, runs=RUNS if i < 2 else 2, fails=None if i > 1 else False)
        check_forced(case, Ask(pooling=pooling), f"{label}, some scored again", lambda rows: rows % 3 == 1)
        if i < 3:
            check_told(case, Ask(pooling=pooling), label)


def check_hard(lens: Sequence[int]) -> None:
    """Rows whose choice lies close together, and those of which too much is listed, or whose sums overflow."""
    for pooling in ("softmax-mean", "softmax-max"):
        for group in (4, 7):
            case = Index(2, group, 128, 32, lens, torch.bfloat16)
            clustered(case)
            check(case, Ask(1024, pooling=pooling), f"clustered G {group} {pooling}", fails=None)
    case = Index(2, 4, 128, 32, lens, torch.bfloat16)
    case.alike()
    check(case, Ask(1024), "all alike", fails=True)
    case = Index(2, 7, 128, 32, lens, torch.bfloat16)
    for b, stored in enumerate(lens):
        case.raise_groups(b, torch.arange(stored // 64, stored // 64 + 1, device=checks.DEV), 400.0)
    check(case, Ask(1024), "sums that overflow", fails=None)
    case = Index(2, 4, 128, 32, lens, torch.bfloat16)
    case.raise_groups(0, torch.arange(0, lens[0] // 32, 2, device=checks.DEV), 30.0)
    check(case, Ask(1024), "every second group", fails=None)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    print("seed", options.seed, flush=True)
    begin = time.time()
    many = [131056, 0, 1, 97, 2048, 2049, 4000, 9001, 33000, 65537]
    check_shapes(many if options.short else [140000, 2600, *many])
    print(f"shapes {time.time() - begin:.0f} s", flush=True)
    check_hard([65536, 40000, 9001, 700])
    print(f"hard {time.time() - begin:.0f} s", flush=True)
    check(Index(8, 4, 128, 32, [131072] * 8, torch.bfloat16), Ask(), "llama-3.1-8b 8 x 128k", exact=not options.short)
    check(Index(4, 7, 128, 32, [131072] * 8, torch.bfloat16), Ask(), "qwen2.5-7b 8 x 128k", exact=not options.short)
    for sink, window in ((0, 0), (1000, 1000), (4, 3000)):
        check(Index(4, 4, 128, 64, [70000, 30000, 5000], torch.bfloat16), Ask(2048, sink, window), f"sink {sink} window {window}", fails=None)
    case = Index(4, 4, 128, 64, [70000, 30000, 5000, 1500, 900], torch.bfloat16)
    check_own(case, Ask(), [300, 0, 1024, 700, 96], 0, "own budgets")
    check_own(case, Ask(), [300, 0, 2000, 700, 96], 4096, "own budgets, read whole below")
    check_growth(Index(4, 7, 128, 32, [60000, 2040, 9000, 500], torch.bfloat16, 3000), Ask(1024), "growth G 7", 12, 61)
    check_growth(Index(8, 4, 128, 64, [3000, 100000], torch.bfloat16, 3000), Ask(1024), "growth G 4", 12, 33)
    print(f"failures {len(checks.failures)}, {time.time() - begin:.0f} s")
    return bool(checks.failures)


if __name__ == "__main__":
    sys.exit(main())

"""Retrieval decode kernels on the GPU against torch: fresh random inputs, poisoned outputs, margins, lengths that grow between graph replays.

Run it on a machine with a GPU: python tests/gpu/check_retrieval.py [--small] [--seed N]; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trtkv.plugins.kv_append import kernel as append
from trtkv.plugins.kv_append import launch as launch_append
from trtkv.plugins.kv_attend import launch as attend
from trtkv.plugins.kv_attend import launch_dense
from trtkv.plugins.kv_select import fier_layout, launch_fused, launch_many, launch_pages
from trtkv.plugins.kv_select import launch as select

DEV = "cuda"
LOG2E = 1.4426950408889634
failures: list[str] = []


def expect(ok: bool, what: str) -> None:
    if not ok:
        failures.append(what)
        print("FAIL", what, flush=True)


class Guarded:
    """Tensors with 64 KiB of sentinel bytes on both sides."""

    def __init__(self) -> None:
        self.all: list[tuple[Tensor, int]] = []

    def like(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> Tensor:
        size = torch.empty((), dtype=dtype).element_size()
        count, margin = 1, 65536
        for n in shape:
            count *= n
        store = torch.full((2 * margin + count * size,), 0xA5, dtype=torch.uint8, device=DEV)
        self.all.append((store, count * size))
        view = store[margin : margin + count * size].view(dtype).view(shape)
        view.fill_(fill)
        return view

    def intact(self) -> bool:
        return all(bool((s[:65536] == 0xA5).all()) and bool((s[65536 + n :] == 0xA5).all()) for s, n in self.all)


class Case:
    """A paged cache of random keys with outlier channels, its index, and the scratch of one layer."""

    def __init__(
        self, heads: int, group: int, dim: int, page: int, lens: list[int], dtype: torch.dtype, pages: bool = False, indexed: bool = True
    ) -> None:  # fmt: skip
        self.heads, self.group, self.dim, self.page, self.dtype = heads, group, dim, page, dtype
        self.guard, batch = Guarded(), len(lens)
        most = -(-(max(lens) + 130) // page)
        pool = batch * most + 3
        self.table = torch.randperm(pool, device=DEV)[: batch * most].view(batch, most).int()
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEV)
        offset = torch.randn(heads, 1, dim, device=DEV) * 3
        self.keys = self.guard.like((pool, heads, page, dim), dtype, float("nan"))
        self.values = self.guard.like((pool, heads, page, dim), dtype, float("nan"))
        for b, n in enumerate(lens):
            full = torch.randn(most, heads, page, dim, device=DEV) + offset
            tail = torch.arange(most * page, device=DEV).view(most, page) >= n
            full.masked_fill_(tail[:, None, :, None], float("nan"))
            self.keys[self.table[b].long()] = full.to(dtype)
            v = torch.randn(most, heads, page, dim, device=DEV).masked_fill_(tail[:, None, :, None], float("nan"))
            self.values[self.table[b].long()] = v.to(dtype)
        self.q = torch.randn(batch, heads * group * dim, device=DEV).to(dtype)
        self.pages = pages
        if pages:
            self.bounds = self.guard.like((pool, heads, 2, dim), dtype, float("nan"))
            self.bounds[:, :, 0], self.bounds[:, :, 1] = self.keys.amin(2), self.keys.amax(2)
            self.bits = None
        elif indexed:
            self.bits = self.guard.like((pool, heads, page // 32, dim), torch.int32, 0)
            self.meta = self.guard.like((pool, heads, page // 32, 2, dim), torch.float16, float("nan"))
            words, bounds = fier_layout.pack(self.keys.unflatten(2, (-1, 32)))
            self.bits.copy_(words)
            self.meta.copy_(bounds)

    def flat(self, x: Tensor, b: int) -> Tensor:
        return x[self.table[b].long()].transpose(0, 1).flatten(1, 2)

    def units(self, b: int) -> int:
        return int(self.lens[b]) // (self.page if self.pages else 32) * (1 if self.pages else 32)

    def true_scores(self, b: int) -> Tensor:
        """Scores [Hk, G, U] in fp64 from the index as stored."""
        q = self.q[b].view(self.heads, self.group, self.dim).double()
        if self.pages:
            low, high = (self.bounds[self.table[b].long(), :, i].transpose(0, 1)[:, : self.units(b)].double() for i in (0, 1))
            return q.clamp(min=0) @ high.transpose(1, 2) + q.clamp(max=0) @ low.transpose(1, 2)
        groups = self.units(b) // 32
        words, meta = (x[self.table[b].long()].transpose(0, 1).flatten(1, 2)[:, :groups] for x in (self.bits, self.meta))
        keys = fier_layout.unpack(words, meta).double().flatten(1, 2)
        return q @ keys.transpose(1, 2)


def check_chain(case: Case, budget: int, sink: int, window: int, pooling: str, label: str) -> None:
    batch, rows = len(case.lens), len(case.lens) * case.heads
    scale, unit = case.dim**-0.5, case.page if case.pages else 1
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    capacity = case.table.shape[1] * case.page // unit
    plan = select.Scratch.plan(rows, case.group, pooling, capacity, sms)
    scores = case.guard.like((rows, plan.heads, plan.stride), torch.float16, float("nan"))
    parts = case.guard.like((rows, plan.parts, plan.heads, 4), torch.float32, float("nan"))
    width = -(-budget // unit)
    chosen = case.guard.like((batch, case.heads, width + 1), torch.int32, -7)
    out = case.guard.like(tuple(case.q.shape), case.dtype, float("nan"))
    common = {"budget": budget, "scale": scale, "pooling": pooling}

    def step(told: Tensor | None = None) -> None:
        if case.pages:
            bounds = case.bounds.unsqueeze(2)  # one unit a page
            launch_pages.score_pages(case.q, bounds, None, case.table, case.lens, scores, parts, kind="box", unit=case.page, **common)
        else:
            arguments = (case.q, case.bits, case.meta, case.table, case.lens, scores, parts)
            select.fier_score(*arguments, page_size=case.page, told=told, **common)
        select.select_units(
            scores, parts, case.lens, chosen, budget=budget, sink=sink, window=window, unit=unit, group=32 if unit == 1 else unit, pooling=pooling,
            told=told,
        )  # fmt: skip
        attend.attend_list(case.q, case.keys, case.values, case.table, case.lens, chosen, out, unit=unit, scale=scale)

    step()
    torch.cuda.synchronize()
    first, first_out = chosen.clone(), out.clone()
    chosen.fill_(-7), out.fill_(float("nan")), scores.fill_(float("nan")), parts.fill_(float("nan"))
    step()
    torch.cuda.synchronize()
    expect(torch.equal(first, chosen) and torch.equal(first_out, out), f"{label}: two runs differ")
    if not case.pages:
        words = told_words(case.q, case.dim)
        chosen.fill_(-7)
        step(words)
        torch.cuda.synchronize()
        expect(torch.equal(first, chosen), f"{label}: with a query that is told other units are chosen")
        expect(bool((words == -1).all()), f"{label}: the words of the query are not empty")
    expect(case.guard.intact(), f"{label}: a margin was written")
    for b in range(batch):
        stored = int(case.lens[b])
        attended = None
        if stored <= budget:
            expect(bool((chosen[b] == -1).all()), f"{label}: sequence {b} should be dense")
        else:
            attended = check_selection(case, b, scores, parts, plan, chosen[b], budget, sink, window, pooling, unit, label)
        check_attention(case, b, attended, out[b], scale, label)


def told_words(q: Tensor, dim: int) -> Tensor:
    """Return the words [B, Hq, D / 2 + 4] int32 by which an append tells queries [B, Hq D], as query.cuh says."""
    heads = q.unflatten(1, (-1, dim)).float()
    exponent = (torch.frexp(heads.abs().amax(-1))[1] - 11).clamp(-100, 100)
    halves = torch.ldexp(heads, -exponent[..., None]).half().unflatten(2, (-1, 8, 4)).transpose(3, 4).flatten(2).contiguous()
    return torch.cat([halves.view(torch.int32), (exponent + 256)[..., None].expand(-1, -1, 4).int()], 2).contiguous()


def repeat_tokens(case: Case, levels: int) -> None:
    """Let every page hold the same few different tokens, so that few scores are taken by many."""
    vectors, level = torch.randn(levels, case.dim, device=DEV), torch.arange(case.page, device=DEV) % levels
    case.keys[:] = vectors[level].to(case.dtype)
    words, bounds = fier_layout.pack(case.keys.unflatten(2, (-1, 32)))
    case.bits.copy_(words), case.meta.copy_(bounds)


def check_together() -> None:
    """Both forms of the one launch at the sizes of an H200, crowded scores, and captured steps that grow."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for heads, group, lens, blocks in ((4, 7, [32761], 16), (4, 7, [131065], 32), (8, 4, [131000], 16), (32, 1, [32700], 4), (1, 3, [131065], 128)):
        check_fused(Case(heads, group, 128, 32, lens, bf16), len(lens) * 1024, 4, 64, "softmax-mean", 132, blocks, f"one launch {heads} x {lens}", 3)
    for pooling in ("mean", "max", "softmax-max"):
        check_fused(Case(2, 4, 64, 64, [9000, 97], fp16), 500, 4, 64, pooling, 132, 16, f"one launch {pooling}", 2)
    for heads, group, lens, blocks in ((4, 7, [131065], 16), (8, 4, [32700, 9000], 8), (2, 12, [40000], 10), (2, 4, [140000], 16)):
        check_fused(Case(heads, group, 128, 32, lens, bf16, pages=True), 1024, 32, 64, "softmax-mean", 132, blocks, f"one launch, pages {lens}", 3)
    for levels, budget in ((1, 3000), (2, 9000), (7, 1111)):
        case = Case(2, 2, 32, 32, [20000, 15000], fp16)
        repeat_tokens(case, levels)
        check_fused(case, budget, 0, 0, "softmax-mean", 132, 16, f"one launch, {levels} levels", 2)
    check_growth(4, append.FIER, 70, bf16, together=True)
    check_growth(7, append.FIER, 40, bf16, together=True)


def check_fused(case: Case, budget: int, sink: int, window: int, pooling: str, sms: int, blocks: int, label: str, replays: int = 1) -> None:
    """Scores and choice in one launch, of `blocks` blocks a row on so many multiprocessors: lists as the selector makes them of the same scores."""
    batch, rows = len(case.lens), len(case.lens) * case.heads
    unit = case.page if case.pages else 1
    capacity, width = case.table.shape[1] * case.page // unit, -(-budget // unit)
    kind = (rows, case.group, *(() if case.pages else (case.dim,)), pooling, capacity, sms, select.arch())
    plan = launch_fused.Fused.plan_pages(*kind) if case.pages else launch_fused.Fused.plan(*kind)
    assert plan is not None and plan.blocks == blocks, f"{label}: {plan}"
    mail, stamps = plan.allocate(DEV)
    scratch = select.Scratch(plan.heads, -(-capacity // 32) * 32, blocks)
    scores = case.guard.like((rows, plan.heads, scratch.stride), torch.float16, float("nan"))
    parts = torch.zeros(rows, plan.blocks, plan.heads, 4, device=DEV)
    chosen, again = (case.guard.like((batch, case.heads, width + 1), torch.int32, -7) for _ in range(2))
    common = {"budget": budget, "sink": sink, "window": window, "pooling": pooling}

    def launch(**more: Any) -> None:
        if case.pages:
            arguments = (case.q, case.bounds.unsqueeze(2), None, case.table, case.lens, chosen, mail, stamps, plan)
            launch_fused.page_select(*arguments, kind="box", unit=unit, scale=case.dim**-0.5, **common, **more)
        else:
            arguments = (case.q, case.bits, case.meta, case.table, case.lens, chosen, mail, stamps, plan)
            launch_fused.fier_select(*arguments, page_size=case.page, scale=case.dim**-0.5, **common, **more)

    for _ in range(replays):
        launch(scores=scores, parts=parts)
    select.select_units(scores, parts, case.lens, again, unit=unit, group=32 if unit == 1 else unit, **common)
    torch.cuda.synchronize()
    expect(torch.equal(chosen, again), f"{label}: the selector chooses other units")
    slots, budgets = torch.randperm(batch + 1, device=DEV)[:batch].int(), torch.zeros(batch + 1, dtype=torch.int32, device=DEV)
    budgets[slots[0].long()] = sink + window + 2 * max(unit, 32)
    own = select.OwnBudgets(slots, budgets, 0)
    launch(scores=scores, parts=parts, own=own)
    select.select_units(scores, parts, case.lens, again, unit=unit, group=32 if unit == 1 else unit, own=own, **common)
    torch.cuda.synchronize()
    expect(torch.equal(chosen, again), f"{label}: with a budget of its own a sequence gets other units")
    select.select_units(scores, parts, case.lens, again, unit=unit, group=32 if unit == 1 else unit, **common)
    chosen.fill_(-7)
    launch()
    torch.cuda.synchronize()
    expect(torch.equal(chosen, again), f"{label}: a second launch chooses other units")
    if not case.pages:
        words = told_words(case.q, case.dim)
        for what in ("a query that is told", "a query that nobody told"):
            chosen.fill_(-7)
            launch(told=words)
            torch.cuda.synchronize()
            expect(torch.equal(chosen, again), f"{label}: with {what} it chooses other units")
            expect(bool((words == -1).all()), f"{label}: the words of the query are not empty")
    expect(case.guard.intact(), f"{label}: a margin was written")
    for b in range(batch):
        if int(case.lens[b]) <= budget:
            expect(bool((chosen[b] == -1).all()), f"{label}: sequence {b} should be dense")
        else:
            check_selection(case, b, scores, parts, scratch, chosen[b], budget, sink, window, pooling, unit, label)


def check_selection(case, b, scores, parts, plan, chosen, budget, sink, window, pooling, unit, label):
    stored, count = int(case.lens[b]), case.units(b)
    rows = slice(b * case.heads, (b + 1) * case.heads)
    blocks = -(-count // 32)
    per = -(-blocks // plan.parts) * 32
    part = torch.arange(count, device=DEV) // per
    ref = parts[rows][:, part, :, 0].transpose(1, 2)  # [Hk, heads, U]
    got = scores[rows, :, :count].float() + ref
    true = case.true_scores(b)
    if plan.heads == 1 and case.group > 1:
        true = (true.amax(1) if pooling == "max" else true.mean(1)).unsqueeze(1)
    want = true * case.dim**-0.5 * LOG2E
    # Against the same product in bf16 or fp16: its rounding alone is what the error may reach.
    limit = 2 * (want.to(case.dtype).double() - want).norm() + 2e-3 * want.std() * want.numel() ** 0.5
    error = (got.double() - want).norm()
    expect(bool(error <= limit), f"{label}: scores of sequence {b} off by {error / want.norm():.2e}")
    if plan.heads > 1:
        lse = torch.logsumexp(parts[rows][..., 1].double() * 0.6931471805599453, 1) * LOG2E
        exact = torch.logsumexp(want * 0.6931471805599453, 2) * LOG2E
        expect(bool((lse - exact).abs().max() < 0.02), f"{label}: normalizer of sequence {b} off by {(lse - exact).abs().max():.2e}")
        probability = torch.exp2(got.double() - lse[:, :, None])
        pooled = probability.amax(1) if pooling == "softmax-max" else probability.mean(1)
        slack = 2e-5
    else:
        top = parts[rows][..., 0, 1].amax(1)
        pooled = (scores[rows, 0, :count].float() + (ref[:, 0] - top[:, None])).double()  # the selector's own fp32 values
        slack = 0.0
    units = -(-stored // unit)
    closed = stored // (32 if unit == 1 else unit) * (32 if unit == 1 else unit)
    first = -(-sink // unit)
    last = max(first, min(closed, stored - window) // unit)
    width = chosen.shape[1] - 1
    wanted = width - first - (units - last)
    if wanted >= last - first:
        whole = torch.arange(units, device=DEV)
        expect(bool((chosen[:, :units] == whole).all()) and bool((chosen[:, -1] == units).all()), f"{label}: all units of {b}")
        return [list(range(units))] * case.heads
    expect(bool((chosen[:, -1] == width).all()), f"{label}: count of {b}")
    lists = chosen[:, :width]
    expect(bool((lists[:, 1:] > lists[:, :-1]).all()), f"{label}: order of {b}")
    forced = torch.cat([torch.arange(first, device=DEV), torch.arange(last, units, device=DEV)]).int()
    for h in range(case.heads):
        expect(bool(torch.isin(forced, lists[h]).all()), f"{label}: forced units of {b}, head {h}")
        taken = torch.zeros(units, dtype=torch.bool, device=DEV)
        taken[lists[h].long().clamp(0, units - 1)] = True
        inside = taken[first:last]
        value = pooled[h, first:last]
        if slack == 0.0:
            best = torch.sort(value, descending=True, stable=True).indices[:wanted].sort().values
            expect(torch.equal(best, inside.nonzero()[:, 0]), f"{label}: selection of {b}, head {h}")
        else:
            expect(bool(value[inside].min() >= value[~inside].max() * (1 - slack)), f"{label}: selection of {b}, head {h}")
    return lists.tolist()


def check_attention(case, b, attended, out, scale, label, unit=None) -> None:
    stored, unit = int(case.lens[b]), unit or (case.page if case.pages else 1)
    keys, values = case.flat(case.keys, b), case.flat(case.values, b)
    for h in range(case.heads):
        tokens = torch.arange(stored, device=DEV)
        if attended is not None:
            tokens = (torch.tensor(attended[h], device=DEV)[:, None] * unit + torch.arange(unit, device=DEV)).flatten()
            tokens = tokens[tokens < stored]
        q = case.q[b].view(case.heads, case.group, case.dim)[h]
        k, v = keys[h, tokens], values[h, tokens]
        want = torch.softmax(q.double() @ k.double().T * scale, -1) @ v.double()
        plain = torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], scale=scale)[0, 0].double()
        error = (out.view(case.heads, case.group, case.dim)[h].double() - want).norm()
        limit = 2 * max((plain - want).norm(), (want.to(case.dtype).double() - want).norm())
        expect(bool(error <= limit), f"{label}: attention of {b}, head {h}: {error / want.norm():.2e}, allowed {limit / want.norm():.2e}")


def check_dense(heads: int, group: int, dim: int, page: int, lens: list[int], dtype: torch.dtype, blocks: int = 0) -> None:
    """Attend to everything stored, by the dense kernel and by the list kernel without a list."""
    label = f"dense Hk {heads} G {group} D {dim} {lens[:4]} blocks {blocks}"
    case = Case(heads, group, dim, page, lens, dtype, indexed=False)
    scale, batch = dim**-0.5, len(lens)
    out, listed = (case.guard.like(tuple(case.q.shape), dtype, float("nan")) for _ in range(2))
    sms = blocks or torch.cuda.get_device_properties(0).multi_processor_count
    plan = launch_dense.DenseScratch.plan(group, dim, sms)
    shares = case.guard.like((2 * plan.blocks, plan.words, 4), torch.int32, -1)
    owed = case.guard.like((2 * plan.blocks,), torch.int32, 0)
    launch_dense.attend_dense(case.q, case.keys, case.values, case.table, case.lens, out, shares, owed, scale=scale)
    torch.cuda.synchronize()
    first = out.clone()
    out.fill_(float("nan"))
    launch_dense.attend_dense(case.q, case.keys, case.values, case.table, case.lens, out, shares, owed, scale=scale)
    attend.attend_list(case.q, case.keys, case.values, case.table, case.lens, None, listed, unit=1, scale=scale)
    torch.cuda.synchronize()
    expect(torch.equal(first, out), f"{label}: two runs differ")
    expect(not bool(owed.any()), f"{label}: a share is owed")
    expect(bool((shares == -1).all()), f"{label}: a word was not emptied")
    expect(case.guard.intact(), f"{label}: a margin was written")
    for b in range(batch):
        check_attention(case, b, None, out[b], scale, label)
        check_attention(case, b, None, listed[b], scale, f"{label} by the list kernel")


def check_ties(rows: int, units: int, budget: int, heads: int, levels: int, kind: str, cluster: int = 0) -> None:
    """Scores written straight into the scratch: few levels, all equal, or crowded around one value."""
    label = f"ties {kind} {rows}x{units} k{budget} heads {heads} levels {levels} cluster {cluster}"
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = select.Scratch.plan(rows, heads, "softmax-mean", units, sms)
    if kind == "levels":
        raw = torch.randint(-levels, 1, (rows, units), device=DEV).float()
    elif kind == "equal":
        raw = torch.zeros(rows, units, device=DEV)
    elif kind == "outlier":
        raw = torch.randn(rows, units, device=DEV) * 0.01
        raw[:, ::977] = 900.0
        raw[:, 5] = -60000.0
    else:
        raw = torch.randn(rows, units, device=DEV) * 3
    scores = torch.full((rows, heads, plan.stride), float("nan"), dtype=torch.float16, device=DEV)
    scores[:, :, :units] = raw[:, None].half()
    raw = scores[:, 0, :units].float()
    parts = torch.zeros(rows, plan.parts, heads, 4, device=DEV)
    if heads == 1:
        parts[..., 1], parts[..., 2] = raw.amax(1)[:, None, None], raw.amin(1)[:, None, None]
    else:
        parts[..., 1] = raw.amax(1)[:, None, None] + 7.0
    lens = torch.full((rows,), units, dtype=torch.int32, device=DEV)
    out = torch.full((rows, 1, budget + 1), -7, dtype=torch.int32, device=DEV)
    select.select_units(scores, parts, lens, out, budget=budget, sink=0, window=0, unit=1, group=1, pooling="softmax-mean", cluster=cluster)
    torch.cuda.synchronize()
    if heads == 1:
        raw = raw - raw.amax(1, keepdim=True)
    else:  # 2^x below 2^-126 is zero: ties
        raw = torch.where(raw - raw.amax(1, keepdim=True) - 7 - plan.parts < -120, torch.full_like(raw, -1e9), raw)
    want = torch.sort(raw, dim=1, descending=True, stable=True).indices[:, :budget].sort().values.int()
    expect(torch.equal(out[:, 0, :-1], want) and bool((out[:, 0, -1] == budget).all()), label)


def random_parts(rows: int, units: int, heads: int, pooling: str) -> tuple[select.Scratch, Tensor, Tensor]:
    """Make scores and parts as a scorer leaves them: parts with references of their own."""
    plan = select.Scratch.plan(rows, heads, pooling, units, torch.cuda.get_device_properties(0).multi_processor_count)
    scores = torch.full((rows, heads, plan.stride), float("nan"), dtype=torch.float16, device=DEV)
    scores[:, :, :units] = (torch.randn(rows, heads, units, device=DEV) * 3).half()
    parts = torch.zeros(rows, plan.parts, heads, 4, device=DEV)
    parts[..., 0] = torch.randn(rows, plan.parts, heads, device=DEV) * 4 + 40
    per = -(-(units // 32) // plan.parts) * 32
    for p in range(plan.parts):
        own = scores[:, :, p * per : min((p + 1) * per, units // 32 * 32)].float()
        if own.shape[2] == 0:
            parts[:, p, :, 0], parts[:, p, :, 1], parts[:, p, :, 2] = -3e38, -3e38, 3e38
        else:
            parts[:, p, :, 1] = parts[:, p, :, 0] + (torch.logsumexp(own / LOG2E, 2) * LOG2E if heads > 1 else own.amax(2))
            parts[:, p, :, 2] = parts[:, p, :, 0] + own.amin(2)
    return plan, scores, parts


def check_sieved(rows: int, units: int, budget: int, heads: int, pooling: str, sink: int, window: int, cluster: int = 0) -> None:
    """Where a block leaves most units out before it counts, it chooses what it chooses where it counts all: parts with references of their own."""
    label = f"sieve {rows}x{units} k{budget} heads {heads} {pooling} cluster {cluster}"
    _, scores, parts = random_parts(rows, units, heads, pooling)
    lens = torch.full((rows,), units, dtype=torch.int32, device=DEV)
    found = []
    for sieves in (True, False):
        out = torch.full((rows, 1, budget + 1), -7, dtype=torch.int32, device=DEV)
        with patch.object(select, "select_sieves", lambda *shape, sieves=sieves: sieves):
            select.select_units(scores, parts, lens, out, budget=budget, sink=sink, window=window, unit=1, group=32, pooling=pooling, cluster=cluster)
        found.append(out)
    expect(torch.equal(*found), f"{label}: {int((found[0] != found[1]).any(2).sum())} rows differ")


def check_many(rows: int, blocks: int, units: int, budget: int, heads: int, pooling: str, lens: list[int], kind: str = "normal") -> None:
    """Several blocks that share a long row choose what one cluster chooses, again and again with the same words, for some sequences of any length."""
    label = f"many {rows}x{units} k{budget} heads {heads} {pooling} blocks {blocks} {kind}"
    plan, scores, parts = random_parts(rows, units, heads, pooling)
    if kind == "levels":
        scores[:, :, :units] = torch.randint(0, 4, (rows, 1, units), device=DEV).half()
        parts[..., 0], parts[..., 2] = 0.0, 0.0
        parts[..., 1] = 20.0 if heads > 1 else 3.0
    elif kind == "clumped":  # most of the best lie in few places
        scores[:, :, : units // 16] += 8.0
        parts[..., 1] += 8.0
    stored = torch.tensor((lens * rows)[:rows], dtype=torch.int32, device=DEV)
    form = launch_many.Many.layout(rows, blocks, heads, plan.stride, plan.parts, budget, select.arch())
    assert form is not None
    handed = (*form.allocate(DEV), form)
    given = {"budget": budget, "sink": 4, "window": 64, "unit": 1, "group": 32, "pooling": pooling}
    want = torch.full((rows, 1, budget + 1), -7, dtype=torch.int32, device=DEV)
    select.select_units(scores, parts, stored, want, **given)
    for _ in range(3):
        out = torch.full_like(want, -7)
        launch_many.select_many(scores, parts, stored, out, *handed, **given)
        torch.cuda.synchronize()
        expect(torch.equal(out, want), f"{label}: {int((out != want).any(2).sum())} rows differ")


def check_dense_growth(steps: int) -> None:
    """Replay a captured append and dense attention, overlapped, while sequences grow over page borders."""
    heads, group, dim, page = 2, 4, 128, 16
    case = Case(heads, group, dim, page, [501, 1030, 14, 127], torch.bfloat16, indexed=False)
    batch = len(case.lens)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEV)
    rope = torch.cat([torch.ones(4096, dim // 2, device=DEV), torch.zeros(4096, dim // 2, device=DEV)], 1)
    qkv = torch.zeros(batch, (heads * group + 2 * heads) * dim, dtype=torch.bfloat16, device=DEV)
    out = torch.full_like(case.q, float("nan"))
    scratch = launch_dense.DenseScratch.plan(group, dim, 132).allocate(DEV)

    def step() -> None:
        append.launch(
            qkv, case.lens, starts, case.lens, case.table, rope, None, case.q, case.keys, case.values, None, None,
            eps=0.0, group=16, summary=append.NONE, longest=1, overlap=True,
        )  # fmt: skip
        launch_dense.attend_dense(case.q, case.keys, case.values, case.table, case.lens, out, *scratch, scale=dim**-0.5, overlap=True)

    saved = case.lens.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.lens += 1
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    case.lens.copy_(saved)
    for _ in range(steps):
        case.lens += 1
        qkv.normal_()
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for b in range(batch):
            check_attention(case, b, None, out[b], dim**-0.5, f"dense growth at {int(case.lens[b])}")


def check_own_budgets(
    unit: int, group: int, heads: int, lens: list[int], own: list[int], budget: int, dense_below: int = 0, cluster: int = 0
) -> None:  # fmt: skip
    """Rows whose requests asked for smaller budgets choose what a launch of that budget chooses for all."""
    label = f"own budgets unit {unit} heads {heads} cluster {cluster}"
    rows, units = len(lens), -(-max(lens) // unit)
    plan = select.Scratch.plan(rows, heads, "softmax-mean", units, torch.cuda.get_device_properties(0).multi_processor_count)
    scores = torch.full((rows, heads, plan.stride), float("nan"), dtype=torch.float16, device=DEV)
    scores[:, :, :units] = torch.randn(rows, heads, units, device=DEV).half()
    parts = torch.zeros(rows, plan.parts, heads, 4, device=DEV)
    parts[..., 1], parts[..., 2] = 9.0, -9.0
    stored, slots = torch.tensor(lens, dtype=torch.int32, device=DEV), torch.randperm(rows + 2, device=DEV)[:rows].int()
    budgets = torch.full((rows + 2,), -5, dtype=torch.int32, device=DEV)
    budgets[slots.long()] = torch.tensor(own, dtype=torch.int32, device=DEV)
    given = {"sink": 3, "window": 5, "unit": unit, "group": group, "pooling": "softmax-mean", "cluster": cluster}

    def chosen(tokens: int, asked: select.OwnBudgets | None) -> Tensor:
        out = torch.full((rows, 1, -(-tokens // unit) + 1), -7, dtype=torch.int32, device=DEV)
        select.select_units(scores, parts, stored, out, budget=max(tokens, dense_below), own=asked, **given)
        return out[:, 0]

    found = chosen(budget, select.OwnBudgets(slots, budgets, dense_below))
    for b, tokens in enumerate(own):
        expected = chosen(tokens or budget, None)[b]
        width = len(expected) - 1
        expect(torch.equal(found[b, :width], expected[:width]) and found[b, -1] == expected[-1], f"{label}: row {b} chooses otherwise")
        expect(bool((found[b, width:-1] == -1).all()), f"{label}: row {b} has units behind its last")


def check_short_lists(unit: int, lens: list[int], counts: list[int], room: int, group: int = 4, dim: int = 128) -> None:
    """Lists are read right, and one with places left over as one that is full: the same bits."""
    case = Case(2, group, dim, 64, lens, torch.bfloat16, indexed=False)
    lists = torch.full((len(lens), 2, room + 1), -1, dtype=torch.int32, device=DEV)
    for b, (stored, count) in enumerate(zip(lens, counts, strict=True)):
        for h in range(2):
            lists[b, h, :count] = torch.randperm(-(-stored // unit), device=DEV)[:count].sort().values.int()
        lists[b, :, -1] = count
    found = case.guard.like(tuple(case.q.shape), case.dtype, float("nan"))
    attend.attend_list(case.q, case.keys, case.values, case.table, case.lens, lists, found, unit=unit, scale=dim**-0.5)
    for b, count in enumerate(counts):
        check_attention(case, b, lists[b, :, :count].tolist(), found[b], dim**-0.5, f"lists of unit {unit}", unit)
    for count in set(counts):
        full, own = torch.full_like(found, float("nan")), torch.cat([lists[:, :, :count], lists[:, :, -1:]], 2).contiguous()
        attend.attend_list(case.q, case.keys, case.values, case.table, case.lens, own, full, unit=unit, scale=dim**-0.5)
        for b in (b for b, one in enumerate(counts) if one == count):
            expect(torch.equal(found[b], full[b]), f"lists of unit {unit}: sequence {b} with {count} of {room} places")
    expect(case.guard.intact(), f"lists of unit {unit}: a margin was written")


def check_growth(group: int, policy: int, steps: int, dtype: torch.dtype, *, together: bool = False, tells: bool = True) -> None:
    """Replay one captured step while sequences grow over group and page borders and a slot is taken by another request.

    together: in one launch; tells: appends with one-bit keys tell their queries.
    """
    label = f"growth G {group} policy {policy} together {together} tells {tells}"
    heads, dim, page = 2, 128, 32 if policy == append.MINMAX else 64
    case = Case(heads, group, dim, page, [501, 1030, 63, 320], dtype, pages=policy == append.MINMAX)
    batch, budget, sink, window = 4, 320, 4, 16
    unit = page if case.pages else 1
    if unit > 1:
        sink, window = 32, 64
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEV)
    angles = torch.rand(4096, dim // 2, device=DEV) * 6
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    qkv = torch.zeros(batch, (heads * group + 2 * heads) * dim, dtype=dtype, device=DEV)
    capacity, fused = case.table.shape[1] * page // unit, None
    if together:
        kind = (batch * heads, group, *(() if case.pages else (dim,)), "softmax-mean", capacity, 132, select.arch())
        fused = launch_fused.Fused.plan_pages(*kind) if case.pages else launch_fused.Fused.plan(*kind)
        assert fused is not None, label
        handed = (*fused.allocate(DEV), fused)
    plan = select.Scratch.plan(batch * heads, group, "softmax-mean", capacity, 132)
    if fused is not None:
        plan = select.Scratch(fused.heads, plan.stride, fused.blocks)
    scores, parts = plan.allocate(batch * heads, DEV)
    width = -(-budget // unit)
    chosen = torch.full((batch, heads, width + 1), -7, dtype=torch.int32, device=DEV)
    out = torch.full_like(case.q, float("nan"))
    told = torch.full((batch, heads * group, dim // 2 + 4), -1, dtype=torch.int32, device=DEV) if tells and policy == append.FIER else None

    def step() -> None:
        (launch_append if tells else append).launch(
            qkv, case.lens, starts, case.lens, case.table, rope, None, case.q, case.keys, case.values, case.bits,
            case.bounds if case.pages else case.meta, eps=0.0, group=unit if case.pages else 32, summary=policy, longest=1, overlap=True,
            **({"told": told} if tells else {}),
        )  # fmt: skip
        common = {"budget": budget, "scale": dim**-0.5, "pooling": "softmax-mean", "overlap": True}
        if fused is not None:
            common |= {"sink": sink, "window": window, "scores": scores, "parts": parts}
        if fused is not None and case.pages:
            bounds = case.bounds.unsqueeze(2)
            launch_fused.page_select(case.q, bounds, None, case.table, case.lens, chosen, *handed, kind="box", unit=case.page, **common)
        elif fused is not None:
            arguments = (case.q, case.bits, case.meta, case.table, case.lens, chosen, *handed)
            launch_fused.fier_select(*arguments, page_size=case.page, told=told, **common)
        elif case.pages:
            bounds = case.bounds.unsqueeze(2)  # one unit a page
            launch_pages.score_pages(case.q, bounds, None, case.table, case.lens, scores, parts, kind="box", unit=case.page, **common)
        else:
            select.fier_score(case.q, case.bits, case.meta, case.table, case.lens, scores, parts, page_size=case.page, told=told, **common)
        if fused is None:
            select.select_units(
                scores, parts, case.lens, chosen, budget=budget, sink=sink, window=window, unit=unit, group=unit if case.pages else 32,
                pooling="softmax-mean", overlap=True, told=told,
            )  # fmt: skip
        attend.attend_list(case.q, case.keys, case.values, case.table, case.lens, chosen, out, unit=unit, scale=dim**-0.5, overlap=True, settled=True)

    saved = case.lens.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.lens += 1
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    case.lens.copy_(saved)
    for i in range(steps):
        if i == steps // 2:
            case.lens[1] = 97  # another request takes the slot
            pages = case.table[1].long()
            case.keys[pages], case.values[pages] = torch.randn_like(case.keys[pages]), torch.randn_like(case.values[pages])
            if case.pages:
                case.bounds[pages, :, 0], case.bounds[pages, :, 1] = case.keys[pages].amin(2), case.keys[pages].amax(2)
            else:
                words, bounds = fier_layout.pack(case.keys[pages].unflatten(2, (-1, 32)))
                case.bits[pages], case.meta[pages] = words, bounds
        case.lens += 1
        qkv.normal_()
        out.fill_(float("nan")), chosen.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        expect(told is None or bool((told == -1).all()), f"{label}: the words of queries are not empty")
        for b in range(batch):
            n = int(case.lens[b])
            keys = case.flat(case.keys, b)[:, :n]
            x = qkv[b].view(-1, dim).float()
            cos, sin = rope[n, : dim // 2], rope[n, dim // 2 :]
            turned = torch.cat([x[:, :64] * cos - x[:, 64:] * sin, x[:, 64:] * cos + x[:, :64] * sin], 1)
            torch.testing.assert_close(case.q[b].view(-1, dim).float(), turned[: heads * group], atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(keys[:, -1].float(), turned[heads * group : -heads], atol=2e-2, rtol=2e-2)
            whole = n // unit if case.pages else n // 32
            if case.pages:
                own = case.bounds[case.table[b].long()].transpose(0, 1)[:, :whole]
                block = keys[:, : whole * unit].unflatten(1, (-1, unit))
                expect(torch.equal(own, torch.stack([block.amin(2), block.amax(2)], 2)), f"{label}: bounds of {b} at {n}")
            else:
                words, bounds = fier_layout.pack(keys[:, : whole * 32].unflatten(1, (-1, 32)))
                mine = [t[case.table[b].long()].transpose(0, 1).flatten(1, 2)[:, :whole] for t in (case.bits, case.meta)]
                expect(torch.equal(mine[0], words) and torch.equal(mine[1], bounds), f"{label}: index of {b} at {n}")
            attended = None
            if n > budget:
                attended = check_selection(case, b, scores, parts, plan, chosen[b], budget, sink, window, "softmax-mean", unit, f"{label} at {n}")
            check_attention(case, b, attended, out[b], dim**-0.5, f"{label} at {n}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    print("seed", options.seed, flush=True)
    bf16, fp16 = torch.bfloat16, torch.float16
    if options.small:
        check_chain(Case(2, 7, 128, 64, [700, 97], bf16), 200, 4, 16, "softmax-mean", "small")
        check_chain(Case(2, 4, 128, 32, [700, 97], bf16, pages=True), 192, 32, 64, "softmax-mean", "small pages")
        check_ties(2, 5000, 300, 1, 9, "levels", 2)
        check_own_budgets(1, 32, 4, [5000, 900, 90], [100, 0, 100], 300)
        check_short_lists(1, [500, 700, 40], [100, 300, 33], 300)
        check_growth(4, append.FIER, 2, bf16)
        check_growth(4, append.FIER, 2, bf16, together=True)
        check_fused(Case(2, 7, 128, 64, [700, 97], bf16), 200, 4, 16, "softmax-mean", 8, 2, "small, one launch", 2)
        check_dense(2, 7, 128, 32, [700, 1, 129], bf16, 5)
        print("failures", len(failures))
        return bool(failures)
    begin = time.time()
    for group, pooling in itertools.product((1, 4, 5, 7, 8), ("softmax-mean", "mean", "max", "softmax-max")):
        if group == 5 and pooling != "softmax-mean":
            continue
        check_chain(Case(3, group, 128, 64, [4099, 300, 9001], bf16), 512, 4, 33, pooling, f"fier G {group} {pooling}")
        check_chain(Case(3, group, 128, 32, [4099, 300, 9001], bf16, pages=True), 512, 32, 64, pooling, f"pages G {group} {pooling}")
    print(f"chains {time.time() - begin:.0f} s", flush=True)
    for dim in (64, 96, 256):
        check_chain(Case(2, 4, dim, 128, [2048, 1537, 40], fp16), 256, 4, 16, "softmax-mean", f"fier D {dim}")
        check_chain(Case(2, 4, dim, 64, [2048, 1537, 40], fp16, pages=True), 256, 64, 64, "softmax-mean", f"pages D {dim}")
    check_chain(Case(1, 7, 128, 32, [70001], bf16), 2048, 0, 0, "softmax-mean", "long G 7")
    many = ((4, 128, "softmax-mean"), (7, 64, "softmax-mean"), (1, 96, "softmax-mean"), (5, 256, "max"), (8, 64, "mean"))
    for group, dim, pooling in many:  # so few blocks a row that a warp takes many groups
        check_chain(Case(4, group, dim, 32, [33000] * 16, bf16), 1024, 0, 0, pooling, f"64 rows, G {group} D {dim} {pooling}")
    print(f"shapes {time.time() - begin:.0f} s", flush=True)
    for heads, kind, levels in itertools.product((1, 4), ("levels", "equal", "outlier", "normal"), (9,)):
        for rows, units, budget in ((3, 9001, 700), (4, 131072, 2048), (40, 32768, 1024)):
            check_ties(rows, units, budget, heads, levels, kind)
    check_ties(1, 1000003, 8192, 1, 3000, "levels")
    for heads, kind in itertools.product((1, 4), ("levels", "equal", "outlier", "normal")):
        check_ties(64, 131072, 2048, heads, 9, kind)
    for heads, pooling in ((1, "mean"), (2, "softmax-max"), (3, "softmax-mean"), (4, "softmax-mean")):
        check_sieved(64, 131056, 2048, heads, pooling, 4, 64)
    for heads, pooling in ((1, "mean"), (2, "softmax-max"), (5, "softmax-mean"), (6, "softmax-mean"), (7, "softmax-mean"), (8, "softmax-max")):
        check_many(32, 4, 131056, 2048, heads, pooling, [131056, 131055, 70000, 5000, 300, 2049, 2112, 40000])
    for kind in ("levels", "clumped"):
        check_many(40, 3, 131072, 2048, 7, "softmax-mean", [131072, 70001], kind)
    for unit, group, heads in ((1, 32, 1), (1, 32, 4), (32, 32, 4), (16, 16, 1)):
        check_own_budgets(unit, group, heads, [70001, 900, 4096, 300, 33000], [700, 0, 1024, 200, 513], 1024)
        check_own_budgets(unit, group, heads, [5000, 900, 300], [200, 0, 200], 1024, dense_below=512)
    check_short_lists(1, [9000, 5000, 40], [700, 1024, 33], 1024)
    check_short_lists(32, [9000, 5000, 90], [20, 32, 2], 32)
    check_short_lists(1, [9000, 5000], [2048, 1100], 2048)  # few rows, long lists
    check_short_lists(32, [9000, 5000], [64, 40], 64)
    check_ties(1, 30000, 3000, 1, 3000, "normal", 1)
    print(f"ties {time.time() - begin:.0f} s", flush=True)
    for group, (dim, dtype) in itertools.product(range(1, 9), ((64, fp16), (96, bf16), (128, bf16), (256, fp16))):
        check_dense(3, group, dim, 16, [1, 777, 4096], dtype, 0 if group % 2 else 7)
    check_dense(4, 7, 128, 32, [131071], bf16)
    check_dense(8, 4, 128, 64, [33001, 16, 9000, 40000, 1, 555, 12800, 32768], bf16)
    check_dense(2, 4, 128, 16, list(range(1, 301, 7)), bf16)
    check_dense_growth(40)
    print(f"dense {time.time() - begin:.0f} s", flush=True)
    check_growth(4, append.FIER, 70, bf16)
    check_growth(7, append.MINMAX, 70, bf16)
    check_growth(1, append.FIER, 40, fp16, tells=False)
    check_growth(1, append.FIER, 40, fp16)
    check_together()
    print(f"failures {len(failures)}, {time.time() - begin:.0f} s")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())

"""The fused scorer and selector on the GPU against torch: fresh random inputs, poisoned outputs, margins, ties, lengths that grow between replays.

Run it on a machine with a GPU: python tests/gpu/check_fused.py [--small] [--seed N]; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

import torch
from check_retrieval import DEV, Case, check_attention, expect, failures
from torch import Tensor

from trtkv.plugins.kv_append import launch as append
from trtkv.plugins.kv_attend import launch as attend
from trtkv.plugins.kv_select import fier_layout
from trtkv.plugins.kv_select import launch_fused as fused

RAW = ("mean", "max")


class Chain:
    """Selection and attention of one layer with the fused kernel, its scratch poisoned before every run."""

    def __init__(self, case: Case, budget: int, sink: int, window: int, pooling: str, cluster: int = 0) -> None:
        self.case, self.budget, self.sink, self.window, self.pooling, self.cluster = case, budget, sink, window, pooling, cluster
        self.unit = case.page if case.pages else 1
        batch, units = len(case.lens), case.table.shape[1] * case.page // self.unit
        self.chosen = case.guard.like((batch, case.heads, -(-budget // self.unit) + 1), torch.int32, -7)
        self.pooled = case.guard.like((batch, case.heads, units), torch.float32, float("nan"))
        self.out = case.guard.like(tuple(case.q.shape), case.dtype, float("nan"))

    def poison(self) -> None:
        self.chosen.fill_(-7), self.pooled.fill_(float("nan")), self.out.fill_(float("nan"))

    def step(self, overlap: bool = False) -> None:
        case = self.case
        fused.fused_select(
            case.q, case.bounds if case.pages else case.bits, None if case.pages else case.meta, case.table, case.lens, self.chosen,
            page_size=case.page, unit=self.unit, budget=self.budget, sink=self.sink, window=self.window, scale=case.dim**-0.5,
            pooling=self.pooling, cluster=self.cluster, overlap=overlap, pooled=self.pooled, cache=(case.keys, case.values),
        )  # fmt: skip
        attend.attend_list(
            case.q, case.keys, case.values, case.table, case.lens, self.chosen, self.out,
            unit=self.unit, scale=case.dim**-0.5, overlap=overlap, settled=True,
        )  # fmt: skip

    def check(self, b: int, label: str) -> None:
        """Compare sequence b: the ranked scores with fp64, the list with a stable sort of them, attention with torch over the list."""
        stored, attended = int(self.case.lens[b]), None
        if stored <= self.budget:
            expect(bool((self.chosen[b] == -1).all()), f"{label}: sequence {b} should be dense")
        else:
            attended = self._check_list(b, stored, label)
        check_attention(self.case, b, attended, self.out[b], self.case.dim**-0.5, label)

    def _check_list(self, b: int, stored: int, label: str) -> list[list[int]]:
        case, unit, chosen = self.case, self.unit, self.chosen[b]
        group = unit if case.pages else 32
        units, first = -(-stored // unit), -(-self.sink // unit)
        last = max(first, min(stored // group * group, stored - self.window) // unit)
        width = chosen.shape[1] - 1
        wanted = width - first - (units - last)
        everything = torch.arange(units, dtype=torch.int32, device=DEV)
        if wanted >= last - first:
            expect(bool((chosen[:, :units] == everything).all() and (chosen[:, -1] == units).all()), f"{label}: all units of {b}")
            return [list(range(units))] * case.heads
        ranked = self.pooled[b, :, first:last]
        outside = torch.cat([self.pooled[b, :, :first], self.pooled[b, :, last:]], 1)
        expect(bool(ranked.isfinite().all() and outside.isnan().all()), f"{label}: ranked units of {b}")
        self._check_scores(b, ranked, first, last, label)
        best = torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :wanted].sort(1).values.int() + first
        forced = [everything[:first], everything[last:]]
        want = torch.stack([torch.cat([forced[0], row, forced[1]]) for row in best])
        expect(torch.equal(chosen[:, :-1], want) and bool((chosen[:, -1] == width).all()), f"{label}: selection of {b}")
        return chosen[:, :-1].tolist()

    def _check_scores(self, b: int, ranked: Tensor, first: int, last: int, label: str) -> None:
        # Twice the error of scores in the query's dtype is allowed; softmaxes keep an exponential as bf16, so 2^-8 of it on top.
        case = self.case
        want = case.true_scores(b) * case.dim**-0.5 * 1.4426950408889634
        rounded = want.to(case.dtype).double()
        if case.group == 1 or self.pooling in RAW:
            pool = (lambda s: s.amax(1)) if self.pooling == "max" else (lambda s: s.mean(1))
            exact, plain = pool(want)[:, first:last], pool(rounded)[:, first:last]
            limit = 2 * (plain - exact).norm() + 1e-3 * exact.std() * exact.numel() ** 0.5
        else:
            chances = [torch.softmax(s * 0.6931471805599453, 2) for s in (want, rounded)]
            exact, plain = ((p.amax(1) if self.pooling == "softmax-max" else p.mean(1))[:, first:last] for p in chances)
            limit = 2 * (plain - exact).norm() + 2**-8 * exact.norm()
        error = (ranked.double() - exact).norm()
        expect(bool(error <= limit), f"{label}: scores of {b} off by {error:.2e}, allowed {limit:.2e}")


def check_chain(case: Case, budget: int, sink: int, window: int, pooling: str, label: str, cluster: int = 0) -> None:
    chain = Chain(case, budget, sink, window, pooling, cluster)
    chain.step()
    torch.cuda.synchronize()
    first = [t.clone() for t in (chain.chosen, chain.out)]
    chain.poison()
    chain.step()
    torch.cuda.synchronize()
    expect(torch.equal(first[0], chain.chosen) and torch.equal(first[1], chain.out), f"{label}: two runs differ")
    expect(case.guard.intact(), f"{label}: a margin was written")
    for b in range(len(case.lens)):
        chain.check(b, label)


def make_ties(case: Case, kind: str) -> None:
    """Give many units the same score: few different groups, all groups alike, or all alike but a few that are far better."""
    valid = case.table[0, :3].long()
    few = case.bounds[valid] if case.pages else (case.bits[valid], case.meta[valid])
    for b in range(len(case.lens)):
        for i, page in enumerate(case.table[b].tolist()):
            pick = {"few": i % 3, "equal": 0, "outlier": 1 if i % 61 == 7 else 0}[kind]
            if case.pages:
                case.bounds[page] = few[pick]
            else:
                case.bits[page], case.meta[page] = few[0][pick] & (0 if kind == "equal" else -1), few[1][pick]


def check_overflow(case: Case, label: str) -> None:
    """Scores that rise by hundreds behind the first groups: exponentials leave every range unless the reference follows."""
    for b in range(len(case.lens)):
        pages = case.table[b].tolist()
        for i, page in enumerate(pages):
            if case.pages:
                case.bounds[page] += (40.0 * i / len(pages)) * case.q[b, : case.dim].sign()
            else:
                case.meta[page, :, :, 0] += (40.0 * i / len(pages)) * case.q[b, : case.dim].half().sign()
    check_chain(case, 320, 0, 0, "softmax-mean", label)


def check_growth(group: int, policy: int, steps: int, dtype: torch.dtype, page: int) -> None:
    """Replay one captured step while sequences grow over group and page borders and a slot is taken by another request."""
    label = f"growth G {group} policy {policy}"
    heads, dim, pages = 2, 128, policy == append.MINMAX
    case = Case(heads, group, dim, page, [501, 1030, 63, 320], dtype, pages=pages)
    batch = 4
    chain = Chain(case, 320, 32 if pages else 4, 64 if pages else 16, "softmax-mean")
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEV)
    angles = torch.rand(4096, dim // 2, device=DEV) * 6
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    qkv = torch.zeros(batch, (heads * group + 2 * heads) * dim, dtype=dtype, device=DEV)

    def step() -> None:
        append.launch(
            qkv, case.lens, starts, case.lens, case.table, rope, None, case.q, case.keys, case.values, case.bits,
            case.bounds if pages else case.meta, eps=0.0, group=chain.unit if pages else 32, summary=policy, longest=1, overlap=True,
        )  # fmt: skip
        chain.step(overlap=True)

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
            own = case.table[1].long()
            case.keys[own], case.values[own] = torch.randn_like(case.keys[own]), torch.randn_like(case.values[own])
            if pages:
                case.bounds[own, :, 0], case.bounds[own, :, 1] = case.keys[own].amin(2), case.keys[own].amax(2)
            else:
                case.bits[own], case.meta[own] = fier_layout.pack(case.keys[own].unflatten(2, (-1, 32)))
        if i == steps // 2 + 1:
            case.lens[3] = 607
        case.lens += 1
        qkv.normal_()
        chain.poison()
        graph.replay()
        torch.cuda.synchronize()
        for b in range(batch):
            check_summaries(case, b, f"{label} at {int(case.lens[b])}")
            chain.check(b, f"{label} at {int(case.lens[b])}")


def check_summaries(case: Case, b: int, label: str) -> None:
    keys = case.flat(case.keys, b)[:, : int(case.lens[b])]
    if case.pages:
        block = keys[:, : keys.shape[1] // case.page * case.page].unflatten(1, (-1, case.page))
        own = case.bounds[case.table[b].long()].transpose(0, 1)[:, : block.shape[1]]
        expect(torch.equal(own, torch.stack([block.amin(2), block.amax(2)], 2)), f"{label}: bounds of {b}")
        return
    block = keys[:, : keys.shape[1] // 32 * 32].unflatten(1, (-1, 32))
    words, meta = fier_layout.pack(block)
    own = [t[case.table[b].long()].transpose(0, 1).flatten(1, 2)[:, : block.shape[1]] for t in (case.bits, case.meta)]
    expect(torch.equal(own[0], words) and torch.equal(own[1], meta), f"{label}: index of {b}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    print("seed", options.seed, flush=True)
    bf16, fp16 = torch.bfloat16, torch.float16
    begin = time.time()
    if options.small:
        for pages in (False, True):
            check_chain(Case(2, 7, 128, 32, [4700, 97], bf16, pages=pages), 192, 32, 64, "softmax-mean", f"small {pages}")
        check_chain(Case(2, 4, 64, 32, [4700, 97], fp16), 200, 0, 0, "mean", "small mean", cluster=2)
        ties = Case(1, 4, 128, 32, [3001], bf16)
        make_ties(ties, "few")
        check_chain(ties, 300, 4, 0, "softmax-mean", "small ties")
        check_growth(4, append.FIER, 3, bf16, 64)
        print("failures", len(failures))
        return bool(failures)
    for group, pooling in itertools.product((1, 4, 5, 7, 8), ("softmax-mean", "mean", "max", "softmax-max")):
        if group == 5 and pooling != "softmax-mean":
            continue
        check_chain(Case(3, group, 128, 64, [4099, 300, 9001], bf16), 512, 4, 33, pooling, f"fier G {group} {pooling}")
        check_chain(Case(3, group, 128, 32, [4099, 300, 9001], bf16, pages=True), 512, 32, 64, pooling, f"pages G {group} {pooling}")
    print(f"chains {time.time() - begin:.0f} s", flush=True)
    for dim, pooling in itertools.product((64, 96, 256), ("softmax-mean", "mean")):
        check_chain(Case(2, 4, dim, 128, [2048, 1537, 40], fp16), 256, 4, 16, pooling, f"fier D {dim}")
        check_chain(Case(2, 4, dim, 64, [2048, 1537, 40], fp16, pages=True), 256, 64, 64, pooling, f"pages D {dim}")
    for cluster, pages in itertools.product((1, 2, 4, 8, 16), (False, True)):
        check_chain(Case(2, 4, 128, 32, [6000, 5983], bf16, pages=pages), 512, 0, 0, "softmax-mean", f"cluster {cluster} {pages}", cluster)
    check_chain(Case(1, 7, 128, 32, [120001], bf16), 2048, 0, 0, "softmax-mean", "long G 7")
    check_chain(Case(2, 4, 128, 32, [131071], bf16, pages=True), 2048, 0, 0, "softmax-mean", "long pages")
    check_chain(Case(32, 1, 128, 32, [33000], bf16), 1024, 0, 0, "softmax-mean", "32 rows")
    print(f"shapes {time.time() - begin:.0f} s", flush=True)
    for kind, pooling, pages in itertools.product(("few", "equal", "outlier"), ("softmax-mean", "max"), (False, True)):
        ties = Case(2, 4, 128, 32, [40000 if pages else 20000], bf16, pages=pages)
        make_ties(ties, kind)
        check_chain(ties, 4096 if pages else 700, 0, 0, pooling, f"ties {kind} {pooling} {pages}")
    check_overflow(Case(1, 4, 128, 32, [9000], bf16), "overflow")
    check_overflow(Case(1, 4, 128, 32, [40000], bf16, pages=True), "overflow pages")
    print(f"ties {time.time() - begin:.0f} s", flush=True)
    check_growth(4, append.FIER, 70, bf16, 64)
    check_growth(7, append.MINMAX, 70, bf16, 32)
    check_growth(1, append.FIER, 40, fp16, 32)
    print(f"failures {len(failures)}, {time.time() - begin:.0f} s")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())

"""Selection by lists on the GPU against the kernels that store all scores: the same choice, bit for bit.

Run it on a machine with a GPU: python tests/gpu/check_many.py [--small] [--seed N]; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

import torch
from torch import Tensor

from tests.gpu import check_retrieval as checks
from tests.gpu.check_retrieval import Case, expect
from trtkv.plugins.kv_select import fier_layout, launch_lists
from trtkv.plugins.kv_select import launch as select


class Choice:
    """A case's scratch, and both ways to choose; as on a GPU of so many multiprocessors, because lists of very few groups may be too short."""

    def __init__(self, case: Case, budget: int, sink: int, window: int, pooling: str, label: str, sms: int) -> None:
        self.case, self.budget, self.pooling, self.label = case, budget, pooling, label
        self.batch, self.rows = len(case.lens), len(case.lens) * case.heads
        capacity = case.table.shape[1] * case.page
        scratch = select.Scratch.plan(self.rows, case.group, pooling, capacity, sms)
        plan = launch_lists.Lists.plan(self.rows, case.group, budget, scratch, select.arch())
        assert plan is not None, label
        self.plan = plan
        self.scores = case.guard.like((self.rows, scratch.heads, scratch.stride), torch.float16, float("nan"))
        self.parts = case.guard.like((self.rows, scratch.parts, scratch.heads, 4), torch.float32, float("nan"))
        self.notes = case.guard.like((self.rows, scratch.parts, launch_lists.NOTES), torch.int32, -7)
        self.redo = case.guard.like((self.rows,), torch.int32, -7)
        self.out = case.guard.like((self.batch, case.heads, budget + 1), torch.int32, -7)
        self.sizes = {"budget": budget, "sink": sink, "window": window, "pooling": pooling}

    def all_scores(self, own: select.OwnBudgets | None = None) -> tuple[Tensor, Tensor]:
        """Choose by stored scores; returns lists and parts."""
        case, common = self.case, {"scale": self.case.dim**-0.5, "pooling": self.pooling, "page_size": self.case.page}
        scores, parts, out = torch.full_like(self.scores, float("nan")), torch.full_like(self.parts, float("nan")), torch.full_like(self.out, -7)
        select.fier_score(case.q, case.bits, case.meta, case.table, case.lens, scores, parts, budget=self._scores_from(own), **common)
        select.select_units(scores, parts, case.lens, out, unit=1, group=32, own=own, **self.sizes)
        return out, parts

    def by_lists(self, own: select.OwnBudgets | None = None) -> None:
        """Choose by lists, into self.out."""
        case = self.case
        launch_lists.choose_by_lists(
            case.q, case.bits, case.meta, case.table, case.lens, self.out, self.scores, self.parts, self.notes, self.redo, self.plan,
            page_size=case.page, scores_from=self._scores_from(own), scale=case.dim**-0.5, own=own, **self.sizes,
        )  # fmt: skip

    def _scores_from(self, own: select.OwnBudgets | None) -> int:
        return self.budget if own is None else 0

    def compare(self, redone: int | None, own: select.OwnBudgets | None = None) -> None:
        """Compare both choices; redone: rows that the lists may not decide, None where any number is right."""
        expected, parts = self.all_scores(own)
        for tensor in (self.out, self.notes, self.redo):
            tensor.fill_(-7)
        self.scores.fill_(float("nan")), self.parts.fill_(float("nan"))
        self.by_lists(own)
        torch.cuda.synchronize()
        expect(torch.equal(self.out, expected), f"{self.label}: other units are chosen")
        expect(self.case.guard.intact(), f"{self.label}: a margin was written")
        expect(bool(((self.redo == 0) | (self.redo == 1)).all()), f"{self.label}: rows are neither decided nor left")
        again = int(self.redo.sum())
        expect(redone is None or again == redone, f"{self.label}: {again} rows of {self.rows} were scored again, not {redone}")
        scored = (self.notes[:, :, 0] < launch_lists.NOT_LISTED) | (self.redo == 1)[:, None]
        expect(torch.equal(self.parts[scored][..., :2], parts[scored][..., :2]), f"{self.label}: normalizers differ")


def check_many(case: Case, budget: int, sink: int, window: int, pooling: str, label: str, redone: int | None = 0, sms: int = 4) -> Choice:
    """Choose by lists what the other kernels choose, with the engine's budget and with smaller ones."""
    choice = Choice(case, budget, sink, window, pooling, label, sms)
    choice.compare(redone)
    slots = torch.randperm(choice.batch + 1, device=checks.DEV)[: choice.batch].int()
    budgets = torch.zeros(choice.batch + 1, dtype=torch.int32, device=checks.DEV)
    budgets[slots[0].long()] = sink + window + 64
    choice.compare(None, select.OwnBudgets(slots, budgets, 0))
    return choice


def peak(case: Case, tokens: list[int], by: float) -> None:
    """Make tokens of every sequence look like the queries of their KV heads, so that they take nearly all of the softmaxes."""
    for b in range(len(case.lens)):
        asked = case.q[b].view(case.heads, case.group, case.dim).mean(1)
        for token in (t for t in tokens if t < int(case.lens[b])):
            case.keys[case.table[b, token // case.page].long(), :, token % case.page] = (by * asked).to(case.dtype)
    words, bounds = fier_layout.pack(case.keys.unflatten(2, (-1, 32)))
    case.bits.copy_(words), case.meta.copy_(bounds)


def check_growth(steps: int) -> None:
    """Replay a captured choice while sequences grow over group borders and past the length from which lists are kept."""
    case = Case(2, 4, 128, 64, [4000, 1800, 150, 6000], torch.bfloat16)
    case.keys.nan_to_num_(0.0), case.meta.nan_to_num_(0.0)
    words, bounds = fier_layout.pack(case.keys.unflatten(2, (-1, 32)))
    case.bits.copy_(words), case.meta.copy_(bounds)
    choice = Choice(case, 192, 4, 33, "softmax-mean", "growth", 4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        choice.by_lists()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choice.by_lists()
    for step in range(steps):
        case.lens += 1
        case.q.normal_()
        if step == steps // 2:
            case.lens[0] = 350  # another request takes the slot
        choice.out.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        expect(torch.equal(choice.out, choice.all_scores()[0]), f"growth: step {step} chooses other units")


def run(sizes: str) -> None:
    bf16, fp16 = torch.bfloat16, torch.float16
    if sizes == "small":
        check_many(Case(2, 7, 128, 64, [4099, 300, 2500], bf16), 128, 4, 16, "softmax-mean", "small")
        check_many(Case(1, 4, 64, 32, [5000], fp16), 128, 0, 0, "softmax-max", "small, softmax-max")
        case = Case(2, 4, 128, 32, [4099, 3000], bf16)
        checks.repeat_tokens(case, 5)
        check_many(case, 150, 4, 16, "softmax-mean", "small, ties", None)
        return
    for group, pooling in itertools.product(range(2, 9), ("softmax-mean", "softmax-max")):
        check_many(Case(3, group, 128, 64, [16411, 300, 20001], bf16), 512, 4, 33, pooling, f"G {group} {pooling}")
    for dim in (64, 96, 256):
        check_many(Case(2, 4, dim, 128, [9000, 12000, 40], fp16), 256, 4, 16, "softmax-mean", f"D {dim}")
    check_many(Case(8, 4, 128, 32, [131056] * 8, bf16), 2048, 4, 64, "softmax-mean", "64 rows of 128k", sms=132)
    check_many(Case(4, 7, 128, 32, [131056] * 8, bf16), 2048, 4, 64, "softmax-mean", "32 rows of 128k", sms=132)
    for by in (0.5, 3.0, 40.0):
        case = Case(4, 4, 128, 32, [40000, 30001], bf16)
        peak(case, [0, 77, 20000, 20001, 29999, 39990], by)
        check_many(case, 1024, 4, 64, "softmax-mean", f"peaks by {by}", None)
    for levels in (1, 5):
        case = Case(2, 4, 64, 32, [20000, 15000], fp16)
        checks.repeat_tokens(case, levels)
        check_many(case, 700, 0, 0, "softmax-mean", f"{levels} levels", None)
    check_growth(70)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    begin = time.time()
    run("small" if options.small else "large")
    print(f"seed {options.seed}, failures {len(checks.failures)}, {time.time() - begin:.0f} s")
    return bool(checks.failures)


if __name__ == "__main__":
    sys.exit(main())

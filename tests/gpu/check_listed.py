"""The choice among listed packets on the GPU: against the selector that reads all scores, bit for bit, in graphs that are replayed for other lengths.

Run it on a machine with a GPU: python -m tests.gpu.check_listed [--seed N]; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from tests.gpu import listed_case
from tests.gpu.check_retrieval import told_words
from trtkv.plugins.kv_select import launch, launch_listed

DEV = "cuda"
# Rows, sequences, heads, parts, cluster (0: the launch chooses), pooling.
SHAPES = (
    (4, 1, 7, 8, 16, "softmax-mean"), (32, 8, 7, 8, 0, "softmax-mean"), (32, 8, 7, 8, 4, "softmax-max"), (64, 8, 4, 4, 0, "softmax-mean"),
    (64, 8, 2, 4, 0, "softmax-max"), (8, 2, 5, 33, 8, "softmax-mean"), (6, 3, 8, 16, 1, "softmax-mean"), (10, 5, 3, 7, 2, "softmax-mean"),
)  # fmt: skip


def check(rows: int, batch: int, heads: int, parts: int, cluster: int, pooling: str, units: int = 131072, budget: int = 2048) -> list[str]:
    """Choose by lists of three lengths in turn, with one captured launch; the last time a part's bound is too high."""
    common = {"budget": budget, "sink": 4, "window": 64, "unit": 1, "group": 32, "pooling": pooling}
    lens, label, wrong = torch.full((batch,), units - 5, dtype=torch.int32, device=DEV), f"{rows} rows, G {heads}, {parts} parts, {cluster}", []
    held = listed_case.make(torch.randn(rows, heads, units, device=DEV) * 2, lens, parts, [4 * budget] * rows, pooling=pooling, spread=0.0)
    out = torch.full((batch, rows // batch, budget + 1), -7, dtype=torch.int32, device=DEV)
    want, failed, words = out.clone(), torch.full((rows,), -7, dtype=torch.int32, device=DEV), told_words(torch.randn(rows, 64, device=DEV), 64)

    def choose() -> None:
        launch_listed.choose_listed(held.scores, held.parts, held.counts, lens, out, failed, cluster=cluster, told=words, **common)

    choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose()
    for stored, high in ((units - 5, 0), (units // 2 + 77, 0), (budget - 1, 0), (units - 5, 1)):
        lens.copy_(torch.randint(max(1, stored - 3000), stored + 1, (batch,), dtype=torch.int32))
        raw = torch.randn(rows, heads, units, device=DEV) * 2
        new = listed_case.make(raw, lens, parts, [4 * budget] * rows, pooling=pooling, spread=0.0)
        new.parts[:high, -1, -1, 2] += 9
        for name in ("scores", "parts", "counts"):
            getattr(held, name).copy_(getattr(new, name))
        want.fill_(-7), out.fill_(-7), words.fill_(3)
        launch.select_units(new.halves, new.parts, lens, want, **common)
        want.view(rows, -1)[:high] = -7
        graph.replay()
        torch.cuda.synchronize()
        expected: Tensor = (torch.arange(rows, device=DEV) < high).int()
        if not torch.equal(out, want) or not torch.equal(failed, expected) or bool((words != -1).any()):
            wrong.append(f"{label}: {stored} tokens, {int((out != want).any(2).sum())} rows differ, {failed.tolist()}")
    return wrong


def main() -> bool:
    """Check every shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    wrong = [line for shape in SHAPES for line in check(*shape)]
    print("\n".join(wrong) or "the same choice everywhere")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""The choice among packets that a scorer listed: the CUDA source on the CPU against the selector that reads all scores, and against a sort."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu import listed_case
from tests.plugins import cuda_on_cpu
from trtkv.plugins.kv_select import launch, launch_listed

pytestmark = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
COMMON = {"unit": 1, "group": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(torch.initial_seed() % 1000)


def choose(
    lists: listed_case.Lists, budget: int, sink: int, window: int, cluster: int, own: launch.OwnBudgets | None = None
) -> tuple[Tensor, Tensor]:
    """Return what is chosen [R, K + 1], and which rows failed."""
    rows, batch = lists.scores.shape[0], len(lists.lens)
    out, failed = torch.full((batch, rows // batch, budget + 1), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32)
    launch_listed.choose_listed(
        lists.scores, lists.parts, lists.counts, lists.lens, out, failed, budget=budget, sink=sink, window=window, pooling=lists.pooling, own=own,
        cluster=cluster, **COMMON,
    )  # fmt: skip
    return out.flatten(0, 1), failed


def by_all_scores(lists: listed_case.Lists, budget: int, sink: int, window: int, own: launch.OwnBudgets | None = None) -> Tensor:
    """What the selector that reads all scores chooses; the parts' references must be the same."""
    rows, batch = lists.scores.shape[0], len(lists.lens)
    out = torch.full((batch, rows // batch, budget + 1), -7, dtype=torch.int32)
    launch.select_units(
        lists.halves, lists.parts, lists.lens, out, budget=budget, sink=sink, window=window, pooling=lists.pooling, cluster=1, own=own, **COMMON
    )
    return out.flatten(0, 1)


@pytest.mark.parametrize(
    ("cluster", "heads", "pooling", "num_parts", "lens"),
    [
        (1, 2, "softmax-mean", 3, [9000]),
        (2, 4, "softmax-mean", 4, [12345, 9000]),
        (4, 7, "softmax-mean", 8, [20011]),
        (8, 8, "softmax-max", 5, [16384]),
        (16, 7, "softmax-mean", 17, [40000]),
        (4, 5, "softmax-max", 2, [3000, 20000]),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_the_best_of_the_listed_are_chosen(
    cluster: int, heads: int, pooling: str, num_parts: int, lens: Sequence[int], backwards: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_on_cpu.install(monkeypatch, folder)
    monkeypatch.setattr(cuda_on_cpu.Kernel, "backwards", backwards)
    raw = torch.randn(len(lens), heads, -(-max(lens) // 32) * 32) * 2  # lists have room for what is left out
    for spread in (4.0, 0.0):
        lists = listed_case.make(raw, torch.tensor(lens, dtype=torch.int32), num_parts, [700] * len(lens), pooling=pooling, spread=spread)
        out, failed = choose(lists, 250, 4, 64, cluster)
        assert failed.tolist() == [0] * len(lens)
        assert [listed_case.wrong(lists, out[r], r, 250, 4, 64) for r in range(len(lens))] == [None] * len(lens)
    assert torch.equal(out, by_all_scores(lists, 250, 4, 64))


@pytest.mark.parametrize(("cluster", "heads"), [(1, 4), (4, 2), (16, 3)])
def test_short_rows_and_budgets_of_requests(cluster: int, heads: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which all is listed, that are read whole, of which nothing is chosen or everything, or little; parts without a group."""
    cuda_on_cpu.install(monkeypatch, folder)
    lens = [450, 700, 9000, 1300, 520, 2000, 8100, 580]
    raw = torch.randn(2 * len(lens), heads, 24000) * 2
    lists = listed_case.make(raw, torch.tensor(lens, dtype=torch.int32), 7, [0, 0, 900, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1500, 1500, 0, 0], spread=0.0)
    for sink, window in ((4, 64), (37, 480), (0, 0)):
        for budgets in (None, [0, 120, 96, 0, 400, 64, 300, 480, 0]):
            own = None if budgets is None else launch.OwnBudgets(torch.arange(8).int(), torch.tensor(budgets).int(), 512)
            out, failed = choose(lists, 560, sink, window, cluster, own)
            assert failed.tolist() == [0] * 16
            assert torch.equal(out, by_all_scores(lists, 560, sink, window, own))


@pytest.mark.parametrize("cluster", [1, 4, 16])
@pytest.mark.parametrize("levels", [3000, 40, 3])
def test_ties_go_to_the_older(cluster: int, levels: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_on_cpu.install(monkeypatch, folder)
    raw = -torch.randint(levels, (2, 1, 24000)).float() * 16 / levels
    lists = listed_case.make(raw.half().float().repeat(1, 4, 1), torch.tensor([8192, 8192], dtype=torch.int32), 6, [2600, 0], spread=0.0)
    out, failed = choose(lists, 1000, 0, 0, cluster)
    want = torch.sort(lists.halves[:, 0, :8192], dim=1, descending=True, stable=True).indices[:, :1000].sort(1).values
    good = [2730, 200, 0][[3000, 40, 3].index(levels)]  # of the same score, at most
    for row in range(2):
        if good == 0:  # every score is taken by a third of the units
            assert failed[row] == 1 and bool((out[row] == -7).all())
        else:
            assert failed[row] == 0 and torch.equal(out[row, :-1].long(), want[row])


@pytest.mark.parametrize("cluster", [1, 2, 16])
def test_lists_that_do_not_hold_the_choice(cluster: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_on_cpu.install(monkeypatch, folder)
    raw = torch.randn(8, 3, 16000) * 2
    lists = listed_case.make(raw, torch.full((4,), 16000, dtype=torch.int32), 4, [280, *[1200] * 7], spread=0.0)
    want = by_all_scores(lists, 300, 0, 0)
    capacity = launch_listed.Regions.of(3, 16000, 4).capacity
    lists.counts[1, 3, 7] = capacity + 1
    lists.parts[2, 1, 2, 1] = float("inf")
    lists.parts[3, 3, 0, 1] = float("nan")
    lists.parts[4, 2, 0, 2] = float("nan")
    lists.parts[5, 2, 1, 2] += 9
    lists.counts[6] = 0
    out, failed = choose(lists, 300, 0, 0, cluster)
    assert failed.tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert bool((out[:7] == -7).all()) and torch.equal(out[7], want[7])


@pytest.mark.parametrize("cluster", [2, 16])
def test_lists_of_different_lengths_and_heavy_neighbours(cluster: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All packets of a part in one of its lists; nearly all of the chosen units in one block's part of the row; the words of queries are emptied."""
    cuda_on_cpu.install(monkeypatch, folder)
    raw = torch.randn(2, 2, 32000) * 2
    raw[1, :, 30000:31000] += 8
    lists = listed_case.make(raw, torch.full((1,), 32000, dtype=torch.int32), 2, [700, 1000], spread=0.0, crowd=True)
    out, failed = choose(lists, 900, 16, 600, cluster)
    assert failed.tolist() == [0, 0] and torch.equal(out, by_all_scores(lists, 900, 16, 600))


@pytest.mark.parametrize(("kind", "cluster", "levels"), [("narrow", 1, 2), ("narrow", 4, 2), ("narrow", 16, 2), ("outlier", 4, 2), ("wide", 2, 1)])
def test_scores_that_share_a_bin(kind: str, cluster: int, levels: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly equal scores, and those far below one that has all the mass, are counted again by finer bins."""
    loaded = cuda_on_cpu.install(monkeypatch, folder)
    raw = torch.randn(2, 2, 30000) * {"narrow": 0.002, "outlier": 0.5, "wide": 12.0}[kind]
    if kind == "outlier":
        raw[:, :, 77] = 40
    lists = listed_case.make(raw, torch.tensor([8192, 8000], dtype=torch.int32), 3, [0, 0], spread=0.0)
    out, failed = choose(lists, 1000, 4, 64, cluster)
    kernel = next(iter(loaded.values()))
    entered, cuts = kernel.marked(3), kernel.marked(5)
    assert failed.tolist() == [0, 0] and entered == 2 * cluster and cuts >= levels * entered, cuts
    assert torch.equal(out, by_all_scores(lists, 1000, 4, 64))

"""Scores, choice and attention in one launch, compiled for the CPU, by the checks of the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plugins import cuda_on_cpu

pytest.importorskip("triton")
from tests.gpu import check_retrieval as checks
from trtkv.plugins.kv_select import launch_pages, launch_retrieve
from trtkv.plugins.kv_select.launch_fused import Fused

pytestmark = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(checks, "DEV", "cpu")
    monkeypatch.setattr(checks, "failures", [])
    cuda_on_cpu.install(monkeypatch, folder)
    torch.manual_seed(torch.initial_seed() % 1000)


@pytest.mark.parametrize(
    ("group", "dim", "pooling", "lens", "sms", "blocks"),
    [
        (7, 64, "softmax-mean", [817, 97], 8, 2),
        (4, 64, "mean", [801], 3, 2),
        (1, 96, "softmax-max", [700], 4, 2),
        (3, 32, "softmax-max", [1300], 3, 3),
    ],
)
def test_tokens(group: int, dim: int, pooling: str, lens: list[int], sms: int, blocks: int) -> None:
    case = checks.Case(1, group, dim, 64, lens, BF16 if group > 4 else FP16)
    checks.check_attended(case, 160, 4, 16, pooling, sms, blocks, f"G {group} D {dim} {pooling}")
    assert checks.failures == []


@pytest.mark.parametrize(
    ("group", "pooling", "page", "lens"),
    [(7, "softmax-mean", 16, [2617, 97]), (4, "mean", 32, [5201]), (1, "softmax-max", 16, [2700]), (8, "softmax-max", 16, [2216])],
)
def test_pages(group: int, pooling: str, page: int, lens: list[int]) -> None:
    case = checks.Case(1, group, 32, page, lens, FP16, pages=True)
    checks.check_attended(case, 10 * page, page, 48, pooling, 8, 2, f"pages, G {group} {pooling}")
    assert checks.failures == []


@pytest.mark.parametrize(("levels", "budget"), [(1, 100), (2, 900), (3, 300)])
def test_crowded_scores(levels: int, budget: int) -> None:
    """Far more units share a key than blocks tell each other, so that scores and then units decide."""
    case = checks.Case(1, 2, 32, 32, [1500], FP16)
    checks.repeat_tokens(case, levels)
    case.values.nan_to_num_(0.5)  # tokens behind the last have scores here
    checks.check_attended(case, budget, 0, 0, "softmax-mean", 8, 4, f"{levels} levels")
    assert checks.failures == []


def test_one_block_holds_most_of_the_choice() -> None:
    """Its warps read one tile after the other, and those of the other block nothing but what is read in any case."""
    case = checks.Case(1, 2, 32, 32, [2100], FP16)
    likes = 4 * case.q[0].view(2, 32).float().mean(0).half()
    case.meta[case.table[0, 0:65:2].long(), 0, 0, 0] = likes  # lows of the groups of the first of two blocks: all their scores are high
    checks.check_attended(case, 900, 3, 200, "softmax-mean", 4, 2, "one block")
    assert checks.failures == []


def test_a_long_window_and_a_sink() -> None:
    checks.check_attended(checks.Case(1, 2, 32, 32, [2100], FP16), 1600, 200, 1100, "softmax-mean", 4, 2, "a long window")
    checks.check_attended(checks.Case(1, 2, 32, 16, [2616], FP16, pages=True), 1024, 64, 800, "softmax-mean", 8, 2, "a long window of pages")
    assert checks.failures == []


def test_threads_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu.Kernel, "backwards", True)
    checks.check_attended(checks.Case(1, 4, 32, 64, [600], FP16), 100, 0, 8, "softmax-mean", 4, 2, "backwards")
    checks.check_attended(checks.Case(1, 4, 32, 16, [2617], FP16, pages=True), 160, 16, 48, "max", 8, 2, "pages backwards")
    assert checks.failures == []


def test_outliers_are_read_whatever_their_scores() -> None:
    """ShadowKV's pages that describe their keys worst are raised above all others."""
    torch.manual_seed(3)
    case = checks.Case(1, 2, 32, 16, [2600], FP16, pages=True)
    units, forced = case.units(0), [3, 40, 101]
    means = case.keys.nan_to_num(0.0).float().mean(2, keepdim=True).half()
    likeness = torch.ones(*means.shape[:3])
    likeness[case.table[0, forced].long()] = -1.0
    cut, lens, table = torch.zeros(1, 1, 2, dtype=torch.int32), case.lens, case.table
    launch_pages.outlier_cut(likeness, table, lens, cut, unit=16, outliers=3, budget=320)
    fused = Fused.plan_pages(1, 2, "softmax-mean", table.shape[1], 8, "90")
    plan = fused and launch_retrieve.Retrieval.of(fused, 2, 32, chunk=1, arch="90")
    assert plan is not None
    mail, stamps = plan.allocate("cpu")
    out, marks = torch.full_like(case.q, float("nan")), torch.zeros(1, table.shape[1], dtype=torch.uint8)
    launch_retrieve.page_retrieve(
        case.q, means, likeness, case.keys, case.values, table, lens, out, mail, stamps, plan, kind="mean", unit=16, width=20, budget=320,
        scale=32**-0.5, pooling="softmax-mean", sink=0, window=16, cut=cut, record=launch_retrieve.Record(marks),
    )  # fmt: skip
    assert bool(marks[0, forced].all()) and int(marks.sum()) == 20 and units == 162
    checks.check_attention(case, 0, [marks[0].nonzero()[:, 0].tolist()], out[0], 32**-0.5, "outliers")
    assert checks.failures == []


def test_what_does_not_fit_is_launched_apart() -> None:
    few = Fused.plan(4, 7, 128, "softmax-mean", 32768, 132, "90")
    assert few is not None
    plan = launch_retrieve.Retrieval.of(few, 7, 128, chunk=32, arch="90")
    assert plan is not None and plan.held == 2 and plan.shared <= 227 * 1024
    assert launch_retrieve.Retrieval.of(few, 7, 256, chunk=32, arch="90") is None, "more channels than registers hold"
    assert launch_retrieve.Retrieval.of(few, 12, 128, chunk=32, arch="90") is None, "more heads than a column of eight"
    mail, stamps = plan.allocate("cpu")
    assert not mail.any() and not stamps.any() and len(mail) == len(stamps) == 4

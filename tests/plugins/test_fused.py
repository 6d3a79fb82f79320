"""Scores and choice in one launch, compiled for the CPU: the same lists as the selector's for the same scores, and the checks of the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plugins import cuda_on_cpu

pytest.importorskip("triton")
from tests.gpu import check_retrieval as checks
from trtkv.plugins.kv_select import fier_layout

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
    ("group", "dim", "pooling", "lens", "blocks"),
    [(7, 64, "softmax-mean", [817, 97], 3), (4, 64, "mean", [801], 3), (1, 96, "softmax-max", [700], 2), (3, 64, "softmax-max", [640], 2)],
)
def test_the_choice_is_the_selectors(group: int, dim: int, pooling: str, lens: list[int], blocks: int) -> None:
    case = checks.Case(1, group, dim, 64, lens, BF16 if group > 4 else FP16)
    checks.check_fused(case, 160, 4, 16, pooling, blocks, f"G {group} D {dim} {pooling}")
    assert checks.failures == []


@pytest.mark.parametrize(
    ("group", "dim", "pooling", "lens", "page"),
    [(7, 64, "softmax-mean", [2617, 97], 16), (4, 64, "mean", [2201], 16), (1, 32, "softmax-max", [2700], 16), (12, 32, "softmax-max", [2216], 16)],
)
def test_the_choice_among_pages_is_the_selectors(group: int, dim: int, pooling: str, lens: list[int], page: int) -> None:
    case = checks.Case(1, group, dim, page, lens, FP16, pages=True)
    checks.check_fused(case, 20 * page, page, 3 * page, pooling, 2, f"G {group} D {dim} {pooling}")
    assert checks.failures == []


@pytest.mark.parametrize(("levels", "budget"), [(1, 100), (2, 900), (3, 300)])
def test_crowded_scores(levels: int, budget: int) -> None:
    case = checks.Case(1, 2, 32, 32, [1500], FP16)
    vectors, level = torch.randn(levels, 32), torch.arange(32) % levels
    case.keys[:] = vectors[level].half()  # every page holds the same tokens
    words, bounds = fier_layout.pack(case.keys.unflatten(2, (-1, 32)))
    case.bits.copy_(words), case.meta.copy_(bounds)
    checks.check_fused(case, budget, 0, 0, "softmax-mean", 3, f"{levels} levels")
    assert checks.failures == []


def test_threads_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu.Kernel, "backwards", True)
    checks.check_fused(checks.Case(1, 4, 64, 64, [600], FP16), 100, 0, 8, "softmax-mean", 2, "backwards")
    assert checks.failures == []

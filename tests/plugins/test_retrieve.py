"""Scores, choice and attention in one launch, compiled for the CPU, by the checks of the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plugins import cuda_on_cpu

pytest.importorskip("triton")
from tests.gpu import check_retrieval as checks
from trtkv.plugins.kv_select import launch_retrieve
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

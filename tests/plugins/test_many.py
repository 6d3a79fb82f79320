"""Selection by lists, with the CUDA sources compiled for the CPU: the choice of the kernels that store all scores, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plugins import cuda_on_cpu

pytest.importorskip("triton")
from tests.gpu import check_many
from tests.gpu import check_retrieval as checks

pytestmark = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
HOPPER, AMPERE = (9, 0), (8, 0)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEV", "cpu")
    monkeypatch.setattr(checks, "failures", [])
    torch.manual_seed(torch.initial_seed() % 1000)


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize(
    ("heads", "group", "dim", "pooling", "dtype"),
    [(1, 4, 128, "softmax-mean", BF16), (1, 7, 64, "softmax-mean", FP16), (1, 3, 64, "softmax-max", BF16), (2, 2, 96, "softmax-mean", FP16)],
)
def test_lists_hold_what_is_chosen(
    heads: int, group: int, dim: int, pooling: str, dtype: torch.dtype, capability: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_on_cpu.install(monkeypatch, folder, capability, multiprocessors=2)
    case = checks.Case(heads, group, dim, 64, [4131, 97, 3000], dtype)
    choice = check_many.check_many(case, 128, 4, 16, pooling, f"G {group} D {dim} {pooling}", redone=None)
    assert checks.failures == []
    assert int(choice.redo.sum()) < heads  # most rows are decided by their lists

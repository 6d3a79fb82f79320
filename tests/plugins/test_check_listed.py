"""The checks of `tests/gpu/check_listed.py`, smaller, with the CUDA sources compiled for the CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.plugins import cuda_on_cpu

pytest.importorskip("triton")
from tests.gpu import check_retrieval as checks
from tests.gpu import listed_case
from trtkv.plugins.kv_select import launch_listed

sys.modules.setdefault("check_retrieval", checks)  # as the checks on a GPU import each other
listed = importlib.import_module("tests.gpu.check_listed")
pytestmark = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(checks, "DEV", "cpu")
    checks.failures.clear()
    cuda_on_cpu.install(monkeypatch, folder)
    if not (launch_listed._HERE / "fier_list.cu").exists():
        monkeypatch.setattr(launch_listed, "fier_list", listed_case.stand_in)
    torch.manual_seed(torch.initial_seed() % 1000)


@pytest.mark.parametrize(
    ("group", "dim", "pooling", "lens", "parts", "dtype"),
    [
        (4, 32, "softmax-mean", [9617, 97, 0, 700], 1, FP16),
        (7, 64, "softmax-mean", [9630, 300], 1, BF16),
        (2, 32, "softmax-max", [13000, 1300], 2, FP16),
        (5, 96, "softmax-mean", [6500], 1, BF16),
    ],
)
def test_lists_hold_the_choice(group: int, dim: int, pooling: str, lens: list[int], parts: int, dtype: torch.dtype) -> None:
    case = listed.Index(1, group, dim, 64, lens, dtype)
    ask = listed.Ask(100, 4, 16, pooling)
    listed.check(case, ask, f"G {group} D {dim} {pooling}", parts=parts)
    assert checks.failures == []


def test_rows_whose_lists_do_not_decide_are_scored_again() -> None:
    case = listed.Index(1, 2, 32, 32, [5000, 9000], FP16)
    listed.check_forced(case, listed.Ask(100, 4, 16), "forced", lambda rows: rows == 1, parts=1)
    case.alike()
    listed.check(case, listed.Ask(100, 0, 0), "alike", parts=1, fails=True)
    assert checks.failures == []


def test_queries_that_are_told() -> None:
    listed.check_told(listed.Index(1, 4, 64, 32, [3000, 120], BF16), listed.Ask(100, 0, 8), "told", parts=1)
    assert checks.failures == []


def test_requests_with_budgets_of_their_own_choose_fewer() -> None:
    case = listed.Index(1, 2, 32, 32, [5000, 130, 900, 400], FP16)
    listed.check_own(case, listed.Ask(100, 4, 16), [50, 60, 0, 40], 0, "own", parts=1)
    assert checks.failures == []

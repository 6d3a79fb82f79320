"""Scores and choice of many rows, compiled for the CPU: what the lists and their ranking choose is the best by the scores that they leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plugins import cuda_on_cpu

pytest.importorskip("triton")
from tests.gpu import check_retrieval as checks
from trtkv.plugins.kv_select import launch_stream

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
    ("heads", "group", "dim", "pooling", "lens", "sms"),
    [
        (4, 4, 64, "softmax-mean", [4801, 97, 2600], 6),
        (1, 7, 32, "softmax-mean", [3777, 4160, 3000], 2),
        (2, 3, 32, "softmax-max", [5000, 130], 4),
    ],
)
def test_the_best_of_many_rows_are_chosen(heads: int, group: int, dim: int, pooling: str, lens: list[int], sms: int) -> None:
    case = checks.Case(heads, group, dim, 64, lens, BF16 if group > 4 else FP16)
    checks.check_streamed(case, 130, 4, 16, pooling, sms, f"G {group} D {dim} {pooling}")
    assert checks.failures == []


@pytest.mark.parametrize(("levels", "budget"), [(1, 300), (3, 1100)])
def test_crowded_scores(levels: int, budget: int) -> None:
    """Far more units share a score than are compared with each other, so that digits of score and unit decide."""
    case = checks.Case(2, 2, 32, 32, [3700], FP16)
    checks.repeat_tokens(case, levels)
    checks.check_streamed(case, budget, 0, 0, "softmax-mean", 4, f"{levels} levels")
    assert checks.failures == []


def test_threads_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu.Kernel, "backwards", True)
    checks.check_streamed(checks.Case(3, 5, 32, 64, [2600], FP16), 100, 0, 8, "softmax-mean", 3, "backwards")
    assert checks.failures == []


def test_sums_that_overflow_are_taken_again() -> None:
    """A token far heavier than the first groups of its warp."""
    case = checks.Case(1, 4, 64, 32, [3000], FP16)
    case.q *= 40
    checks.check_streamed(case, 200, 4, 16, "softmax-mean", 1, "heavy")
    assert checks.failures == []


def test_plans_follow_the_device() -> None:
    plan = launch_stream.Stream.plan
    llama, qwen = plan(64, 4, 128, "softmax-mean", 131072, 132, "90"), plan(32, 7, 128, "softmax-mean", 131072, 132, "90")
    assert llama is not None and (llama.teams, llama.blocks, llama.buffers, llama.stages) == (4, 33, 3, 4)
    assert qwen is not None and (qwen.teams, qwen.blocks, qwen.buffers, qwen.stages) == (4, 33, 2, 4)
    assert plan(64, 4, 128, "softmax-mean", 131072, 132, "80") is None and plan(64, 4, 128, "mean", 131072, 132, "90") is None
    assert plan(64, 7, 128, "softmax-mean", 1 << 20, 132, "90") is None, "their scores fit in no shared memory"

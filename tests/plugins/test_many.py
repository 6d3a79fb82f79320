"""Selection by lists, with the CUDA sources compiled for the CPU: the choice of the kernels that store all scores, bit for bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from tests.plugins import cuda_on_cpu

pytest.importorskip("triton")
from tests.gpu import check_many
from tests.gpu import check_retrieval as checks
from tests.plugins.test_aot import architecture, model, needs_compilers, parameters, specs
from trtkv.plugins._device.nvrtc import CudaSpec
from trtkv.plugins.kv_select import launch_lists

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
    cuda_on_cpu.install(monkeypatch, folder, capability)
    case = checks.Case(heads, group, dim, 64, [4131, 97, 3000], dtype)
    choice = check_many.check_many(case, 128, 4, 16, pooling, f"G {group} D {dim} {pooling}", redone=None, sms=2)
    assert checks.failures == []
    assert int(choice.redo.sum()) < heads  # most rows are decided by their lists


def _listing(sm: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, CudaSpec]:
    monkeypatch.setattr(launch_lists, "LEAST_TOKENS", 0)
    found = {spec.entry: spec for spec in specs("fier", sm, model()) if isinstance(spec, CudaSpec)}
    return {name: found[name] for name in ("fier_list", "select_lists")}


@needs_compilers
@pytest.mark.parametrize("sm", ["80", "89", "90", "120"])
def test_both_kernels_are_compiled_into_engines(sm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, spec in _listing(sm, monkeypatch).items():
        binary = spec.compile()
        assert architecture(binary.cubin) == int(sm) and name.encode() in binary.cubin


@needs_compilers
def test_both_kernels_take_the_arguments_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in _listing("90", monkeypatch).values():
        assert parameters(spec) == [ctypes.sizeof(kind) for kind in spec.types], spec.title


def test_lists_are_kept_where_rows_are_many_and_choices_few() -> None:
    worthwhile = launch_lists.Lists.worthwhile
    assert worthwhile(64, 4, "softmax-mean", 131072, 2048) and worthwhile(32, 7, "softmax-max", 131072, 2048)
    assert not worthwhile(64, 4, "mean", 131072, 2048) and not worthwhile(64, 1, "softmax-mean", 131072, 2048)
    assert not worthwhile(8, 4, "softmax-mean", 131072, 2048) and not worthwhile(64, 4, "softmax-mean", 131072, 16384)

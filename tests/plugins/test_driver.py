"""Launches through cuda-bindings' objects, with a driver that notes what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins.device import driver
from plugins.device.driver import Kernel
from plugins.device.nvrtc import CudaSpec
from plugins.device.spec import Binary

cuda = pytest.importorskip("cuda.bindings.driver")


class Noting:
    """The driver's types, and a launch that is noted instead of made."""

    def __init__(self) -> None:
        for name in ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID"):
            setattr(self, name, getattr(cuda, name))
        self.launches: list[dict[str, Any]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: Any) -> tuple[int]:
        grid, block = (config.gridDimX, config.gridDimY, config.gridDimZ), (config.blockDimX, config.blockDimY, config.blockDimZ)
        attributes = {int(one.id) for one in config.attrs}
        self.launches.append({"grid": grid, "block": block, "shared": config.sharedMemBytes, "attributes": attributes, "values": arguments[0]})
        return (0,)


def kernel(major: int = 9) -> tuple[Kernel, Noting]:
    made, noting = Kernel.__new__(Kernel), Noting()
    made._driver, made._configs, made._nulls, made._types, made._function, made._major = noting, {}, (0,), (), None, major
    return made, noting


def test_every_launch_has_its_own_shape_and_values() -> None:
    made, noting = kernel()
    named = cuda.CUlaunchAttributeID
    cluster, early = int(named.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION), int(named.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    for turn in range(2):  # made once, then cached
        made.launch((3, 2, 1), 256, 512, 0, (turn,))
        made.launch((3, 2, 1), 256, 512, 0, (turn,), overlap=True)
        made.launch((3, 2, 1), 128, 0, 0, (turn,), cluster=4, overlap=True)
        made.launch((3, 2, 1), 128, 0, 0, (turn,), cooperative=True)
    common = {"grid": (3, 2, 1), "block": (256, 1, 1), "shared": 512}
    assert noting.launches[4] == {**common, "attributes": set(), "values": (1, 0)}
    assert noting.launches[5] == {**common, "attributes": {early}, "values": (1, 0)}
    assert noting.launches[6]["attributes"] == {cluster, early} and noting.launches[6]["block"] == (128, 1, 1)
    assert noting.launches[7]["attributes"] == {int(named.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)}
    assert len(made._configs) == 4
    for before, after in zip(noting.launches[:4], noting.launches[4:], strict=True):
        assert {**before, "values": None} == {**after, "values": None}


def test_older_gpus_start_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    made, noting = kernel(major=8)
    monkeypatch.setattr(driver, "MOST_CONFIGS", 5)
    for tokens in range(1, 20):
        made.launch((tokens, 1, 1), 32, 0, 0, (), overlap=True)
    assert [one["grid"][0] for one in noting.launches] == list(range(1, 20)) and not any(one["attributes"] for one in noting.launches)
    assert len(made._configs) <= 5


@pytest.mark.parametrize("percent", [-1, driver.CACHING_PERCENT])
def test_kernels_request_cache_when_they_are_loaded(percent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fine, noted = cuda.CUresult.CUDA_SUCCESS, []
    answers = {"cuModuleLoadData": 1, "cuModuleGetFunction": 2, "cuCtxGetDevice": 0, "cuDeviceGetAttribute": 9, "cuFuncGetAttribute": 0}
    for name, answer in answers.items():
        monkeypatch.setattr(cuda, name, lambda *args, answer=answer: (fine, answer))
    monkeypatch.setattr(cuda, "cuFuncSetAttribute", lambda function, attribute, value: (noted.append((attribute, value)), (fine,))[1])
    Kernel(CudaSpec(Path("one.cu"), "one", (), "90", 0, (), percent), Binary(b""))
    carveout = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    assert [value for attribute, value in noted if attribute == carveout] == ([percent] if percent >= 0 else [])

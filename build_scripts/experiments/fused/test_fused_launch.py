"""The fused selection kernel without a GPU: it compiles for its shapes, and the launch rules keep to shared memory."""

from __future__ import annotations

import pytest

from trtkv.plugins._device import nvrtc
from trtkv.plugins.kv_select import launch_fused as fused


@pytest.mark.parametrize(("units", "unit"), [(1, 1), (4096, 1), (32768, 1), (1024, 32), (4096, 32)])
@pytest.mark.parametrize("rows", [1, 4, 6])
def test_the_fused_route_fits_and_covers_every_unit(rows: int, units: int, unit: int) -> None:
    assert fused.choose_route(rows, units, 128, 7, "softmax-mean", unit) == "fused"
    cluster = fused.fused_cluster(rows, units, unit)
    assert rows * cluster <= 6 * 16 and cluster in (1, 2, 4, 8, 16)
    assert fused.shared_bytes(units, 128, 7, "softmax-mean", unit, cluster) <= fused.SHARED_BYTES


@pytest.mark.parametrize(("rows", "units", "unit"), [(4, 131072, 1), (8, 32768, 1), (32, 32768, 1), (64, 131072, 1), (64, 1024, 32)])
def test_long_contexts_and_many_rows_take_the_separate_kernels(rows: int, units: int, unit: int) -> None:
    assert fused.choose_route(rows, units, 128, 4, "softmax-mean", unit) == "separate"


def test_more_units_than_shared_memory_holds_do_not_fit() -> None:
    assert fused.fits(4, 131072, 128, 7, "softmax-mean", 1)
    assert not fused.fits(4, 262144, 128, 7, "softmax-mean", 1)
    assert fused.fits(4, 262144, 128, 7, "mean", 1)  # one score a unit instead of one a head
    assert not fused.fits(1, (1 << 20) + 1, 128, 1, "mean", 1)  # an index has twenty bits


@pytest.mark.skipif(nvrtc.missing() is not None, reason=f"no NVRTC: {nvrtc.missing()}")
@pytest.mark.parametrize(
    "shape",
    ["-DD=128 -DGROUP_HEADS=7 -DPOOL=0 -DCLUSTER=16 -DPAGE=0 -DBF16", "-DD=64 -DGROUP_HEADS=1 -DPOOL=3 -DCLUSTER=1 -DPAGE=0",
     "-DD=96 -DGROUP_HEADS=4 -DPOOL=2 -DCLUSTER=4 -DPAGE=0", "-DD=128 -DGROUP_HEADS=8 -DPOOL=3 -DCLUSTER=8 -DPAGE=32 -DBF16"],
)  # fmt: skip
def test_it_compiles(shape: str) -> None:
    folder = fused._HERE
    assert nvrtc.compile_source((folder / "fused.cu").read_text(), shape.split(), "90", folder)[:4] == b"\x7fELF"

from __future__ import annotations

from trtkv.bench.busy import between, busy_share
from trtkv.bench.load import kind_of


def test_busy_is_the_union_of_what_runs() -> None:
    assert busy_share([(0.0, 4.0, "a"), (2.0, 5.0, "b"), (3.0, 4.0, "c"), (9.0, 10.0, "d")]) == 0.6
    assert busy_share([]) == 0.0


def test_only_gaps_between_two_steps_count() -> None:
    steps = [(0.0, 1.0, "feed"), (1.0, 8.0, "gemv"), (8.0, 9.0, "sample"), (10.0, 11.0, "Memcpy DtoH"), (14.0, 15.0, "feed"), (16.0, 17.0, "sample")]
    prefill = [(20.0, 30.0, "gemm"), (31.0, 32.0, "sample"), (35.0, 36.0, "feed")]
    assert between(steps) == [5.0]
    assert between(steps + prefill) == [5.0, 3.0]


def test_kernels_by_what_they_are_for() -> None:
    names = (
        "nvjet_tst_128x64",
        "gemv",
        "attend_part",
        "flash_fwd_splitkv",
        "fier_score",
        "select_units",
        "recall_pages",
        "append_kernel",
        "rms_norm",
    )
    kinds = ["weights", "weights", "attention", "attention", "selection", "selection", "recall", "append", "rest"]
    assert [kind_of(name) for name in names] == kinds
    assert [kind_of(name) for name in ("attend_encoded", "append_encoded", "move_kernel")] == ["attention", "append", "append"]

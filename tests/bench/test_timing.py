"""Times: what counts as a sample, and how samples become figures."""

from __future__ import annotations

import pytest
import torch

from trtkv.bench import timing
from trtkv.bench.timing import Times, copy_bandwidth, measure, spread_percent

CPU = torch.device("cpu")


def test_percentiles_are_times_that_were_measured() -> None:
    times = Times.of([float(n) for n in range(100, 0, -1)], "wall clock")
    assert (times.median_us, times.p90_us, times.p99_us, times.least_us, times.samples) == (50.0, 90.0, 99.0, 1.0, 100)
    assert Times.of([3.0], "wall clock") == Times(3.0, 3.0, 3.0, 3.0, 1, "wall clock")


def test_the_wall_clock_leaves_the_warm_up_out_and_turns_through_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two readings a call: calls take 1000, 900 (warm-up), then 10, 30 and 20 us.
    readings = iter(second * 1e-6 for start, took in enumerate([1000, 900, 10, 30, 20]) for second in (start * 5000, start * 5000 + took))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(readings))
    seen: list[int] = []
    times = measure(seen.append, 3, 3, CPU)
    assert seen == [0, 1, 2, 0, 1] and times.last == 1
    assert (times.how, times.samples) == ("wall clock", 3)
    assert [times.least_us, times.median_us, times.p99_us] == pytest.approx([10, 20, 30], rel=1e-6)


def test_the_spread_of_two_runs_does_not_depend_on_their_order() -> None:
    slow, fast = Times.of([11.0], ""), Times.of([10.0], "")
    assert spread_percent(slow, fast) == spread_percent(fast, slow) == pytest.approx(10.0)


def test_copy_bandwidth_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(timing, "measure", lambda call, launches, runs, device: Times.of([100.0], ""))
    assert copy_bandwidth(CPU) == pytest.approx(2 * (1 << 20) / 100e-6)

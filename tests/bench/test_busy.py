from __future__ import annotations

from trtkv.bench.busy import between, busy_share, idle_by_place


def test_busy_is_the_union_of_what_runs() -> None:
    assert busy_share([(0.0, 4.0, "a"), (2.0, 5.0, "b"), (3.0, 4.0, "c"), (9.0, 10.0, "d")]) == 0.6
    assert busy_share([]) == 0.0


def test_idle_time_is_named_by_its_neighbours() -> None:
    spans = [(0.0, 4.0, "a"), (2.0, 5.0, "b"), (3.0, 4.5, "c"), (9.0, 10.0, "d"), (11.0, 12.0, "b"), (17.0, 20.0, "d"), (20.0, 21.0, "a")]
    assert idle_by_place(spans) == {"b > d": 9 / 21, "d > b": 1 / 21}
    assert sum(idle_by_place(spans).values()) + busy_share(spans) == 1.0
    assert idle_by_place([]) == {}


def test_only_gaps_between_two_steps_count() -> None:
    steps = [(0.0, 1.0, "feed"), (1.0, 8.0, "gemv"), (8.0, 9.0, "sample"), (10.0, 11.0, "Memcpy DtoH"), (14.0, 15.0, "fetch"), (16.0, 17.0, "sample")]
    prefill = [(20.0, 30.0, "gemm"), (31.0, 32.0, "sample"), (35.0, 36.0, "feed")]
    assert between(steps) == [5.0]
    assert between(steps + prefill) == [5.0, 3.0]

"""Kernel times from a trace."""

from __future__ import annotations

import pytest
import torch

from trtkv.bench.profile import kernel_times, mean_times, short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("fier_score", "fier_score"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >(int, char*)", "vectorized_elementwise_kernel"),
        ("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64> >(Flash_fwd_params)", "flash_fwd_splitkv_kernel"),
        ("Memset (Device)", "Memset"),
        ("", ""),
    ],
)
def test_names_lose_what_is_not_a_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_times_are_means_in_the_order_of_launches() -> None:
    spans = [(10.0, 16.0, "score"), (0.0, 4.0, "score"), (5.0, 8.0, "choose"), (17.0, 20.0, "choose"), (20.0, 21.0, "fill")]
    assert mean_times(spans, 2) == {"score": 5.0, "choose": 3.0, "fill": 0.5}
    assert list(mean_times(spans, 2)) == ["score", "choose", "fill"]


def test_a_kernel_that_waits_for_the_one_before_counts_from_its_end() -> None:
    assert mean_times([(0.0, 10.0, "score"), (1.0, 13.0, "choose")], 1) == {"score": 10.0, "choose": 3.0}


def test_a_cpu_has_no_kernels() -> None:
    assert kernel_times(lambda i: None, 1, torch.device("cpu")) == {}

from __future__ import annotations

import pytest
import torch

from trtkv.config import ModelConfig
from trtkv.plan import CachePlan
from trtkv.plugins import support
from trtkv.policies.registry import parse_policy

MODEL = ModelConfig(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=64,
    num_layers=4,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=8,
    dtype="bfloat16",
)
CPU = torch.device("cpu")


def plan(policy: str) -> CachePlan:
    return parse_policy(policy).plan(MODEL)


def test_short_sequences_are_read_whole_only_where_kernels_select(monkeypatch: pytest.MonkeyPatch) -> None:
    assert support.dense_below(plan("fier"), 1, CPU) == 0
    monkeypatch.setattr(support, "gpu_ready", lambda device: None)
    # 512 bytes of keys and values a token and KV head: one sequence of eight heads leaves the device half empty, eight fill it.
    assert support.dense_below(plan("fier"), 1, CPU) == 30_000_000 // (8 * 512)
    assert support.dense_below(plan("fier"), 8, CPU) == 85_000_000 // (64 * 512)
    assert support.dense_below(plan("full"), 1, CPU) == 0
    assert support.dense_below(plan("snapkv"), 1, CPU) == 0


@pytest.mark.parametrize(("policy", "kind"), [("fier", "fier"), ("quest", "bounds"), ("freekv", "bounds"), ("full", None), ("shadowkv", None)])
def test_summaries_that_kernels_keep(policy: str, kind: str | None) -> None:
    assert support.summary_kind(plan(policy), 3) == kind


def test_what_the_kernels_do_not_take() -> None:
    assert support.summary_kind(parse_policy("fier", sets=["retrieve.pooling=none"]).plan(MODEL), 3) is None
    assert support.summary_kind(parse_policy("fier", sets=["retrieve.group=64"]).plan(MODEL), 3) is None
    assert support.summary_kind(parse_policy("freekv", sets=["retrieve.digest=cuboid-mean"]).plan(MODEL), 3) is None
    assert support.gpu_ready(CPU) is not None

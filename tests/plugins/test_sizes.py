"""Bytes and tokens counted from constants are those that the plan counts buffer by buffer."""

from __future__ import annotations

import pytest

from plugins.cache.sizes import Sizes
from tests.policies.cases import PRESETS
from trtkv.config import ModelConfig
from trtkv.policies.registry import parse_policy

MODEL = ModelConfig(
    model_type="llama", hidden_size=256, intermediate_size=64, num_layers=5, num_q_heads=4, num_kv_heads=2, head_dim=64, vocab_size=8, dtype="float16"
)  # fmt: skip


@pytest.mark.parametrize("policy", PRESETS)
def test_sizes_are_the_plans(policy: str) -> None:
    plan = parse_policy(policy).plan(MODEL)
    sizes = Sizes(plan)
    for tokens in (0, 1, 31, 32, 33, 127, 1000, 2048, 5001):
        lengths = [tokens // (1 + group) for group in range(plan.num_page_groups)]
        assert sizes.stored_bytes(tokens) == plan.stored_bytes(tokens)
        if not plan.pooled:
            assert sizes.stored_bytes_by_group(lengths) == plan.stored_bytes_by_group(lengths)
            assert sizes.reserved_bytes_by_group(lengths) == plan.reserved_bytes_by_group(lengths)
        assert sizes.tokens_read(tokens) == plan.tokens_read(tokens)

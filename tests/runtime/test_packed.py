"""Quantized checkpoints of every format against transformers with the same weights dequantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.packing import FORMATS, make_packed
from tests.runtime.test_executor import assert_as_good_as_transformers
from tests.tiny import make_rig

TOKENS = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_are_meant(name: str, tmp_path: Path) -> None:
    tiny = make_packed(name, tmp_path / "model")
    rig = make_rig(tiny, "full", tmp_path)
    for slot, chunks in enumerate(([60], [33, 26, 1])):
        assert_as_good_as_transformers(rig.feed(TOKENS, slot, chunks=chunks), tiny, TOKENS, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int4", "fp8-rows", "awq"])
def test_other_dtypes_and_biases(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny = make_packed(name, tmp_path / "model", kind="qwen2", dtype=dtype)
    assert_as_good_as_transformers(make_rig(tiny, "full", tmp_path).feed(TOKENS), tiny, TOKENS, dtype)

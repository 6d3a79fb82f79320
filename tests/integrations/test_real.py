"""The recorded surface against the real TensorRT-LLM, and a model built and run with it; only where the package (and a GPU) is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agreement import assert_as_precise
from tests.integrations import fake_tensorrt_llm as fake
from tests.tiny import make_tiny
from trtkv import api
from trtkv.config import Limits
from trtkv.engine.directory import Request
from trtkv.integrations.tensorrt_llm.build import Policy, build_via
from trtkv.integrations.tensorrt_llm.models import models
from trtkv.integrations.tensorrt_llm.surface import PLACES, load_surface

pytestmark = [
    pytest.mark.tensorrt_llm,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is None, reason="TensorRT-LLM is not installed"),
]
# Recorded signatures whose every parameter must exist under the same name.
SIGNATURES = [(module, one) for module, content in fake.MODULES.items() for one in content if one.__name__ not in ("Engine",)]
METHODS = [
    ("tensorrt_llm.layers.attention", fake.Attention, "forward"),
    ("tensorrt_llm.layers.attention", fake.Attention, "create_attention_const_params"),
    ("tensorrt_llm.layers.attention", fake.Attention, "fill_attention_params"),
    ("tensorrt_llm.layers.attention", fake.KeyValueCacheParams, "fill_none_tensor_list"),
    ("tensorrt_llm.functional", fake.Tensor, "mark_output"),
    ("tensorrt_llm.models", fake.QWenForCausalLM, "forward"),
    ("tensorrt_llm.models", fake.QWenForCausalLM, "from_hugging_face"),
    ("tensorrt_llm.models", fake.LLaMAForCausalLM, "from_hugging_face"),
]


def parameters(function: Any) -> set[str]:
    # BuildConfig is a pydantic model from 1.2 on.
    if hasattr(function, "model_fields"):
        return set(function.model_fields)
    return {name for name, one in inspect.signature(function).parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}


def takes_any(function: Any) -> bool:
    return any(one.kind == one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())


@pytest.mark.parametrize(("module", "recorded"), SIGNATURES, ids=lambda one: getattr(one, "__name__", one))
def test_recorded_names_have_the_recorded_parameters(module: str, recorded: Any) -> None:
    real = getattr(importlib.import_module(module), recorded.__name__)
    assert takes_any(real) or parameters(recorded) <= parameters(real)


@pytest.mark.parametrize(("module", "owner", "method"), METHODS, ids=lambda one: getattr(one, "__name__", one))
def test_recorded_methods_have_the_recorded_parameters(module: str, owner: Any, method: str) -> None:
    real = getattr(getattr(importlib.import_module(module), owner.__name__), method)
    assert takes_any(real) or parameters(getattr(owner, method)) <= parameters(real)


def test_every_name_of_the_adapter_is_there() -> None:
    assert [place for place in PLACES.values() if not hasattr(importlib.import_module(place[0]), place[1])] == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("policy", ["full", "fier"])
def test_model_is_as_precise_as_the_torch_executor(kind: str, policy: str, tmp_path: Path) -> None:
    tiny = make_tiny(kind, tmp_path / "model", dtype=torch.float16)
    budget = 64 if policy == "fier" else None
    source, config, chosen = api.prepare(str(tiny.path), policy, budget, (), None, None)
    limits = Limits(max_seq_len=256, max_batch_size=2, max_chunk_tokens=128)
    request = Request(source=source, model=config, policy=chosen, limits=limits, out=tmp_path / "via")
    path = build_via(request, Policy(policy, budget)).path
    wide = api.build(str(tiny.path), policy, budget=budget, out=tmp_path / "wide", max_seq_len=256, backend="none", sms=["none"], dtype="float32")
    assert_as_precise(path, wide)


@pytest.mark.gpu
def test_quantized_products_run_in_a_process_that_has_not_imported_the_package(tmp_path: Path) -> None:
    """W8A16: the plan holds TensorRT-LLM's own plugins."""
    quantization = importlib.import_module("tensorrt_llm.models.modeling_utils").QuantConfig(quant_algo="W8A16")
    tiny = make_tiny("qwen2", tmp_path / "model", dtype=torch.float16, hidden_size=256, intermediate_size=256, head_dim=64)
    surface, limits = load_surface(), {"max_seq_len": 256, "max_batch_size": 2, "max_num_tokens": 128}
    model = models().qwen.from_hugging_face(str(tiny.path), dtype="float16", quant_config=quantization, trtkv={"policy": "full"})
    outputs = tmp_path / "engine_outputs"
    outputs.mkdir()
    surface.build(model, surface.build_config(max_input_len=256, max_beam_width=1, **limits)).save(str(outputs))
    source, config, chosen = api.prepare(str(tiny.path), "full", None, (), None, None)
    request = Request(source=source, model=config, policy=chosen, limits=Limits(max_seq_len=256, max_batch_size=2), out=tmp_path / "via")
    path = build_via(request, Policy("full"), outputs).path
    words = [sys.executable, "-m", "trtkv", "run", str(path), "Hello there", "--max-tokens", "4", "--executor", "tensorrt"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""Engines of two parts, as two processes on this machine, against the same engine in one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.console import Capture, call, complaint
from tests.policies.cases import PRESETS
from tests.tiny import TinyModel
from trtkv.api import build
from trtkv.checkpoint.weights import Checkpoint
from trtkv.config import ModelConfig
from trtkv.errors import ConfigError, EngineError
from trtkv.graph.weights import weight_specs
from trtkv.policies.registry import parse_policy
from trtkv.runtime.llm import LLM
from trtkv.runtime.parallel import LeadingStepper
from trtkv.runtime.sampler import SamplingParams
from trtkv.runtime.weights import map_weights
from trtkv.simulation import simulate

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
POLICIES = {"full": (), "fier": ("retrieve.budget=64",), "lagkv": ("evict.lag=16",), "minikv": ("evict.budget=64",)}


def engine(model: TinyModel, policy: str, out: Path, tp: int) -> Path:
    limits = {"max_seq_len": 256, "max_batch_size": 3, "max_chunk_tokens": 64}
    return build(str(model.path), policy, sets=POLICIES[policy], out=out / f"{policy}-{tp}", backend="none", sms=["none"], tp=tp, **limits)  # type: ignore[arg-type]


@pytest.fixture(params=POLICIES)
def both(request: pytest.FixtureRequest, tiny_llama: TinyModel, tmp_path: Path) -> Iterator[tuple[LLM, LLM]]:
    one, two = (LLM(engine(tiny_llama, request.param, tmp_path, tp), device="cpu") for tp in (1, 2))
    yield one, two
    two.close()


def test_two_parts_answer_as_one(both: tuple[LLM, LLM]) -> None:
    prompts = [[(7 * index + step) % 250 for step in range(length)] for index, length in enumerate((150, 33, 90, 61))]
    one, two = (llm.generate(prompts, LONG) for llm in both)
    assert [answer.token_ids for answer in two] == [answer.token_ids for answer in one]
    assert both[1].stats.tokens_read_per_step == both[0].stats.tokens_read_per_step
    assert both[1].stats.final_bytes == both[0].stats.final_bytes
    assert both[1].stats.reserved_bytes == both[0].stats.reserved_bytes
    again = both[1].generate(prompts[:2], LONG)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in one[:2]]


def test_every_weight_is_shared_out_once(tiny_llama: TinyModel) -> None:
    specs = [{"name": one.name, "shape": one.shape, "sources": one.sources} for one in weight_specs(tiny_llama.config.part(2), 2)]
    checkpoint, cpu = Checkpoint(tiny_llama.path), torch.device("cpu")
    whole = {one.name: one for one in weight_specs(tiny_llama.config)}
    parts = [map_weights(checkpoint, specs, torch.float32, cpu, lambda done, total: None, (index, 2)) for index in range(2)]
    for spec in specs:
        shapes = [torch.Size(spec["shape"])] * 2
        tensors = [torch.cat([part.view(part.shape) for part in weights[spec["name"]].parts]) for weights in parts]
        assert [tensor.view(shape).shape for tensor, shape in zip(tensors, shapes, strict=True)] == shapes
        if spec["shape"] == whole[spec["name"]].shape:
            assert torch.equal(*tensors)
        else:
            total = sum(tensor.double().square().sum() for tensor in tensors)
            sources = [checkpoint.tensor(name) for name, _ in spec["sources"]]
            torch.testing.assert_close(total, sum(source.double().square().sum() for source in sources))


@pytest.mark.parametrize("name", [name for name in PRESETS if not any(role.joins_heads for role in parse_policy(name).roles.values())])
def test_policies_that_may_be_shared_out_treat_every_head_alone(name: str) -> None:
    from tests.policies.cases import small, tensors

    q, k, v = tensors(180, q_heads=8, kv_heads=4)
    k, v = k * torch.arange(1, 5)[:, None], v * torch.arange(1, 5)[:, None]
    whole, part = simulate(small(name), q, k, v, prefill=120), simulate(small(name), q[:, :4], k[:, :2], v[:, :2], prefill=120)
    torch.testing.assert_close(whole.output[:, :4], part.output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["tova", "qhitter", "arkv", "razor"])
def test_policies_that_weigh_heads_against_each_other_are_refused(name: str, tiny_llama: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weighs KV heads against each other"):
        build(str(tiny_llama.path), name, out=tmp_path / "engine", backend="none", tp=2)
    assert not (tmp_path / "engine").exists()


def test_heads_that_do_not_divide_are_refused(tiny_llama: TinyModel, tmp_path: Path, capsys: Capture) -> None:
    words = ("build", "--model", tiny_llama.path, "--out", tmp_path / "engine", "--backend", "none")
    assert "tp 3 does not divide the model's num_kv_heads of 2" in complaint(capsys, *words, "--tp", 3)
    assert "tp 0" in complaint(capsys, *words, "--tp", 0)


def test_part_of_a_model_keeps_its_other_sizes() -> None:
    model = ModelConfig(
        model_type="llama", hidden_size=64, intermediate_size=96, num_layers=2, num_q_heads=8, num_kv_heads=4, head_dim=16, vocab_size=100
    )
    part = model.part(4)
    assert (part.num_q_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 24)
    assert (part.hidden_size, part.head_dim, part.vocab_size) == (64, 16, 100)
    assert model.part(1) == model


def test_a_part_that_dies_is_an_error_and_leaves_no_process(tiny_llama: TinyModel, tmp_path: Path) -> None:
    llm = LLM(engine(tiny_llama, "full", tmp_path, 2), device="cpu")
    stepper = llm.engine.stepper
    assert isinstance(stepper, LeadingStepper)
    process = stepper._followers[0].process
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with pytest.raises(EngineError, match="a part of the engine has failed"):
        list(stream)
    assert not process.is_alive()


def test_commands_that_take_one_part_say_so(tiny_llama: TinyModel, tmp_path: Path, capsys: Capture) -> None:
    path = engine(tiny_llama, "full", tmp_path, 2)
    assert "has 2 parts" in complaint(capsys, "verify", path)
    assert call("bench", "serve", path, "--requests", 2, "--prompt-tokens", 10, "--answer-tokens", 3, "--device", "cpu") == 0


def test_weights_that_are_missing_are_told_before_anything_runs(tiny_llama: TinyModel, tmp_path: Path, capsys: Capture) -> None:
    path = engine(tiny_llama, "full", tmp_path, 2)
    assert "does not exist" in complaint(capsys, "run", path, "hello", "--weights", tmp_path / "nowhere", "--device", "cpu")
    assert call("run", path, "hello", "--max-tokens", 2, "--weights", "random", "--device", "cpu") == 0

"""TensorRT's own attention: the graph by ONNX's definition of its operators on the CPU, the plan as TensorRT-RTX builds it, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from plugins.cache.assemble import make_cache
from plugins.cache.cache import Cache
from tests.console import Capture, complaint
from tests.tiny import TinyModel, make_rig, make_tiny
from tests.toy_graph import needs_rtx
from trtkv.api import build
from trtkv.checkpoint.weights import Checkpoint
from trtkv.config import Limits
from trtkv.engine import launched_kernels
from trtkv.engine.manifest import GRAPH, PLAN, read_manifest
from trtkv.errors import BuildError, EngineError
from trtkv.graph.decoder import Decoder
from trtkv.graph.native_attention import build_native, row_plan
from trtkv.policies.registry import parse_policy
from trtkv.runtime.loading import Options, open_engine
from trtkv.runtime.rope import rope_table
from trtkv.runtime.row_executor import CACHES, runs_of
from trtkv.runtime.rows import StepRow
from trtkv.runtime.step import Stepper
from trtkv.runtime.weights import Weight, map_weights

LIMITS = Limits(max_seq_len=100, max_batch_size=3, max_chunk_tokens=32)


class DefinedExecutor:
    """Runs the graph as ONNX defines it, with a cache's rows in the place of its tensors."""

    name, num_adapters, capturable = "onnx", 0, False

    def __init__(self, decoder: Decoder, weights: Mapping[str, Weight], cache: Cache) -> None:
        self.graph, self.cache = ReferenceEvaluator(decoder.model), cache
        self.outputs = [one.name for one in decoder.model.graph.output]
        self.weights = {name: one.whole.numpy() for name, one in weights.items()}
        self.rows = {f"{name}.{layer}": cache.buffer(name, layer).zero_() for name in CACHES for layer in range(cache.plan.num_layers)}

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        logits = []
        for one in runs_of(inputs, len(self.rows["keys.0"]), self.cache.plan.page_size):
            there = slice(one.first, one.first + one.count)
            given: dict[str, Any] = {name: tensor.numpy() for name, tensor in {**one.inputs, "rope": inputs["rope"]}.items()}
            found = dict(
                zip(self.outputs, self.graph.run(None, {**given, **self.weights, **{n: t[there].numpy() for n, t in self.rows.items()}}), strict=True)
            )
            for name, tensor in self.rows.items():
                tensor[there] = torch.from_numpy(found[f"{name}.updated"])
            logits += [torch.from_numpy(found["logits"])] if one.wanted else []
        return torch.cat(logits)


def stepper_of(tiny: TinyModel) -> Stepper:
    """Set up the graph's definition; its model is called bfloat16 where float32 is refused, and computes in float32."""
    half = tiny.config.model_copy(update={"dtype": "bfloat16"})
    plan = row_plan(parse_policy("full").plan(tiny.config), half, LIMITS)
    decoder = build_native(tiny.config, plan, LIMITS)
    onnx.checker.check_model(decoder.model)
    cache = make_cache(plan, [LIMITS.max_batch_size], LIMITS.max_batch_size, "cpu")
    weights = map_weights(Checkpoint(tiny.path), decoder.weights, torch.float32, torch.device("cpu"), lambda done, total: None)
    rope = rope_table(tiny.config.rope, tiny.config.head_dim, LIMITS.max_seq_len)
    return Stepper(DefinedExecutor(decoder, weights, cache), cache, LIMITS, rope)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_graph_means_full_attention(kind: str, tmp_path: Path) -> None:
    """Prompts in chunks, alone and together, some decoding while others are read, a row used again: every row of logits is the torch executor's."""
    tiny = make_tiny(kind, tmp_path / "model")
    ours, theirs = stepper_of(tiny), make_rig(tiny, "full", tmp_path, slots=3, length=LIMITS.max_seq_len).stepper
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, tiny.config.vocab_size, (4, LIMITS.max_seq_len), generator=generator).tolist()
    place = {0: 2, 1: 0, 2: 1, 3: 2}  # sequences' rows: the last takes the first one's
    steps = [[(0, 0, 30), (1, 0, 2)], [(0, 30, 41)], [(1, 2, 3), (0, 41, 42)], [(2, 0, 1)], [(0, 42, 43), (2, 1, 2), (1, 3, 4)],
             [(3, 0, 20)], [(3, 20, 21), (1, 4, 5)], [(1, 5, 25), (3, 21, 22)]]  # fmt: skip
    for step in steps:
        found, expected = (
            stepper.run([row_of(stepper, tokens[who], place[who], begin, end) for who, begin, end in step]) for stepper in (ours, theirs)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def row_of(stepper: Stepper, tokens: list[int], place: int, begin: int, end: int) -> StepRow:
    pages = stepper.cache.plan.pages(LIMITS.max_seq_len)
    return StepRow(tokens[begin:end], begin, place, list(range(place * pages, (place + 1) * pages)), (end - begin - 1,), prompt=end)


@pytest.mark.trt
@needs_rtx
def test_tensorrt_maps_it_to_its_own_layers(tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTKV_HOME", str(tmp_path / "home"))
    wide = make_tiny("llama", tmp_path / "wide", head_dim=64, dtype=torch.bfloat16)
    path = build(str(wide.path), out=tmp_path / "engine", max_seq_len=256, sms=["89"], backend="tensorrt_rtx", attention="native")
    launched = launched_kernels.kernels((path / PLAN).read_bytes())
    layers = read_manifest(path).model.num_layers
    assert launched_kernels.segments((path / PLAN).read_bytes()) == 1 and not [one for one in launched if one.kind == "custom_layer"]
    for profile in (0, 1):
        attention = [one for one in launched if "mha" in one.name and one.profile == profile]
        assert [one.layers for one in attention] == [(f"layers.{layer}.attention",) for layer in range(layers)]
    assert not [node for node in onnx.load(str(path / GRAPH)).graph.node if node.domain]
    for executor in ("auto", "torch"):
        with pytest.raises(EngineError, match=r"only TensorRT runs this engine, which was built with --attention native: .*Build it without"):
            open_engine(path, Options(device="cpu", executor=executor))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"policy": "fier"}, "the policy 'fier' has the role retrieve"),
        ({"policy": "full+offload"}, "has the role offload"),
        ({"policy": "lagkv"}, "the policy 'lagkv' has the role evict"),
        ({"policy": "xattention"}, "the policy 'xattention' has the role prefill"),
        ({"dtype": "float32"}, "takes bfloat16 and float16, not float32"),
        ({"tp": 2}, "--tp does not go with --attention native"),
        ({"native": True}, "--native does not go with --attention native"),
        ({"backend": "none"}, "needs a TensorRT plan, and there is none: it was built with --backend none"),
    ],
)
def test_what_it_does_not_run_is_refused_in_a_line(more: dict[str, Any], words: str, tiny_llama: TinyModel, tmp_path: Path) -> None:
    given = {"dtype": "bfloat16", "out": tmp_path / "engine", "max_seq_len": 256, "attention": "native", **more}
    with pytest.raises(BuildError, match=words) as caught:
        build(str(tiny_llama.path), **given)
    assert "\n" not in str(caught.value) and not (tmp_path / "engine").exists()


def test_an_unknown_attention_is_named(tiny_llama: TinyModel, tmp_path: Path, capsys: Capture) -> None:
    assert "nativ" in complaint(capsys, "build", "--model", tiny_llama.path, "--attention", "nativ", "--out", tmp_path / "engine")

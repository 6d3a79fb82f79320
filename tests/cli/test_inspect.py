from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.console import Capture, complaint, output, printed
from tests.tiny import TinyModel, make_tiny
from tests.toy_graph import needs_rtx
from trtkv import api
from trtkv.diagnose.inspect import _plugins_by
from trtkv.engine.manifest import NativeInfo, read_manifest


@pytest.fixture(scope="module")
def bare(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("inspect") / "bare"
    return api.build(str(tiny_llama.path), "fier", budget=64, out=out, max_seq_len=256, backend="none", sms=["none"])


def test_what_is_in_an_engine(bare: Path, capsys: Capture) -> None:
    found = output(capsys, "inspect", bare)
    assert (found["policy"], found["cache"], found["max_seq_len"], found["backend"]) == ("fier", "paged", 256, None)
    assert found["plugins"] == [
        {"op": "KvAppend", "nodes": 3, "layers": "0-2"},
        {"op": "KvAttend", "nodes": 3, "layers": "0-2"},
        {"op": "KvSelect", "nodes": 1, "layers": "2"},
    ]
    assert {one["name"]: (one["in"], one["out"], one["nodes"]) for one in found["gemms"]} == {
        "qkv": (96, 160, 3),
        "o": (96, 96, 3),
        "gate_up": (96, 224, 3),
        "down": (112, 96, 3),
        "head": (96, 262, 1),
    }
    assert {one["buffer"]: one["layers"] for one in found["buffers"]} == {"keys": 3, "values": 3, "fier_bits": 1, "fier_range": 1}
    assert found["files"] == {name: (bare / name).stat().st_size for name in found["files"]}
    assert set(found["files"]) == {file.relative_to(bare).as_posix() for file in bare.rglob("*") if file.is_file()}
    assert found["fused"] == [] and found["notes"][0].startswith("The directory holds no TensorRT plan: it was built with --backend none;")
    assert found["runs_here"].startswith("torch on ")


def test_what_runs_the_nodes_of_an_engine(tmp_path: Path, capsys: Capture) -> None:
    """Python, beside it a library where there is one, for each part where there are several."""
    given = {"max_seq_len": 256, "backend": "none", "sms": ["none"], "tp": 2}
    model = make_tiny("llama", tmp_path / "model", head_dim=64, dtype=torch.bfloat16)
    path = api.build(str(model.path), "fier", budget=64, out=tmp_path / "parts", **given)
    found = output(capsys, "inspect", path)
    assert {"op": "AllReduce", "nodes": 6, "layers": "0-2"} in found["plugins"]
    assert found["plugins_by"] == "Python; trtkv build --native writes a native library, too"
    manifest = read_manifest(path)
    native = NativeInfo(sms=("89",), kernels=1, size_bytes=1, self_contained=True, seconds=1.0)
    words = [_plugins_by(manifest.model_copy(update={"native": native, **more})) for more in ({}, {"tp": 1}, {"attention": "native"})]
    assert words[0] == "Python; outside of Python the native library, for sm 89, whose 2 parts meet by NCCL; native/engine.plan holds it"
    assert words[1].endswith("for sm 89; native/engine.plan holds it") and words[2] == "there are none: TensorRT's own layers hold the cache"


def test_reference_caches_and_tables(tiny_llama: TinyModel, tmp_path: Path, capsys: Capture) -> None:
    path = api.build(str(tiny_llama.path), "minikv", out=tmp_path / "held", max_seq_len=256, backend="none", sms=["none"])
    text = printed(capsys, "inspect", path, "--layers")
    for words in ("stored in tensors of exactly their size", "layers.2.attended", "gate_up", "Plugin nodes"):
        assert words in text


@pytest.mark.trt
@needs_rtx
def test_fused_kernels_of_a_plan(tiny_llama: TinyModel, tmp_path: Path, capsys: Capture) -> None:
    path = api.build(
        str(tiny_llama.path), "fier", budget=64, out=tmp_path / "rtx", max_seq_len=256, dtype="bfloat16", backend="tensorrt_rtx", sms=["86"]
    )
    found = output(capsys, "inspect", path, "--layers")
    assert found["backend"].startswith("tensorrt_rtx ") and found["files"]["engine.plan"] > 10_000
    counts = {one["kernel"]: one["count"] for one in found["fused"]}
    assert (counts["custom_layer query"], counts["custom_layer attended"], counts["custom_layer selection"]) == (3, 3, 1)
    products = {name: count for name, count in counts.items() if name.startswith(("fully_connected", "runtime_fusion"))}
    assert sum(products.values()) == 3 * 4 + 1 and sum(counts.values()) == len(found["schedule"])
    assert counts["runtime_fusion o_out + attention_residual"] == counts["runtime_fusion down_out + residual"] + 1 == 3
    assert found["notes"][0].startswith(f"TensorRT makes {len(found['schedule'])} launches a decode step: ")
    layers = [name for one in found["schedule"] for name in one["layers"]]
    positions = [layers.index(f"layers.{layer}.query") for layer in range(3)]
    assert positions == sorted(positions)
    assert [one["layer"] for one in found["plugin_nodes"] if one["op"] == "KvSelect"] == [2]


def test_damaged_and_missing_files(bare: Path, tmp_path: Path, capsys: Capture) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bare, copy)
    (copy / "graph.onnx").write_bytes(b"\0" * 10)
    assert "is damaged (its checksum differs from the manifest's). Build the engine again: trtkv build" in complaint(capsys, "inspect", copy)
    (copy / "graph.onnx").unlink()
    assert "is missing" in complaint(capsys, "inspect", copy)
    assert "is not an engine directory" in complaint(capsys, "inspect", tmp_path)

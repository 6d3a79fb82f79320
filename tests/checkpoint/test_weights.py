from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trtkv.checkpoint.weights import Checkpoint
from trtkv.errors import CheckpointError

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(7).to(torch.bfloat16),
    "c": torch.linspace(-2, 2, 6, dtype=torch.float16).reshape(2, 3),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "ids": torch.tensor([1, -2], dtype=torch.int64),
}


def write_sharded(path: Path) -> dict[str, str]:
    placed = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(TENSORS)}
    for shard in set(placed.values()):
        save_file({name: TENSORS[name] for name, where in placed.items() if where == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return placed


def write_raw(file: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_read_as_written(tmp_path: Path, sharded: bool) -> None:
    if sharded:
        write_sharded(tmp_path)
    else:
        save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names() == sorted(TENSORS)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in TENSORS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_a_single_file_of_any_name_will_do(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "weights.safetensors")
    assert Checkpoint(tmp_path).names() == ["a"]


@pytest.mark.parametrize("pad", range(5))
def test_a_data_start_that_is_not_aligned(tmp_path: Path, pad: int) -> None:
    data = torch.arange(5, dtype=torch.float32)
    text = json.dumps({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    write_raw(tmp_path / "model.safetensors", text + b" " * pad, data.numpy().tobytes())
    tensor = Checkpoint(tmp_path).tensor("x")
    assert torch.equal(tensor, data)
    assert tensor.data_ptr() % 4 == 0


def test_tensors_are_views_that_outlive_the_checkpoint(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    first, second = checkpoint.tensor("a"), checkpoint.tensor("a")
    assert first.data_ptr() == second.data_ptr()
    del checkpoint
    assert torch.equal(first, TENSORS["a"])


def test_large_weights_take_no_memory_until_they_are_used(tmp_path: Path) -> None:
    size = 3 << 30
    text = json.dumps({"big": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    text += b" " * (-len(text) % 4)
    file = tmp_path / "model.safetensors"
    write_raw(file, text)
    with file.open("r+b") as stream:
        stream.truncate(8 + len(text) + size)  # sparse: occupies no disk either
    code = (
        "import sys, resource, pathlib\n"
        "from trtkv.checkpoint.weights import Checkpoint\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "tensor = Checkpoint(pathlib.Path(sys.argv[1])).tensor('big')\n"
        "assert tensor[-1].item() == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100_000, "kilobytes"


def test_check_accepts_what_fits(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    Checkpoint(tmp_path).check({name: tuple(TENSORS[name].shape) for name in ("a", "b", "c")})


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"a": (3, 4), "gone": (2,)}, r"lacks the tensor 'gone' \[2\]"),
        ({"a": (4, 3)}, r"'a' has the shape \[3, 4\], expected \[4, 3\]"),
        ({"ids": (2,)}, "'ids' is int64"),
    ],
)
def test_check_names_the_first_that_does_not_fit(tmp_path: Path, expected: dict[str, tuple[int, ...]], message: str) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    fails(lambda: Checkpoint(tmp_path).check(expected), message)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    fails(lambda: Checkpoint(tmp_path), "holds no safetensors")
    fails(lambda: Checkpoint(tmp_path / "gone"), "does not exist")
    (tmp_path / "pytorch_model.bin").touch()
    fails(lambda: Checkpoint(tmp_path), "save_pretrained")


def test_several_files_need_an_index(tmp_path: Path) -> None:
    for name in "xy":
        save_file({name: TENSORS["a"]}, tmp_path / f"{name}.safetensors")
    fails(lambda: Checkpoint(tmp_path), "2 safetensors files but no model.safetensors.index.json")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    fails(lambda: Checkpoint(tmp_path), "lacks 1 of 2 weight files: model-00002-of-00002.safetensors")


@pytest.mark.parametrize("keep", [-1, 40, 5, 0])
def test_a_truncated_shard_says_how_much_there_is(tmp_path: Path, keep: int) -> None:
    write_sharded(tmp_path)
    file = tmp_path / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    size = len(data[:keep])
    fails(lambda: Checkpoint(tmp_path), f"model-00001-of-00002.safetensors is truncated or damaged: it has {size} bytes")


def test_a_tensor_that_the_index_misplaces(tmp_path: Path) -> None:
    placed = write_sharded(tmp_path)
    placed["nowhere"] = placed["a"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    fails(lambda: Checkpoint(tmp_path), "lacks the tensor 'nowhere'")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{}"])
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    fails(lambda: Checkpoint(tmp_path), "index.json is damaged")


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        [1, 2],
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"x": 3},
    ],
)
def test_a_damaged_header(tmp_path: Path, header: object) -> None:
    write_raw(tmp_path / "model.safetensors", header, b"\0" * 64)
    fails(lambda: Checkpoint(tmp_path), "truncated or damaged: it has .* and invalid")


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\0")
    fails(lambda: Checkpoint(tmp_path), "'x' has the unknown dtype F4")


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    fails(lambda: Checkpoint(tmp_path).tensor("z"), "no tensor 'z'")


def fails(call: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)

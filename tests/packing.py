"""Quantizes a tiny model in every format that is read, with packings written out as the formats' own sources define them, bit by bit.

The model beside it has the same weights dequantized, as transformers runs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import TinyModel, make_tiny
from trtkv.config import ModelConfig

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
GROUP, ALL = 32, 1 << 20
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E4M3 = torch.float8_e4m3fn
Packed = tuple[dict[str, Tensor], Tensor]  # the tensors of a module by the ends of their names, and the weights that they mean, fp64
Pack = Callable[[Tensor, torch.dtype], Packed]


def words(codes: Tensor) -> Tensor:
    """Pack codes [R, C] of four bits, eight along a row to a word, the first in the lowest bits."""
    values = codes.numpy().astype(np.uint32)
    out = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for place in range(8):
        out |= values[:, place::8] << np.uint32(4 * place)
    return torch.from_numpy(out.view(np.int32))


def int4(weight: Tensor, scale_dtype: torch.dtype, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize [N, K] to codes of 0 to 15: codes, scales and zero points [N, K / group], and what they mean in fp64."""
    parts = weight.double().unflatten(1, (-1, group))
    if symmetric:
        zero = torch.full(parts.shape[:2], 8)
        scale = (parts.abs().amax(-1) / 7).to(scale_dtype)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).to(scale_dtype)
        zero = (-low / scale.double()).round().clamp(1, 15).long()  # version 1 of GPTQ has no zero point of 0
    codes = (parts / scale.double()[..., None]).round().add(zero[..., None]).clamp(0, 15).long()
    meant = (codes - zero[..., None]).double() * scale.double()[..., None]
    return codes.flatten(1), scale, zero, meant.flatten(1)


def fp8(weight: Tensor, rows: int, columns: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize [N, K] to e4m3 with a scale for each block: codes, scales [ceil(N / rows), ceil(K / columns)], and what they mean in fp64."""
    out, width = weight.shape
    high, wide = -(-out // rows), -(-width // columns)
    padded = torch.zeros(high * rows, wide * columns, dtype=torch.float64)
    padded[:out, :width] = weight.double()
    blocks = padded.view(high, rows, wide, columns)
    scale = (blocks.abs().amax((1, 3)) / 448).to(scale_dtype)
    codes = (blocks / scale.double()[:, None, :, None]).float().to(E4M3)
    meant = (codes.double() * scale.double()[:, None, :, None]).reshape(high * rows, -1)[:out, :width]
    return codes.view(high * rows, -1)[:out, :width].contiguous(), scale, meant


def pack_quantized(weight: Tensor, dtype: torch.dtype, *, symmetric: bool = True, group: int = GROUP) -> Packed:
    codes, scale, zero, meant = int4(weight, dtype, group, symmetric=symmetric)
    tensors = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words(zero.t().contiguous()).t().contiguous()
    return tensors, meant


def float_quantized(weight: Tensor, dtype: torch.dtype, *, rows: int = 1, columns: int = ALL) -> Packed:
    whole = rows == columns == ALL
    codes, scale, meant = fp8(weight, *(min(pair) for pair in zip(weight.shape, (rows, columns), strict=True)), dtype)
    return {"weight": codes, "weight_scale": scale.reshape(1) if whole else scale}, meant


def awq(weight: Tensor, dtype: torch.dtype) -> Packed:
    codes, scale, zero, meant = int4(weight, torch.float16, GROUP, symmetric=False)

    def pack(values: Tensor) -> Tensor:  # [R, N] along N, the outputs of a word in AWQ's order
        ordered = values.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)
        return words(ordered)

    return {"qweight": pack(codes.t()), "qzeros": pack(zero.t()), "scales": scale.t().contiguous()}, meant


def gptq(weight: Tensor, dtype: torch.dtype, *, symmetric: bool = True, less: int = 1) -> Packed:
    codes, scale, zero, meant = int4(weight, torch.float16, GROUP, symmetric=symmetric)
    tensors = {"qweight": words(codes).t().contiguous(), "qzeros": words(zero.t() - less), "scales": scale.t().contiguous()}
    return tensors | {"g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP}, meant


def modelopt_int4(weight: Tensor, dtype: torch.dtype) -> Packed:
    codes, scale, _, meant = int4(weight, dtype, GROUP, symmetric=True)
    signed = (codes - 8).to(torch.int8).numpy().view(np.uint8) & 15
    return {"weight": torch.from_numpy(signed[0::2] | signed[1::2] << 4), "weight_scale": scale}, meant


def modelopt_fp8(weight: Tensor, dtype: torch.dtype) -> Packed:
    tensors, meant = float_quantized(weight, torch.float32, rows=ALL)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale"][0], "input_scale": torch.tensor(0.1)}, meant


def of_compressed_tensors(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
BLOCK: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "int4": (of_compressed_tensors("pack-quantized", **INT4), pack_quantized),
    "int4-zeros": (of_compressed_tensors("pack-quantized", **INT4, symmetric=False), lambda *one: pack_quantized(*one, symmetric=False)),
    "int4-rows": (
        of_compressed_tensors("pack-quantized", **{**INT4, "strategy": "channel", "group_size": None}),
        lambda weight, dtype: pack_quantized(weight, dtype, group=weight.shape[1]),
    ),
    "fp8-rows": (of_compressed_tensors("float-quantized", **FP8, strategy="channel"), float_quantized),
    "fp8-tensor": (of_compressed_tensors("float-quantized", **FP8, strategy="tensor"), lambda *one: float_quantized(*one, rows=ALL)),
    "fp8-block": (
        of_compressed_tensors("float-quantized", **FP8, strategy="block", block_structure=[128, 128]),
        lambda *one: float_quantized(*one, rows=128, columns=128),
    ),
    "block": (BLOCK, lambda weight, dtype: _block(weight)),
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq-zeros": ({**GPTQ, "sym": False}, lambda *one: gptq(*one, symmetric=False)),
    "gptq-v2": ({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, lambda *one: gptq(*one, symmetric=False, less=0)),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, modelopt_fp8),
    "modelopt-int4": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP, "exclude_modules": ["lm_head"]}, modelopt_int4),
}


def _block(weight: Tensor) -> Packed:
    codes, scale, meant = fp8(weight, 128, 128, torch.float32)
    return {"weight": codes, "weight_scale_inv": scale}, meant


def make_packed(name: str, path: Path, *, kind: str = "llama", dtype: torch.dtype = torch.float32, beside: bool = False, **changes: Any) -> TinyModel:
    """Make a random model and save it in a format; transformers' model beside it has the weights that are meant, rounded to the dtype.

    beside writes the configuration as ModelOpt's hf_quant_config.json.
    """
    config, pack = FORMATS[name]
    tiny = make_tiny(kind, path, dtype=dtype, **{**SHAPE, **changes})
    tensors: dict[str, Tensor] = {}
    meant = {}
    for key, value in load_file(path / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if "_proj.weight" not in key:
            tensors[key] = value
            continue
        packed, meant[key] = pack(value.float(), dtype)
        tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
    save_file(tensors, path / "model.safetensors")
    tiny.model.load_state_dict({**tiny.model.state_dict(), **{key: value.to(dtype) for key, value in meant.items()}})
    raw = json.loads((path / "config.json").read_text())
    if beside:
        (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": config}))
    else:
        raw["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(raw))
    return TinyModel(path, tiny.model, ModelConfig.from_dir(path))


def spoil(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")

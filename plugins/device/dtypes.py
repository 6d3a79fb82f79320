"""The dtypes that plans name, in torch, and in Triton's words."""

import torch

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

TRITON_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def triton_dtype(name: str) -> str:
    """Return Triton's word for a dtype of a plan."""
    return TRITON_DTYPES[TORCH_DTYPES[name]]

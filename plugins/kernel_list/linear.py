"""The products of a decoder that run as kernels for few tokens."""

from __future__ import annotations

from collections.abc import Iterator

from plugins.device.dtypes import TORCH_DTYPES
from plugins.device.spec import Spec
from plugins.linear import launch
from trtkv.config import Limits, ModelConfig

Shape = tuple[int, int, bool, bool]  # width, inner size, gated, with the norm before it


def products(model: ModelConfig) -> dict[str, Shape]:
    """Return the products of a layer in their order, and the head, as the executor fuses them with their neighbours."""
    hidden, q_size = model.hidden_size, model.num_q_heads * model.head_dim
    return {
        "qkv": (model.qkv_size, hidden, False, True), "o": (hidden, q_size, False, False), "gate_up": (model.intermediate_size, hidden, True, True),
        "down": (hidden, model.intermediate_size, False, False), "head": (model.vocab_size, hidden, False, True),
    }  # fmt: skip


def kernels(model: ModelConfig, limits: Limits, arch: str) -> Iterator[Spec]:
    """Yield the kernels of every product and of the norm for a compute capability; parts of a model load their own when they are opened."""
    for width, inner, gated, normed in products(model).values():
        yield from launch.kernels(width, inner, TORCH_DTYPES[model.dtype], limits.max_batch_size, arch, gated=gated, normed=normed)

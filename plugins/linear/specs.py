"""The products of few tokens that an engine's steps run."""

from __future__ import annotations

from trtkv.config import Limits, ModelConfig
from trtkv.plugins.dtypes import TORCH_DTYPES
from trtkv.plugins.linear import launch

PARTS = (1, 2, 4, 8)  # processes that may share a model's matrices


def request(model: ModelConfig, limits: Limits, arch: str) -> None:
    """Load the kernels of every matrix of a decoder layer and of the head, whole or shared by parts; raises as `store.load` does."""
    hidden, attended, inner = model.hidden_size, model.num_q_heads * model.head_dim, model.intermediate_size
    dtype, tokens = TORCH_DTYPES[model.dtype], limits.max_batch_size
    for parts in PARTS:
        for width in (model.qkv_size // parts, model.vocab_size // parts):
            launch.request(width, hidden, dtype, tokens, arch, normed=True)
        launch.request(inner // parts, hidden, dtype, tokens, arch, gated=True, normed=True)
        for source in (attended // parts, inner // parts):
            launch.request(hidden, source, dtype, tokens, arch)

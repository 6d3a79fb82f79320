"""A prompt's chunk against everything stored, by the library's fastest kernels: FlashAttention, and cuDNN for the long context before it.

FlashAttention knows a causal mask that ends at the lower right, cuDNN is twice as fast but prepares every new shape for tens of milliseconds.
So whole blocks of BLOCK_TOKENS, all before the chunk, go to cuDNN, one shape for all of them, and the rest with the chunk itself to
FlashAttention; the parts are merged by their log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 16384
LEAST_QUERIES = 1024  # and a multiple of it: odd chunks, mostly a prompt's last, are not worth a preparation


def attend_chunk(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend query [n, Hq, D], the newest n tokens, to keys and values [Hk, S, D] of bf16 or fp16: [n, Hq, D]."""
    return attend_with_lse(query, keys, values, scale)[0]


def attend_with_lse(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Do so and return the log-sum-exp [Hq, n] fp32 as well."""
    own, k, v = query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
    blocks = (k.shape[2] - len(query)) // BLOCK_TOKENS if _takes_cudnn(query) else 0
    first = blocks * BLOCK_TOKENS
    out, lse = _flash(own, k[:, :, first:], v[:, :, first:], scale)
    for block in range(blocks):
        span = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        out, lse = _merge(out, lse, *_cudnn(own, k[:, :, span], v[:, :, span], scale))
    return out[0].transpose(0, 1), lse[0]


def _takes_cudnn(query: Tensor) -> bool:
    suits = query.shape[0] % LEAST_QUERIES == 0 and query.shape[2] <= 128
    return suits and torch.cuda.get_device_capability(query.device) >= (9, 0) and torch.backends.cudnn.is_available()


def _flash(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, True, False, scale=scale)
    return out, lse


def _cudnn(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(query, keys, values, None, True, 0.0, False, False, scale=scale)
    return out, lse.view(out.shape[:3])


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts [1, Hq, n, D] of a softmax with their log-sum-exp [1, Hq, n] fp32."""
    share = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    merged = torch.lerp(other.float(), out.float(), share).to(out.dtype)
    return merged, torch.logaddexp(lse, other_lse)

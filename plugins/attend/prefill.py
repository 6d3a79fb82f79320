"""A prompt's chunk against everything stored, by the library's fastest kernels: FlashAttention, and cuDNN where the work is large.

FlashAttention knows a causal mask that ends at the lower right. cuDNN is twice as fast, but knows that mask of squares alone, and prepares every new
shape for tens of milliseconds. So large chunks go to cuDNN as squares against themselves, and of what comes before a chunk whole blocks of
BLOCK_TOKENS, one shape for all of them. FlashAttention takes the rest; the parts are merged by their log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 16384
LEAST_QUERIES = 1024  # and a multiple of it: odd chunks, mostly a prompt's last, are not worth a preparation
LEAST_SQUARE = 4096  # tokens of a chunk that goes to cuDNN against itself


def attend_chunk(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend query [n, Hq, D], the newest n tokens, to keys and values [Hk, S, D] of bf16 or fp16: [n, Hq, D]."""
    return attend_with_lse(query, keys, values, scale)[0]


def attend_with_lse(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Do so and return the log-sum-exp [Hq, n] fp32 as well."""
    own, k, v = query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
    before, cudnn = k.shape[2] - len(query), _takes_cudnn(query)
    blocks = before // BLOCK_TOKENS if cudnn else 0
    first = blocks * BLOCK_TOKENS
    if cudnn and len(query) >= LEAST_SQUARE:
        out, lse = _cudnn(own, k[:, :, before:], v[:, :, before:], scale, causal=True)
        if before > first:
            out, lse = _merge(out, lse, *_flash(own, k[:, :, first:before], v[:, :, first:before], scale, causal=False))
    else:
        out, lse = _flash(own, k[:, :, first:], v[:, :, first:], scale)
    for block in range(blocks):
        span = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        out, lse = _merge(out, lse, *_cudnn(own, k[:, :, span], v[:, :, span], scale))
    return out[0].transpose(0, 1), lse[0]


def _takes_cudnn(query: Tensor) -> bool:
    suits = query.shape[0] % LEAST_QUERIES == 0 and query.shape[2] <= 128
    return suits and torch.cuda.get_device_capability(query.device) >= (9, 0) and torch.backends.cudnn.is_available()


def _flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = True) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, causal, False, scale=scale)
    return out, lse


def _cudnn(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(query, keys, values, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(out.shape[:3])


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts [1, Hq, n, D] of a softmax with their log-sum-exp [1, Hq, n] fp32."""
    share = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    merged = torch.lerp(other.float(), out.float(), share).to(out.dtype)
    return merged, torch.logaddexp(lse, other_lse)

"""How FIER's one-bit keys lie in memory: in the order in which the matrix instructions of fier.cu read them.

A group of 32 tokens is D words of 32 bits. Word lane D / 32 + w, lane = 4 r + c, holds four tokens from 4 r and eight channels from 8 (4 w + c):
token 4 r + 2 h + s and channel 8 (4 w + c) + e at bit 2 e + s + 16 h. Lows and ranges are fp16 in the order of the channels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

GROUP = 32
MAX_RANGE = 16000.0  # the scorer multiplies a range by at most four times the normalized query in fp16


def pack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize groups of keys [..., 32, D] to words int32 [..., D] and lows and ranges fp16 [..., 2, D]; D is a multiple of 32.

    A bit is set where the key is at or above the middle of its group's extremes, compared in fp32.
    """
    low, high = keys.float().amin(-2), keys.float().amax(-2)
    raised = keys.float() >= ((low + high) / 2).unsqueeze(-2)
    token, channel = _positions(keys.shape[-1], keys.device)
    chosen = raised.flatten(-2)[..., token * keys.shape[-1] + channel].long()
    words = (chosen << torch.arange(32, device=keys.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int(), torch.stack([low, (high - low).clamp(max=MAX_RANGE)], -2).half()


def unpack(words: Tensor, meta: Tensor) -> Tensor:
    """Return the keys fp32 [..., 32, D] that words int32 [..., D] and lows and ranges [..., 2, D] represent."""
    token, channel = _positions(words.shape[-1], words.device)
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device)) & 1
    raised = torch.empty(*words.shape[:-1], GROUP * words.shape[-1], dtype=torch.float32, device=words.device)
    raised[..., (token * words.shape[-1] + channel).flatten()] = bits.float().flatten(-2)
    low, span = meta.float().unsqueeze(-3).unbind(-2)
    keys: Tensor = low + raised.unflatten(-1, (GROUP, -1)) * span
    return keys


@lru_cache(maxsize=8)
def _positions(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token and channel [D, 32] of every bit of every word."""
    word, bit = torch.arange(dim, device=device)[:, None], torch.arange(32, device=device)
    lane, w = word // (dim // 32), word % (dim // 32)
    token = lane // 4 * 4 + bit // 16 * 2 + bit % 2
    channel = (4 * w + lane % 4) * 8 + bit % 16 // 2
    return token, channel

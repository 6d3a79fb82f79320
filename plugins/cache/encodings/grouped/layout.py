"""How codes and metadata of encoded tokens lie in their pages: in the order of a warp's matrix instruction.

A tile is 16 tokens. Lane 4 g + t of a warp holds, of keys, tokens g and g + 8 and channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of every 16; of values,
tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9 and channels g and g + 8 of every 16. Its words carry neighbours (channels of a key, tokens of a value)
in their two halves, so that one mask yields a pair. Nothing is padded: a page has as many bytes as the role's order has.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

TILE = 16


def word_place(word: Tensor, lane: Tensor, dim: int, bits: int) -> Tensor:
    """Return where a lane's words of a tile lie: runs of up to four words a lane, which one load takes."""
    words = dim * bits // 64
    run = 4 if words % 4 == 0 else 2 if words % 2 == 0 else 1
    return (word // run * 32 + lane) * run + word % run


@lru_cache(maxsize=64)
def key_places(dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return word and shift [16, D] int64 of every key code of a tile."""
    token, channel = torch.arange(TILE)[:, None], torch.arange(dim)[None]
    lane = token % 8 * 4 + channel % 8 // 2
    code = channel // 16 * 4 + channel % 16 // 8 * 2 + token // 8
    return _places(code, lane, channel % 2, dim, bits)


@lru_cache(maxsize=64)
def value_places(dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return word and shift [16, D] int64 of every value code of a tile."""
    token, channel = torch.arange(TILE)[:, None], torch.arange(dim)[None]
    lane = channel % 8 * 4 + token % 8 // 2
    code = (token // 8 * (dim // 16) + channel // 16) * 2 + channel % 16 // 8
    return _places(code, lane, token % 2, dim, bits)


def _places(code: Tensor, lane: Tensor, half: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    each = 16 // bits
    return word_place(code // each, lane, dim, bits), (code % each * bits + 16 * half).expand(TILE, dim)


@lru_cache(maxsize=64)
def key_meta_places(dim: int) -> Tensor:
    """Return where each channel's scale lies among those of a group of keys: [D] int64. Minima lie in order."""
    channel = torch.arange(dim)
    block = channel // 16
    return (block // 2 * 4 + channel % 8 // 2) * 8 + block % 2 * 4 + channel % 16 // 8 * 2 + channel % 2


@lru_cache(maxsize=64)
def value_meta_places(share: int) -> Tensor:
    """Return where each token's scale of each channel group lies among those of a tile: [16, share] int64."""
    token, group = torch.arange(TILE)[:, None], torch.arange(share)[None]
    return (group * 4 + token % 8 // 2) * 4 + token // 8 * 2 + token % 2


def pack(codes: Tensor, places: tuple[Tensor, Tensor], bits: int) -> Tensor:
    """Pack codes uint8 [..., S, D], S a multiple of 16: bytes uint8 [..., S D bits / 8]."""
    word, shift = (x.to(codes.device) for x in places)
    tiles = codes.unflatten(-2, (-1, TILE)).long() << shift
    words = tiles.new_zeros(*tiles.shape[:-2], TILE * tiles.shape[-1] * bits // 32)
    words.scatter_add_(-1, word.flatten().expand(*tiles.shape[:-2], -1), tiles.flatten(-2))
    packed: Tensor = words.to(torch.uint32).view(torch.uint8).flatten(-2)
    return packed


def unpack(packed: Tensor, places: tuple[Tensor, Tensor], bits: int) -> Tensor:
    """Take codes uint8 [..., S, D] out of bytes uint8 [..., S D bits / 8]."""
    word, shift = (x.to(packed.device) for x in places)
    words = packed.unflatten(-1, (-1, TILE * word.shape[1] * bits // 8)).contiguous().view(torch.int32)
    codes: Tensor = ((words[..., word].long() >> shift) & ((1 << bits) - 1)).to(torch.uint8).flatten(-3, -2)
    return codes


def key_scale(laid: Tensor) -> Tensor:
    """Take the scales [..., D] of groups of keys up again; their minima lie in order."""
    return laid[..., key_meta_places(laid.shape[-1]).to(laid.device)]


def value_scale(laid: Tensor, share: int) -> Tensor:
    """Take the scales [..., S, share] of values up again, as [..., S share]."""
    tiles = laid.unflatten(-1, (-1, TILE * share))
    scale: Tensor = tiles[..., value_meta_places(share).to(laid.device)].flatten(-3, -2)
    return scale


def value_minimum(laid: Tensor, share: int) -> Tensor:
    """Take the minima [..., S, share] of values up again, as [..., S share]: a tile's group after group."""
    minimum: Tensor = laid.unflatten(-1, (-1, share, TILE)).transpose(-1, -2).flatten(-3, -2)
    return minimum

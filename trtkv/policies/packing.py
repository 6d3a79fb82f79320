"""Rounding to few bits, and codes packed into bytes (the first code in the lowest bits)."""

from __future__ import annotations

from trtkv.lazy import Tensor, torch


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [..., n] to bytes uint8 [..., n bits / 8]."""
    slots = torch.unflatten(codes, -1, (-1, 8 // bits)).int()
    shifts = torch.arange(0, 8, bits, device=codes.device)
    return (slots << shifts).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes uint8 [..., n] to codes uint8 [..., n 8 / bits]."""
    shifts = torch.arange(0, 8, bits, device=packed.device)
    return ((packed.int().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2).to(torch.uint8)


def encode_minimum(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round x [..., g] between its minimum and maximum over the last axis: codes uint8 [..., g], scale and minimum [...] in the dtype of x.

    Half a step rounds to even; where all numbers are equal the scale and the codes are zero. The codes follow the scale as it is stored.
    """
    low, high = x.amin(-1).float(), x.amax(-1).float()
    steps = (1 << bits) - 1
    scale = ((high - low) / steps).clamp(max=torch.finfo(x.dtype).max).to(x.dtype)
    step = scale.float().unsqueeze(-1)
    offset = x.float() - low.unsqueeze(-1)
    codes = torch.where(step > 0, offset / step.where(step > 0, torch.ones_like(step)), torch.zeros_like(offset))
    return codes.round().clamp(0, steps).to(torch.uint8), scale, low.to(x.dtype)


def decode_minimum(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return what `encode_minimum` represents: [..., g] fp32."""
    return codes.float() * scale.float().unsqueeze(-1) + minimum.float().unsqueeze(-1)


def encode_integer_zero(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round x [..., g] with an integer zero point: codes uint8 [..., g], scale and zero [...] in the dtype of x.

    The range is widened to hold zero, without which an integer zero point in range cannot represent it.
    """
    low, high = x.amin(-1).float().clamp(max=0), x.amax(-1).float().clamp(min=0)
    steps = (1 << bits) - 1
    scale = ((high - low).clamp(min=1e-5) / steps).clamp(max=torch.finfo(x.dtype).max).to(x.dtype)
    scale = scale.where(scale > 0, torch.full_like(scale, torch.finfo(x.dtype).tiny))
    zero = (-low / scale.float()).round().clamp(0, steps)
    codes = (x.float() / scale.float().unsqueeze(-1)).round() + zero.unsqueeze(-1)
    return codes.clamp(0, steps).to(torch.uint8), scale, zero.to(x.dtype)


def decode_integer_zero(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return what `encode_integer_zero` represents: [..., g] fp32."""
    return (codes.float() - zero.float().unsqueeze(-1)) * scale.float().unsqueeze(-1)

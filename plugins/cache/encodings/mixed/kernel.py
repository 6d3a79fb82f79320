"""Eviction from two kinds of pages in Triton: what stays is gathered, encoded or decoded where it changes its kind, and then written anew.

Two launches for keys, which carry the positions, and two for values serve all layers of a sequence; nothing is written before everything is read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decode(code):
    """Return the numbers that e4m3 bytes stand for, fp32."""
    bits = code.to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.001953125)
    return tl.where(bits > 127, -size, size)


@triton.jit
def _encode(x):
    """Round fp32 up to 448 to e4m3 bytes, half to even, on GPUs that have no such instruction too."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(size < 0.015625, small, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit
def gather_kernel(
    rows,
    codes,
    scales,
    positions,
    chosen,
    counts,
    table,
    out,
    out_codes,
    out_scales,
    out_positions,
    count,
    page_size,
    table_stride,
    first,
    num_layers,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Read the tokens chosen[l, h] as they are to be stored; grid [blocks of count, HEADS, layers].

    rows [P, HEADS, N, D], codes [P, HEADS, WIDE N, D] the same bytes, WIDE of them an element; scales and positions [P, HEADS, WIDE N]; chosen
    [n, HEADS, count] int32, encoded tokens first as they lie; counts [n, 4] int32: encoded tokens, those to be in full precision, placed, shift;
    table [2 num_layers, table_stride] int32, of layers first, first + 1, ... and behind them of their codes. out [n, HEADS, count, D], or as bytes
    [n, HEADS, count, WIDE D] of which encoded tokens take the first D; out_scales and out_positions [n, HEADS, count].
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, layer = tl.program_id(1), tl.program_id(2)
    inside = index < count
    coded, full = tl.load(counts + layer * 4), tl.load(counts + layer * 4 + 1)
    at = (layer * HEADS + head).to(tl.int64) * count + index
    lies = tl.load(chosen + at, inside, 0)
    was = inside & (lies < coded)
    is_row = inside & (lies >= coded)
    wide = WIDE * page_size
    row, code = tl.where(is_row, lies - coded, 0), tl.where(was, lies, 0)
    own, codes_own = table + (first + layer).to(tl.int64) * table_stride, table + (num_layers + first + layer).to(tl.int64) * table_stride
    page = tl.load(own + row // page_size, is_row, 0).to(tl.int64)
    code_page = tl.load(codes_own + code // wide, was, 0).to(tl.int64)
    row_at = (page * HEADS + head) * page_size + row % page_size
    code_at = (code_page * HEADS + head) * wide + code % wide
    d = tl.arange(0, BLOCK_D)
    within = (d < D)[None, :]
    x = tl.load(rows + row_at[:, None] * D + d[None, :], is_row[:, None] & within, 0.0)
    dtype = x.dtype
    byte = tl.load(codes + code_at[:, None] * D + d[None, :], was[:, None] & within, 0)
    scale = tl.load(scales + code_at, was, 1.0)
    numbers = tl.where(was[:, None], _decode(byte) * scale.to(tl.float32)[:, None], x.to(tl.float32)).to(dtype)
    tl.store(out + at[:, None] * D + d[None, :], numbers, (inside & (index < full))[:, None] & within)
    encodes = inside & (index >= full)
    made = tl.math.div_rn(tl.max(tl.abs(x.to(tl.float32)), 1), tl.full([BLOCK], 448.0, tl.float32)).to(dtype)
    made = tl.where(made > 0, made, 1.0).to(dtype)
    scaled = tl.math.div_rn(x.to(tl.float32), tl.zeros([BLOCK, BLOCK_D], tl.float32) + made.to(tl.float32)[:, None])
    fresh = _encode(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    final = tl.where(was[:, None], byte.to(tl.int32), fresh).to(tl.uint8)
    tl.store(out_codes + at[:, None] * (D * WIDE) + d[None, :], final, encodes[:, None] & within)
    tl.store(out_scales + at, tl.where(was, scale, made), encodes)
    if POSITIONS:
        placed, shift = tl.load(counts + layer * 4 + 2), tl.load(counts + layer * 4 + 3)
        written = is_row & (row < placed)
        there = tl.load(own + row // wide, written, 0).to(tl.int64)
        known = tl.load(positions + (there * HEADS + head) * wide + row % wide, written, 0)
        old = tl.load(positions + code_at, was, 0)
        tl.store(out_positions + at, tl.where(was, old, tl.where(written, known, row + shift)), inside)


@triton.jit
def scatter_kernel(
    rows,
    codes,
    scales,
    positions,
    counts,
    table,
    out,
    out_codes,
    out_scales,
    out_positions,
    count,
    page_size,
    table_stride,
    first,
    num_layers,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Write what `gather_kernel` read to the front of the pages of each kind; arguments and grid as there."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, layer = tl.program_id(1), tl.program_id(2)
    full = tl.load(counts + layer * 4 + 1)
    is_row, is_code = (index < count) & (index < full), (index < count) & (index >= full)
    at = (layer * HEADS + head).to(tl.int64) * count + index
    wide = WIDE * page_size
    row, code = tl.where(is_row, index, 0), tl.where(is_code, index - full, 0)
    own, codes_own = table + (first + layer).to(tl.int64) * table_stride, table + (num_layers + first + layer).to(tl.int64) * table_stride
    page = tl.load(own + row // page_size, is_row, 0).to(tl.int64)
    code_page = tl.load(codes_own + code // wide, is_code, 0).to(tl.int64)
    row_at = (page * HEADS + head) * page_size + row % page_size
    code_at = (code_page * HEADS + head) * wide + code % wide
    d = tl.arange(0, BLOCK_D)
    within = (d < D)[None, :]
    x = tl.load(out + at[:, None] * D + d[None, :], is_row[:, None] & within, 0.0)
    tl.store(rows + row_at[:, None] * D + d[None, :], x, is_row[:, None] & within)
    byte = tl.load(out_codes + at[:, None] * (D * WIDE) + d[None, :], is_code[:, None] & within, 0)
    tl.store(codes + code_at[:, None] * D + d[None, :], byte, is_code[:, None] & within)
    tl.store(scales + code_at, tl.load(out_scales + at, is_code, 0.0), is_code)
    if POSITIONS:
        known = tl.load(out_positions + at, index < count, 0)
        there = tl.load(own + row // wide, is_row, 0).to(tl.int64)
        tl.store(positions + (there * HEADS + head) * wide + row % wide, known, is_row)
        tl.store(positions + code_at, known, is_code)

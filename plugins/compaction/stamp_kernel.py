"""Which pages a decode step's query needs, in Triton: bounds of what it can score against their keys, and a stamp for the tokens of needed ones."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounds_kernel(
    keys,
    queries,
    scores,
    table,
    lens,
    seen,
    slots,
    table_stride,
    num_pages,
    page_size,
    query_rows,
    width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the highest product that each sequence's newest query can have with a unit's keys by their extremes; grid [blocks HEADS, L, B].

    keys [L, P, HEADS, N, D]; queries [L, query_rows, HEADS GROUP, D], rows by sequence, or with a WINDOW rows (slot, place); table [B, M], lens [B]
    stored tokens, seen [B] all there were, slots [B] int32. scores [L, B, HEADS GROUP, width] fp32; BLOCK tokens are whole units of UNIT.
    """
    head, layer, b = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64), tl.program_id(2)
    block = tl.program_id(0) // HEADS
    stored = tl.load(lens + b)
    if block * BLOCK < stored:
        own, d = table + b.to(tl.int64) * table_stride, tl.arange(0, BLOCK_D)
        unit = block * (BLOCK // UNIT) + tl.arange(0, BLOCK // UNIT)
        some = unit * UNIT < stored
        low = tl.full([BLOCK // UNIT, BLOCK_D], float("inf"), tl.float32)
        high = tl.full([BLOCK // UNIT, BLOCK_D], float("-inf"), tl.float32)
        for one in tl.static_range(UNIT):
            token = unit * UNIT + one
            there = token < stored
            page = layer * num_pages + tl.load(own + token // page_size, there, 0)
            place = ((page * HEADS + head) * page_size + token % page_size) * D
            key = tl.load(keys + place[:, None] + d[None, :], there[:, None] & (d < D)[None, :], 0.0).to(tl.float32)
            low = tl.where(there[:, None], tl.minimum(low, key), low)
            high = tl.where(there[:, None], tl.maximum(high, key), high)
        low, high = tl.where(some[:, None], low, 0.0), tl.where(some[:, None], high, 0.0)
        row = layer * query_rows
        if WINDOW:
            row += tl.load(slots + b).to(tl.int64) * WINDOW + (tl.load(seen + b) - 1) % WINDOW
        else:
            row += b
        to = ((layer * tl.num_programs(2) + b) * (HEADS * GROUP) + head * GROUP) * width
        for g in tl.static_range(GROUP):
            query = tl.load(queries + (row * (HEADS * GROUP) + head * GROUP + g) * D + d, d < D, 0.0).to(tl.float32)[None, :]
            score = tl.sum(tl.where(query > 0, query * high, query * low), 1)
            tl.store(scores + to + g * width + unit, score, some)


@triton.jit
def stamp_kernel(
    scores,
    stamp,
    table,
    lens,
    seen,
    table_stride,
    num_pages,
    page_size,
    width,
    alpha,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Stamp the newest token with the time, and tokens of units whose softmax over scores, mean over a group, is above alpha; grid [HEADS, L, B].

    stamp [L, P, HEADS, N] fp32; UNITS is at least the units of any sequence, other arguments as of `bounds_kernel`.
    """
    head, layer, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    stored, now = tl.load(lens + b), tl.load(seen + b).to(tl.float32)
    unit = tl.arange(0, UNITS)
    there = unit * UNIT < stored
    asked = scores + ((layer * tl.num_programs(2) + b) * (HEADS * GROUP) + head * GROUP) * width
    weight = tl.zeros([UNITS], tl.float32)
    for g in tl.static_range(GROUP):
        score = tl.load(asked + g * width + unit, there, float("-inf"))
        part = tl.exp2((score - tl.max(score, 0)) * 1.4426950408889634)
        weight += tl.math.div_rn(part, tl.zeros_like(part) + tl.sum(part, 0))
    needed = there & (tl.math.div_rn(weight, tl.zeros_like(weight) + GROUP) > alpha)
    token = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    inside = token < stored
    page = layer * num_pages + tl.load(table + b.to(tl.int64) * table_stride + token // page_size, inside, 0)
    row = (page * HEADS + head) * page_size + token % page_size
    tl.store(stamp + row, tl.zeros([UNITS, UNIT], tl.float32) + now, inside & (needed[:, None] | (token == stored - 1)))

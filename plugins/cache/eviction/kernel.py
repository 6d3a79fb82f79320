"""Compaction in Triton: LagKV's scores and choice, the move of what stays, and the attention that a decode step's query pays.

All launches cover every layer of a page group: buffers are the group's stacks [L, P, H, N, ...], and a sequence's pages a row of numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def move_kernel(
    data,
    kept,
    table,
    num_pages,
    page_size,
    first,
    count,
    placed,
    shift,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Move tokens kept[l, h, j] to place first + j; grid [HEADS, L].

    data [L, P, HEADS, N, WORDS] int32 words; kept [L, HEADS / SHARE, count] int32, ascending, kept[j] >= first + j; table [M] int32. No source is a
    target of an earlier block, and a block is read before it is written, so one program a head needs no scratch. POSITIONS: words of tokens from
    `placed` on are their index plus shift.
    """
    head, layer = tl.program_id(0), tl.program_id(1)
    own = kept + (layer * (HEADS // SHARE) + head // SHARE).to(tl.int64) * count
    base = layer.to(tl.int64) * num_pages * HEADS
    w = tl.arange(0, BLOCK_W)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        source = tl.load(own + index, inside, 0)
        page = tl.load(table + source // page_size, inside, 0).to(tl.int64)
        place = ((base + page * HEADS + head) * page_size + source % page_size) * WORDS
        both = inside[:, None] & (w < WORDS)[None, :]
        words = tl.load(data + place[:, None] + w[None, :], both, 0)
        if POSITIONS:
            words = tl.where((source < placed)[:, None], words, (source + shift)[:, None])
        target = first + index
        page = tl.load(table + target // page_size, inside, 0).to(tl.int64)
        place = ((base + page * HEADS + head) * page_size + target % page_size) * WORDS
        tl.debug_barrier()
        tl.store(data + place[:, None] + w[None, :], words, both)


@triton.jit
def spread_kernel(
    keys,
    values,
    table,
    spread,
    num_pages,
    page_size,
    start,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LAG: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORE: tl.constexpr,
):
    """Write the standard deviation over channels of every token of a partition, normalized to the next one's range; grid [2 partitions, HEADS, L].

    keys, values [L, P, HEADS, N, D], table [M] int32, spread [L, HEADS, partitions, 2, LAG] fp32: keys, then values. SCORE 0 measures against the
    next partition (LagKV, eq. 2 to 6), 1 against the own one, 2 takes minus the norm of the keys.
    """
    program, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, lag = program % 2, program // 2
    base = layer.to(tl.int64) * num_pages * HEADS
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    low = tl.full([BLOCK_D], float("inf"), tl.float32)
    high = tl.full([BLOCK_D], float("-inf"), tl.float32)
    if SCORE < 2:
        reference = start + (lag + 1 - SCORE) * LAG
        for first in range(0, LAG, BLOCK):
            index = first + tl.arange(0, BLOCK)
            token = reference + index
            page = tl.load(table + token // page_size, index < LAG, 0).to(tl.int64)
            place = ((base + page * HEADS + head) * page_size + token % page_size) * D
            both = (index < LAG)[:, None] & inside[None, :]
            if part == 0:
                x = tl.load(keys + place[:, None] + d[None, :], both, 0.0).to(tl.float32)
            else:
                x = tl.load(values + place[:, None] + d[None, :], both, 0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(both, x, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(both, x, float("-inf")), 0))
    reach = tl.where(inside, high - low, 0.0)
    flat = reach <= 0
    low, reach = tl.where(flat, 0.0, low), tl.where(flat, 1.0, reach)
    out = spread + (((layer * HEADS + head).to(tl.int64) * (tl.num_programs(0) // 2) + lag) * 2 + part) * LAG
    for first in range(0, LAG, BLOCK):
        index = first + tl.arange(0, BLOCK)
        token = start + lag * LAG + index
        page = tl.load(table + token // page_size, index < LAG, 0).to(tl.int64)
        place = ((base + page * HEADS + head) * page_size + token % page_size) * D
        both = (index < LAG)[:, None] & inside[None, :]
        if part == 0:
            x = tl.load(keys + place[:, None] + d[None, :], both, 0.0).to(tl.float32)
        else:
            x = tl.load(values + place[:, None] + d[None, :], both, 0.0).to(tl.float32)
        if SCORE == 2:
            found = -tl.sqrt(tl.sum(x * x, 1))
        else:
            scaled = tl.where(flat[None, :], 0.0, (x - low[None, :]) / reach[None, :])
            mean = tl.sum(scaled, 1) / D
            off = tl.where(inside[None, :], scaled - mean[:, None], 0.0)
            found = tl.sqrt(tl.sum(off * off, 1) / (D - 1))
        tl.store(out + index, found, index < LAG)


@triton.jit
def choose_kernel(
    spread, kept, start, count, kept_stride, value_weight, HEADS: tl.constexpr, LAG: tl.constexpr, BLOCK_L: tl.constexpr, SOFTMAX: tl.constexpr
):
    """Keep the `count` best tokens of every partition, equal ones by lowest index, ascending; grid [partitions, HEADS, L].

    spread [L, HEADS, partitions, 2, LAG] fp32; a score is its softmax over the partition for keys plus value_weight times that for values
    (SOFTMAX), or the first of the two as it is; kept [L, HEADS, kept_stride] int32 takes tokens, partition by partition.
    """
    lag, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (layer * HEADS + head).to(tl.int64)
    index = tl.arange(0, BLOCK_L)
    inside = index < LAG
    at = spread + (row * tl.num_programs(0) + lag) * 2 * LAG + index
    score = tl.load(at, inside, 0.0)
    if SOFTMAX:
        other = tl.load(at + LAG, inside, 0.0)
        score = tl.where(inside, tl.exp(score - tl.max(tl.where(inside, score, float("-inf")), 0)), 0.0)
        other = tl.where(inside, tl.exp(other - tl.max(tl.where(inside, other, float("-inf")), 0)), 0.0)
        score = score / tl.sum(score, 0) + value_weight * (other / tl.sum(other, 0))
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, -1 - bits.to(tl.int64) - 2147483648, bits.to(tl.int64)) + 2147483648  # 0 to 2^32 - 1, as floats compare
    order = tl.where(inside, order, -1)
    cut = tl.zeros([1], tl.int64)
    for step in range(32):
        higher = cut + (tl.full([1], 2147483648, tl.int64) >> step)
        cut = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= count, higher, cut)
    above, level = order > cut, order == cut
    room = count - tl.sum(above.to(tl.int32), 0)
    taken = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(kept + row * kept_stride + lag * count + place, start + lag * LAG + index, taken & inside)


@triton.jit
def remember_kernel(query, seen, slots, ring, query_stride, WINDOW: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Keep a decode step's query [B, SIZE] at place (seen - 1) mod WINDOW of its slot in ring [Z, WINDOW, SIZE]; grid [blocks, B]."""
    b = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < SIZE
    place = tl.load(slots + b).to(tl.int64) * WINDOW + (tl.load(seen + b) - 1) % WINDOW
    tl.store(ring + place * SIZE + index, tl.load(query + b.to(tl.int64) * query_stride + index, inside, 0.0), inside)


@triton.jit
def received_kernel(
    keys,
    ring,
    mass,
    table,
    num_pages,
    num_slots,
    page_size,
    stored,
    slot,
    place,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the attention that a sequence's newest query pays to mass [L, P, HEADS GROUP, N] fp32, which begins anew for the newest token.

    keys [L, P, HEADS, N, D], ring [L, Z, WINDOW, HEADS GROUP, D], table [M] int32; grid [HEADS GROUP, L].
    """
    query_head, layer = tl.program_id(0), tl.program_id(1)
    head, heads_q = query_head // GROUP, HEADS * GROUP
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    at = ((layer.to(tl.int64) * num_slots + slot) * WINDOW + place) * heads_q + query_head
    query = tl.load(ring + at * D + d, inside, 0.0).to(tl.float32) * scale
    highest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, stored, BLOCK):
        token = start + tl.arange(0, BLOCK)
        page = layer.to(tl.int64) * num_pages + tl.load(table + token // page_size, token < stored, 0)
        row = ((page * HEADS + head) * page_size + token % page_size) * D
        k = tl.load(keys + row[:, None] + d[None, :], (token < stored)[:, None] & inside[None, :], 0.0).to(tl.float32)
        logit = tl.where(token < stored, tl.sum(k * query[None, :], 1), float("-inf"))
        peak = tl.maximum(highest, tl.max(logit, 0))
        total = total * tl.exp(highest - peak) + tl.sum(tl.exp(logit - peak), 0)
        highest = peak
    for start in range(0, stored, BLOCK):
        token = start + tl.arange(0, BLOCK)
        page = layer.to(tl.int64) * num_pages + tl.load(table + token // page_size, token < stored, 0)
        row = ((page * HEADS + head) * page_size + token % page_size) * D
        k = tl.load(keys + row[:, None] + d[None, :], (token < stored)[:, None] & inside[None, :], 0.0).to(tl.float32)
        share = tl.exp(tl.sum(k * query[None, :], 1) - highest) / total
        own = mass + (page * heads_q + query_head) * page_size + token % page_size
        tl.store(own, share + tl.load(own, token < stored - 1, 0.0), token < stored)

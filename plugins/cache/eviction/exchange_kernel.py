"""Evicting one token a step in Triton: what the newest query pays to every stored token, and the exchange of the least for the newest token.

Two launches serve all layers of a page group and all sequences of a step. Neither sorts and neither moves a token but the newest.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logits_kernel(
    keys,
    queries,
    logits,
    notes,
    table,
    lens,
    seen,
    slots,
    table_stride,
    num_pages,
    page_size,
    query_rows,
    width,
    scale2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply each sequence's newest query with a block of stored keys; grid [blocks HEADS, L, B].

    keys [L, P, HEADS, N, D]; queries [L, query_rows, HEADS GROUP, D], rows by sequence, or with a WINDOW rows (slot, place); table [B, M], lens [B]
    stored tokens, seen [B] all there were, slots [B] int32; scale2 is attention's scale for base 2. logits [L, B, HEADS GROUP, width] fp32, width a
    multiple of BLOCK; notes [L, B, width / BLOCK, HEADS GROUP, 2] fp32 take the largest logit of a block and the sum of what is above it.
    """
    head, layer, b = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64), tl.program_id(2)
    block = tl.program_id(0) // HEADS
    stored = tl.load(lens + b)
    if block * BLOCK < stored:
        own, d, g = table + b.to(tl.int64) * table_stride, tl.arange(0, BLOCK_D), tl.arange(0, WIDE)
        ok = g < GROUP
        row = layer * query_rows
        if WINDOW:
            row += tl.load(slots + b).to(tl.int64) * WINDOW + (tl.load(seen + b) - 1) % WINDOW
        else:
            row += b
        at = queries + (row * (HEADS * GROUP) + head * GROUP + g)[None, :] * D + d[:, None]
        query = tl.load(at, ok[None, :] & (d < D)[:, None], 0.0)
        token = block * BLOCK + tl.arange(0, BLOCK)
        there = token < stored
        page = layer * num_pages + tl.load(own + token // page_size, there, 0)
        place = ((page * HEADS + head) * page_size + token % page_size) * D
        key = tl.load(keys + place[:, None] + d[None, :], there[:, None] & (d < D)[None, :], 0.0)
        logit = tl.where(there[:, None], tl.dot(key, query, input_precision="ieee") * scale2, float("-inf"))
        peak = tl.max(logit, 0)
        total = tl.sum(tl.exp2(logit - peak[None, :]), 0)
        sequence = layer * tl.num_programs(2) + b
        to = logits + (sequence * (HEADS * GROUP) + head * GROUP + g)[None, :] * width + token[:, None]
        tl.store(to, logit, there[:, None] & ok[None, :])
        noted = notes + ((sequence * (width // BLOCK) + block) * (HEADS * GROUP) + head * GROUP + g) * 2
        tl.store(noted, peak, ok)
        tl.store(noted + 1, total, ok)


@triton.jit
def _weights(notes, blocks, HQ: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Return the logarithm to base 2 of the sum of weights [WIDE] of COUNT query heads from what so many blocks noted of them."""
    h = tl.arange(0, WIDE)
    peak, total = tl.full([WIDE], float("-inf"), tl.float32), tl.zeros([WIDE], tl.float32)
    for start in range(0, blocks, 16):
        block = start + tl.arange(0, 16)
        both = (block < blocks)[:, None] & (h < COUNT)[None, :]
        at = notes + (block[:, None] * HQ + h[None, :]) * 2
        own, part = tl.load(at, both, float("-inf")), tl.load(at + 1, both, 0.0)
        higher = tl.maximum(peak, tl.max(own, 0))
        stand = tl.where(h < COUNT, higher, 0.0)
        total = total * tl.exp2(peak - stand) + tl.sum(part * tl.exp2(own - stand[None, :]), 0)
        peak = higher
    return tl.where(h < COUNT, peak + tl.log2(tl.where(h < COUNT, total, 1.0)), 0.0)


@triton.jit
def exchange_kernel(
    keys,
    values,
    positions,
    mass,
    logits,
    notes,
    weights,
    table,
    lens,
    seen,
    table_stride,
    num_pages,
    page_size,
    width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BUDGET: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    SCORE: tl.constexpr,
    SHARED: tl.constexpr,
    POOL_MAX: tl.constexpr,
    WIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
    NOTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count attention where it is kept, and let each sequence's newest token take the place of the least where more than BUDGET are stored.

    grid [HEADS, L, B]. keys, values [L, P, HEADS, N, WORDS] int32 words, positions [L, P, HEADS, N] int32, mass [L, P, HEADS GROUP, N] fp32;
    logits and notes as `logits_kernel` left them for blocks of NOTED tokens, weights [L, B, HEADS, WIDE] fp32 scratch, WIDE at least the query heads
    that decide; other arguments as there. SCORE 0: the attention that a token received so far, which is counted here; 1: the newest query's; 2: the
    position. SHARED: all query heads of a layer decide together by their mean, else those of a group (by their maximum with POOL_MAX). The first SINK
    tokens and the newest RECENT stay; of equal ones the older stays. Positions are written when a sequence evicts for the first time: before, each
    token's is its place. TOGETHER query heads are read at once.
    """
    head, layer, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    HQ: tl.constexpr = HEADS * GROUP
    COUNT: tl.constexpr = HQ if SHARED else GROUP
    stored, last = tl.load(lens + b), tl.load(seen + b) - 1
    full, old = stored > BUDGET, stored - 1
    own, base = table + b.to(tl.int64) * table_stride, layer * num_pages
    sequence = layer * tl.num_programs(2) + b
    first = 0 if SHARED else head * GROUP
    h = tl.arange(0, WIDE)
    mine = weights + (sequence * HEADS + head) * WIDE
    asked = logits + (sequence * HQ + first) * width
    if SCORE < 2:
        total = _weights(notes + (sequence * (width // NOTED) * HQ + first) * 2, (stored + NOTED - 1) // NOTED, HQ, COUNT, WIDE)
        tl.store(mine + h, total)
        tl.debug_barrier()
    least, at, place = last * 0 + float("inf"), last * 0 - 1, old
    for start in range(0, old, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < old
        page = base + tl.load(own + token // page_size, there, 0)
        inside = token % page_size
        row = (page * HEADS + head) * page_size + inside
        fresh = token - token + last + 1 == stored
        position = tl.where(fresh, token, tl.load(positions + row, there, 0))
        tl.store(positions + row, token, there & fresh & (token - token + stored > BUDGET))
        wanted = there & (position >= SINK) & (position <= last - RECENT)
        if SCORE == 2:
            oldest = tl.min(tl.where(wanted, position, 2147483647), 0)
            found = tl.sum(tl.where(wanted & (position == oldest), token, 0), 0)
            better = (oldest < 2147483647) & ((at < 0) | (oldest < at))
            at, place = tl.where(better, oldest, at), tl.where(better, found, place)
        else:
            pooled = tl.zeros([BLOCK], tl.float32)
            for some in range(0, COUNT, TOGETHER):
                for one in tl.static_range(TOGETHER):
                    q = some + one
                    both = there & (token * 0 + q < COUNT)
                    part = tl.exp2(tl.load(asked + q * width + token, both, float("-inf")) - tl.load(mine + q))
                    if SCORE == 0:
                        counted = mass + (page * HQ + first + q) * page_size + inside
                        part += tl.load(counted, both, 0.0)
                        tl.store(counted, part, both)
                    pooled = tl.maximum(pooled, part) if POOL_MAX else pooled + part
            if not POOL_MAX:
                pooled = tl.math.div_rn(pooled, tl.zeros_like(pooled) + COUNT)
            score = tl.where(wanted, pooled, float("inf"))
            low = tl.min(score, 0)
            equal = wanted & (score == low)
            newest = tl.max(tl.where(equal, position, -1), 0)
            found = tl.sum(tl.where(equal & (position == newest), token, 0), 0)
            better = (newest >= 0) & ((low < least) | ((low == least) & (newest > at)))
            least, at, place = tl.where(better, low, least), tl.where(better, newest, at), tl.where(better, found, place)
    tl.debug_barrier()
    target = tl.where(full, place, old)
    page = base + tl.load(own + target // page_size)
    if SCORE == 0:
        paid = tl.exp2(tl.load(asked + h.to(tl.int64) * width + old, h < COUNT, float("-inf")) - total)
        tl.store(mass + (page * HQ + first + h) * page_size + target % page_size, paid, h < COUNT)
    if full:
        to = (page * HEADS + head) * page_size + target % page_size
        page = base + tl.load(own + old // page_size)
        source = (page * HEADS + head) * page_size + old % page_size
        w = tl.arange(0, BLOCK_W)
        tl.store(keys + to * WORDS + w, tl.load(keys + source * WORDS + w, w < WORDS, 0), w < WORDS)
        tl.store(values + to * WORDS + w, tl.load(values + source * WORDS + w, w < WORDS, 0), w < WORDS)
        tl.store(positions + to, last)

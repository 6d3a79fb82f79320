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
def _row(own, base, token, page_size, head, HEADS: tl.constexpr):
    """Return where tokens of a sequence's pages lie among the rows of a head of a layer whose first page is `base`."""
    return ((base + tl.load(own + token // page_size)) * HEADS + head) * page_size + token % page_size


@triton.jit
def stamp_kernel(
    keys,
    values,
    positions,
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
    WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    UNIT: tl.constexpr,
    FULL: tl.constexpr,
    UNITS: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
):
    """Stamp what each sequence's newest query needs, and let the unit that was needed least recently go where more than FULL units are stored.

    grid [HEADS, L, B]. The newest token is stamped with the time, and so are the tokens of units whose softmax over scores, mean over a group, is
    above alpha. keys, values [L, P, HEADS, N, WORDS] int32 words, positions [L, P, HEADS, N] int32, stamp [L, P, HEADS, N] fp32; UNITS is at least
    FULL + 1; other arguments as of `bounds_kernel`. Of units of equal stamps the first goes; none goes that begins before position SINK or ends among
    the newest RECENT tokens. The last whole unit takes its place, the newest token that unit's. Positions of a unit that such a token began follow
    from its place, those of a sequence that has evicted nothing too, and are written when it evicts.
    """
    head, layer, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    stored, now = tl.load(lens + b), tl.load(seen + b)
    own, base = table + b.to(tl.int64) * table_stride, layer * num_pages
    unit = tl.arange(0, UNITS)
    there = unit * UNIT < stored
    asked = scores + ((layer * tl.num_programs(2) + b) * (HEADS * GROUP) + head * GROUP) * width
    weight = tl.zeros([UNITS], tl.float32)
    for g in tl.static_range(GROUP):
        score = tl.load(asked + g * width + unit, there, float("-inf"))
        part = tl.exp2((score - tl.max(score, 0)) * 1.4426950408889634)
        weight += tl.math.div_rn(part, tl.zeros_like(part) + tl.sum(part, 0))
    needed = there & (tl.math.div_rn(weight, tl.zeros_like(weight) + GROUP) > alpha)
    one = tl.arange(0, UNIT)
    token = unit[:, None] * UNIT + one[None, :]
    inside = token < stored
    page = base + tl.load(own + token // page_size, inside, 0)
    row = (page * HEADS + head) * page_size + token % page_size
    tl.store(stamp + row, tl.zeros([UNITS, UNIT], tl.float32) + now.to(tl.float32), inside & (needed[:, None] | (token == stored - 1)))
    tl.debug_barrier()
    if stored > FULL * UNIT:
        latest = tl.max(tl.load(stamp + row, inside, float("-inf")), 1)
        follows = (token >= (FULL - 1) * UNIT) | (token - token + now == stored)
        position = tl.where(follows, token + now - stored, tl.load(positions + row, inside, 0))
        tl.store(positions + row, position, inside)
        begin = tl.min(position, 1)
        may = (unit < FULL) & (begin >= SINK) & (tl.max(position, 1) < now - RECENT)
        oldest = tl.min(tl.where(may, latest, float("inf")), 0)
        equal = may & (latest == oldest)
        first = tl.min(tl.where(equal, begin, 2147483647), 0)
        gone = tl.sum(tl.where(equal & (begin == first), unit, 0), 0)
        tl.debug_barrier()
        source = _row(own, base, (FULL - 1) * UNIT + one, page_size, head, HEADS)
        target = _row(own, base, gone * UNIT + one, page_size, head, HEADS)
        last, to = _row(own, base, stored - 1, page_size, head, HEADS), _row(own, base, stored - 1 - UNIT, page_size, head, HEADS)
        w = tl.arange(0, BLOCK_W)
        some = (one >= 0)[:, None] & (w < WORDS)[None, :]
        from_, into = source[:, None] * WORDS + w[None, :], target[:, None] * WORDS + w[None, :]
        key, value = tl.load(keys + from_, some, 0), tl.load(values + from_, some, 0)
        place, time = tl.load(positions + source), tl.load(stamp + source)
        newest_key, newest_value = tl.load(keys + last * WORDS + w, w < WORDS, 0), tl.load(values + last * WORDS + w, w < WORDS, 0)
        tl.debug_barrier()
        tl.store(keys + into, key, some)
        tl.store(values + into, value, some)
        tl.store(positions + target, place)
        tl.store(stamp + target, time)
        tl.debug_barrier()
        tl.store(keys + to * WORDS + w, newest_key, w < WORDS)
        tl.store(values + to * WORDS + w, newest_value, w < WORDS)
        tl.store(positions + to, now - 1)
        tl.store(stamp + to, now.to(tl.float32))

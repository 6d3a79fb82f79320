"""Codes of single tokens in Triton: a prompt's, the attention that they receive, and the exchange of one of them for a step's newest token.

Rounding follows `encode_integer_zero` of the roles, scores and ties those of `evict/qhitter.py`. A byte holds the codes of channels 2 i and 2 i + 1,
so keys and values are read as their even and odd channels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round(x):
    """Round fp32 below 2**22 to the nearest integer, half to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _step(even, odd, STEPS: tl.constexpr):
    """Return the lowest number and the width of a step [T] of tokens [T, D / 2] twice, fp32, over a range that is widened to hold zero."""
    low = tl.minimum(tl.minimum(tl.min(even, 1), tl.min(odd, 1)), 0.0)
    high = tl.maximum(tl.maximum(tl.max(even, 1), tl.max(odd, 1)), 0.0)
    return low, tl.math.div_rn(tl.maximum(high - low, 1e-5), tl.zeros_like(low) + STEPS)


@triton.jit
def _zero_point(low, scale, STEPS: tl.constexpr):
    return tl.minimum(tl.maximum(_round(tl.math.div_rn(-low, scale)), 0.0), STEPS)


@triton.jit
def _code(x, scale, zero, STEPS: tl.constexpr):
    """Return codes [T, D / 2] fp32."""
    y = _round(tl.math.div_rn(x, tl.zeros_like(x) + scale[:, None])) + zero[:, None]
    return tl.minimum(tl.maximum(y, 0.0), STEPS)


@triton.jit
def _error(even, odd, STEPS: tl.constexpr):
    """Return the L2 error [T] fp32 of rounding tokens to so many steps with a scale in fp32."""
    low, scale = _step(even, odd, STEPS)
    zero = _zero_point(low, scale, STEPS)
    first = (_code(even, scale, zero, STEPS) - zero[:, None]) * scale[:, None] - even
    second = (_code(odd, scale, zero, STEPS) - zero[:, None]) * scale[:, None] - odd
    return tl.sqrt(tl.sum(first * first, 1) + tl.sum(second * second, 1))


@triton.jit
def _keep(even, odd, row, wanted, codes, scales, zeros, dtype: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Encode tokens [T, HALF] twice, fp32, into wanted rows [T] of the pool; a scale of four bits is never too small for a dtype."""
    low, scale = _step(even, odd, 15)
    if dtype == tl.float16:
        scale = tl.minimum(scale, 65504.0)
    scale = scale.to(dtype)
    wide = scale.to(tl.float32)
    zero = _zero_point(low, wide, 15)
    tl.store(scales + row, scale, wanted)
    tl.store(zeros + row, zero.to(dtype), wanted)
    packed = _code(even, wide, zero, 15).to(tl.int32) | (_code(odd, wide, zero, 15).to(tl.int32) << 4)
    d = tl.arange(0, HALF)
    tl.store(codes + row[:, None] * (D // 2) + d[None, :], packed.to(tl.uint8), wanted[:, None] & (d < D // 2)[None, :])


@triton.jit
def _halves(data, row, wanted, D: tl.constexpr, HALF: tl.constexpr):
    """Read the even and the odd channels [T, HALF] of rows [T] of tokens [D], zero where there is none."""
    at, inside = row[:, None] * D + 2 * tl.arange(0, HALF)[None, :], wanted[:, None] & (tl.arange(0, HALF) < D // 2)[None, :]
    return tl.load(data + at, inside, 0.0), tl.load(data + at + 1, inside, 0.0)


@triton.jit
def errors_kernel(data, errors, tokens, count, D: tl.constexpr, HALF: tl.constexpr, T: tl.constexpr, STEPS: tl.constexpr):
    """Measure the rounding error of a prompt's keys or values; grid [blocks of T tokens, Hk].

    data [Hk, tokens, D], of which `count` tokens are there; errors [Hk, count] fp32.
    """
    head, token = tl.program_id(1).to(tl.int64), tl.program_id(0) * T + tl.arange(0, T)
    even, odd = _halves(data, head * tokens + token, token < count, D, HALF)
    tl.store(errors + head * count + token, _error(even.to(tl.float32), odd.to(tl.float32), STEPS), token < count)


@triton.jit
def prompt_kernel(
    keys,
    values,
    kept,
    errors,
    mass,
    table,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    key_error,
    value_error,
    positions,
    attention_mass,
    tokens,
    stored,
    count,
    page_size,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    T: tl.constexpr,
):
    """Encode what stays of a prompt, with its errors, positions and attention; grid [blocks of T tokens, Hk].

    keys, values [Hk, tokens, D], of which `stored` tokens are there; kept [Hk, count] int32; errors [2, Hk, stored], mass [Hq, stored] fp32; table
    [M] int32. Codes [P, Hk, N, D / 2], the others [P, Hk, N], attention_mass [P, Hq, N].
    """
    head, index = tl.program_id(1).to(tl.int64), tl.program_id(0) * T + tl.arange(0, T)
    wanted = index < count
    source = tl.load(kept + head * count + index, wanted, 0)
    page = tl.load(table + index // page_size, wanted, 0).to(tl.int64)
    row = (page * HEADS + head) * page_size + index % page_size
    even, odd = _halves(keys, head * tokens + source, wanted, D, HALF)
    dtype = even.dtype
    _keep(even.to(tl.float32), odd.to(tl.float32), row, wanted, key_codes, key_scale, key_zero, dtype, D, HALF)
    even, odd = _halves(values, head * tokens + source, wanted, D, HALF)
    _keep(even.to(tl.float32), odd.to(tl.float32), row, wanted, value_codes, value_scale, value_zero, dtype, D, HALF)
    tl.store(key_error + row, tl.load(errors + head * stored + source, wanted, 0.0), wanted)
    tl.store(value_error + row, tl.load(errors + (HEADS + head) * stored + source, wanted, 0.0), wanted)
    tl.store(positions + row, source, wanted)
    for g in tl.static_range(GROUP):
        query_head = head * GROUP + g
        to = (page * (HEADS * GROUP) + query_head) * page_size + index % page_size
        tl.store(attention_mass + to, tl.load(mass + query_head * stored + source, wanted, 0.0), wanted)


@triton.jit
def _scores(even, odd, codes, scales, zeros, row, there, D: tl.constexpr, HALF: tl.constexpr):
    """Return the scores [T, G] fp32 of queries (even and odd channels [HALF, G]) over the coded keys of rows [T]."""
    d = tl.arange(0, HALF)
    byte = tl.load(codes + row[:, None] * (D // 2) + d[None, :], there[:, None] & (d < D // 2)[None, :], 0).to(tl.int32)
    zero = tl.load(zeros + row, there, 0.0).to(tl.float32)[:, None]
    low = ((byte & 15).to(tl.float32) - zero).to(even.dtype)  # small integers: exact in any dtype
    high = ((byte >> 4).to(tl.float32) - zero).to(even.dtype)
    found = tl.dot(low, even, input_precision="ieee") + tl.dot(high, odd, input_precision="ieee")
    return found * tl.load(scales + row, there, 0.0).to(tl.float32)[:, None]


@triton.jit
def _pooled(x, ok, POOL_MAX: tl.constexpr, GROUP: tl.constexpr):
    """Let the query heads of a group agree: x [T, G] to [T]; ok [G] says which columns are heads."""
    if POOL_MAX:
        return tl.max(tl.where(ok[None, :], x, 0.0), 1)
    total = tl.sum(tl.where(ok[None, :], x, 0.0), 1)
    return tl.math.div_rn(total, tl.zeros_like(total) + GROUP)


@triton.jit
def mass_kernel(
    ring,
    keys,
    values,
    key_codes,
    key_scale,
    key_zero,
    key_error,
    value_error,
    attention_mass,
    lse,
    notes,
    table,
    lens,
    slots,
    table_stride,
    num_pages,
    num_slots,
    page_size,
    scale2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    POOL_MAX: tl.constexpr,
):
    """Count the attention that each sequence's newest query pays to a block, and note what its scores reach from and to; grid [blocks Hk, L, B].

    ring [L, Z, 1, Hq, D] queries; keys, values [L, Z, Hk, 1, D] newest tokens; codes [L, P, Hk, N, D / 2], scales, zeros and errors [L, P, Hk, N],
    attention_mass [L, P, Hq, N] fp32, which is added to; lse [L, B, Hq] fp32 as attention left it, scale2 attention's scale for base 2; table [B, M],
    lens [B] stored tokens with the newest, slots [B] int32. notes [L, B, blocks Hk, 8 + WIDE] fp32 take the least and the largest of attention, of
    key and of value errors; of the first block also the newest token's two errors, and what it received from each query head.
    """
    head, layer, b = tl.program_id(0) % HEADS, tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.program_id(0) // HEADS * BLOCK
    coded, slot = tl.load(lens + b) - 1, tl.load(slots + b).to(tl.int64)
    own, g, d = table + b.to(tl.int64) * table_stride, tl.arange(0, WIDE), tl.arange(0, HALF)
    ok = g < GROUP
    query_head = head * GROUP + g
    at = ring + ((layer * num_slots + slot) * (HEADS * GROUP) + query_head)[None, :] * D + 2 * d[:, None]
    inside = ok[None, :] & (d < D // 2)[:, None]
    even, odd = tl.load(at, inside, 0.0), tl.load(at + 1, inside, 0.0)
    total = tl.load(lse + (layer * tl.num_programs(2) + b) * (HEADS * GROUP) + query_head, ok, 0.0)
    token = start + tl.arange(0, BLOCK)
    there = token < coded
    page = layer * num_pages + tl.load(own + token // page_size, there, 0)
    row = (page * HEADS + head) * page_size + token % page_size
    logit = _scores(even, odd, key_codes, key_scale, key_zero, row, there, D, HALF) * scale2
    to = (page * (HEADS * GROUP) + head * GROUP)[:, None] + g[None, :]
    to = attention_mass + to * page_size + (token % page_size)[:, None]
    both = there[:, None] & ok[None, :]
    counted = tl.load(to, both, 0.0) + tl.exp2(logit - total[None, :])
    tl.store(to, counted, both)
    pooled = _pooled(counted, ok, POOL_MAX, GROUP)
    low, high = tl.min(tl.where(there, pooled, float("inf")), 0), tl.max(tl.where(there, pooled, float("-inf")), 0)
    key_low = tl.min(tl.load(key_error + row, there, float("inf")), 0)
    key_high = tl.max(tl.load(key_error + row, there, float("-inf")), 0)
    value_low = tl.min(tl.load(value_error + row, there, float("inf")), 0)
    value_high = tl.max(tl.load(value_error + row, there, float("-inf")), 0)
    noted = notes + ((layer * tl.num_programs(2) + b) * tl.num_programs(0) + tl.program_id(0)) * (8 + WIDE)
    if start == 0:
        newest = ((layer * num_slots + slot) * HEADS + head) + tl.arange(0, 1)
        key_even, key_odd = _halves(keys, newest, newest >= 0, D, HALF)
        value_even, value_odd = _halves(values, newest, newest >= 0, D, HALF)
        key_even, key_odd = key_even.to(tl.float32), key_odd.to(tl.float32)
        first = tl.sum(tl.reshape(key_even, [HALF, 1]) * even.to(tl.float32) + tl.reshape(key_odd, [HALF, 1]) * odd.to(tl.float32), 0)
        paid = tl.exp2(first * scale2 - total)
        key_new = tl.sum(_error(key_even, key_odd, STEPS), 0)
        value_new = tl.sum(_error(value_even.to(tl.float32), value_odd.to(tl.float32), STEPS), 0)
        agreed = tl.sum(_pooled(tl.reshape(paid, [1, WIDE]), ok, POOL_MAX, GROUP), 0)
        low, high = tl.minimum(low, agreed), tl.maximum(high, agreed)
        key_low, key_high = tl.minimum(key_low, key_new), tl.maximum(key_high, key_new)
        value_low, value_high = tl.minimum(value_low, value_new), tl.maximum(value_high, value_new)
        tl.store(noted + 6, key_new)
        tl.store(noted + 7, value_new)
        tl.store(noted + 8 + g, paid, ok)
    tl.store(noted, low)
    tl.store(noted + 1, high)
    tl.store(noted + 2, key_low)
    tl.store(noted + 3, key_high)
    tl.store(noted + 4, value_low)
    tl.store(noted + 5, value_high)


@triton.jit
def _unit_range(x, low, high):
    reach = tl.maximum(high - low, 1e-20)
    return tl.math.div_rn(x - low, tl.zeros_like(x) + reach)


@triton.jit
def _first_above(value, wanted, count, BITS: tl.constexpr):
    """Return the largest cut below 2 ** BITS that at least `count` of the wanted integers reach."""
    cut = tl.zeros([1], tl.int32)
    for step in range(BITS):
        higher = cut + (1 << (BITS - 1 - step))
        cut = tl.where(tl.sum((wanted & (value >= higher)).to(tl.int32), 0) >= count, higher, cut)
    return tl.sum(cut, 0)


@triton.jit
def exchange_kernel(
    keys,
    values,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    key_error,
    value_error,
    positions,
    attention_mass,
    notes,
    table,
    lens,
    seen,
    slots,
    table_stride,
    num_pages,
    num_slots,
    page_size,
    blocks,
    blend,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BUDGET: tl.constexpr,
    HEAVY: tl.constexpr,
    RECENT: tl.constexpr,
    POOL_MAX: tl.constexpr,
):
    """Encode each sequence's newest token behind the stored ones, or in the place of the least of them; grid [Hk, L, B].

    Arguments as of `mass_kernel` with so many blocks, PARTS at least blocks times HEADS; positions [L, P, Hk, N] and seen [B] int32, the tokens
    of a sequence so far. Where more than BUDGET tokens are
    stored, the newest RECENT stay, then the HEAVY ones of most attention, then those of the best blend of attention and small errors, all scaled to
    the range of the layer. Of equal ones the older stays.
    """
    head, layer, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    coded, slot, last = tl.load(lens + b) - 1, tl.load(slots + b).to(tl.int64), tl.load(seen + b) - 1
    own, base = table + b.to(tl.int64) * table_stride, layer * num_pages
    noted = notes + (layer * tl.num_programs(2) + b) * blocks * HEADS * (8 + WIDE)
    place = coded
    if coded >= BUDGET:
        of, some = noted + tl.arange(0, PARTS) * (8 + WIDE), tl.arange(0, PARTS) < blocks * HEADS
        low, high = tl.min(tl.load(of, some, float("inf")), 0), tl.max(tl.load(of + 1, some, float("-inf")), 0)
        key_low, key_high = tl.min(tl.load(of + 2, some, float("inf")), 0), tl.max(tl.load(of + 3, some, float("-inf")), 0)
        value_low, value_high = tl.min(tl.load(of + 4, some, float("inf")), 0), tl.max(tl.load(of + 5, some, float("-inf")), 0)
        token = tl.arange(0, BLOCK)
        there = token < coded
        page = base + tl.load(own + token // page_size, there, 0)
        row = (page * HEADS + head) * page_size + token % page_size
        position = tl.load(positions + row, there, 0)
        past = there & (position <= last - RECENT)
        pooled = tl.zeros([BLOCK], tl.float32)
        for g in tl.static_range(GROUP):
            part = tl.load(attention_mass + (page * (HEADS * GROUP) + head * GROUP + g) * page_size + token % page_size, there, 0.0)
            pooled = tl.maximum(pooled, part) if POOL_MAX else pooled + part
        if not POOL_MAX:
            pooled = tl.math.div_rn(pooled, tl.zeros_like(pooled) + GROUP)
        heavy = _unit_range(pooled, low, high)
        friendly = 2 - _unit_range(tl.load(key_error + row, there, 0.0), key_low, key_high)
        friendly = (friendly - _unit_range(tl.load(value_error + row, there, 0.0), value_low, value_high)) / 2
        free = past
        if HEAVY > 0:
            order = tl.maximum(heavy, 0.0).to(tl.int32, bitcast=True)  # of numbers from 0 to 1 as they compare
            cut = _first_above(order, past, HEAVY, 30)
            level = past & (order == cut)
            room = HEAVY - tl.sum((past & (order > cut)).to(tl.int32), 0)
            oldest = coded * 0 + 2147483647
            if tl.sum(level.to(tl.int32), 0) > room:
                oldest = 2147483647 - _first_above(2147483647 - position, level, room, 31)
            free = past & ((order < cut) | (level & (position > oldest)))
        score = tl.where(free, blend * heavy + (1 - blend) * friendly, float("inf"))
        least = free & (score == tl.min(score, 0))
        newest = tl.max(tl.where(least, position, -1), 0)
        place = tl.sum(tl.where(least & (position == newest), token, 0), 0)
    one = tl.arange(0, 1)
    page = base + tl.load(own + (place + one) // page_size)
    row = (page * HEADS + head) * page_size + (place + one) % page_size
    source = ((layer * num_slots + slot) * HEADS + head) + one
    always = one == 0
    even, odd = _halves(keys, source, always, D, HALF)
    dtype = even.dtype
    _keep(even.to(tl.float32), odd.to(tl.float32), row, always, key_codes, key_scale, key_zero, dtype, D, HALF)
    even, odd = _halves(values, source, always, D, HALF)
    _keep(even.to(tl.float32), odd.to(tl.float32), row, always, value_codes, value_scale, value_zero, dtype, D, HALF)
    mine = noted + head * (8 + WIDE)
    tl.store(key_error + row, tl.load(mine + 6 + one))
    tl.store(value_error + row, tl.load(mine + 7 + one))
    tl.store(positions + row, last + one)
    g = tl.arange(0, WIDE)
    to = (page * (HEADS * GROUP) + head * GROUP + g) * page_size + (place + one) % page_size
    tl.store(attention_mass + to, tl.load(mine + 8 + g, g < GROUP, 0.0), g < GROUP)

"""Column sums in Triton: a program owns a block of keys of one query head and walks over the queries that see it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _shares(
    query,
    lse,
    k,
    start,
    first_token,
    offset,
    new,
    query_row,
    scale2,
    d,
    inside,
    MASKED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return what BLOCK_Q queries pay to a block of keys k [D, BLOCK_K]: [BLOCK_Q, BLOCK_K] fp32."""
    row = start + tl.arange(0, BLOCK_Q)
    there = row < new
    at = query + row.to(tl.int64)[:, None] * query_row + d[None, :]
    if MASKED:
        q = tl.load(at, there[:, None] & inside[None, :], 0.0)
        norm = tl.load(lse + row, there, 0.0)
    else:
        q = tl.load(at, inside[None, :], 0.0)
        norm = tl.load(lse + row)
    score = tl.dot(q, k, input_precision="ieee")
    share = tl.exp2(score * scale2 - (norm * 1.4426950408889634)[:, None])
    if MASKED:
        token = first_token + tl.arange(0, BLOCK_K)
        share = tl.where(there[:, None] & (token[None, :] <= (row + offset)[:, None]), share, 0.0)
    return share


@triton.jit
def sums_kernel(
    query,
    keys,
    lse,
    sums,
    new,
    stored,
    query_row,
    query_head,
    key_head,
    lse_head,
    skipped,
    together,
    scale2,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write sums [Hq, stored] fp32 of what each stored token receives from queries skipped .. new - 1, the last `new` tokens.

    The grid is [blocks of keys times together, Hq / together]: so many heads take turns, so that the longest blocks, those of the first keys, begin
    early and none is left for the end. query [new, Hq, D] by strides query_row and query_head, keys [Hk, stored, D] by key_head, lse [Hq, new] fp32
    by lse_head: natural logarithms of the sums of exponentials; scale2 is attention's scale times log2 e.
    """
    block, head = tl.program_id(0) // together, tl.program_id(1) * together + tl.program_id(0) % together
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    first_token = block * BLOCK_K
    token = first_token + tl.arange(0, BLOCK_K)
    own = keys + (head // GROUP).to(tl.int64) * key_head
    k = tl.load(own + token.to(tl.int64)[:, None] * D + d[None, :], (token < stored)[:, None] & inside[None, :], 0.0)
    k = tl.trans(k)  # here and not in the loops, which would write the block to shared memory in every turn
    query += head.to(tl.int64) * query_head
    lse += head.to(tl.int64) * lse_head
    offset = stored - new
    # Queries from `low` on see the first key of the block, from `high` on all of them.
    low = tl.maximum(skipped, first_token - offset)
    high = tl.maximum(low, first_token + BLOCK_K - 1 - offset)
    middle = tl.minimum(low + (high - low + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q, new)
    end = middle + tl.maximum(new - middle, 0) // BLOCK_Q * BLOCK_Q
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in range(low, middle, BLOCK_Q):
        total += _shares(query, lse, k, start, first_token, offset, new, query_row, scale2, d, inside, True, BLOCK_Q, BLOCK_K)
    for start in range(middle, end, BLOCK_Q):
        total += _shares(query, lse, k, start, first_token, offset, new, query_row, scale2, d, inside, False, BLOCK_Q, BLOCK_K)
    for start in range(end, new, BLOCK_Q):
        total += _shares(query, lse, k, start, first_token, offset, new, query_row, scale2, d, inside, True, BLOCK_Q, BLOCK_K)
    tl.store(sums + head.to(tl.int64) * stored + token, tl.sum(total, 0), token < stored)

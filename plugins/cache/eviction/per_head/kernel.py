"""Compaction of single heads in Triton: the move of what stays, and the attention that a decode step's query pays.

A row is a head of a sequence; its pages are a row of page numbers of one pool [P, H, N, ...], in which H is 1, or G for numbers of query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def move_kernel(
    data,
    kept,
    table,
    rows,
    page_size,
    table_stride,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Move tokens to places first, first + 1, ... of their row; grid [R, HEADS].

    data [P, HEADS, N, WORDS] int32 words; table [R, table_stride] int32; rows [R, 5] int32: first, count, source, placed, shift. Token `source` + j
    moves to first + j, or with LISTS kept[source + j]: ascending, none below its target. No source is a target of an earlier block, and a block is
    read before it is written, so one program a row needs no scratch. POSITIONS: words of tokens from `placed` on are their index plus shift, and are
    written for those before `first` too.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(rows + row * 5), tl.load(rows + row * 5 + 1)
    origin, placed, shift = tl.load(rows + row * 5 + 2), tl.load(rows + row * 5 + 3), tl.load(rows + row * 5 + 4)
    own = table + row.to(tl.int64) * table_stride
    w = tl.arange(0, BLOCK_W)
    if POSITIONS:
        for start in range(placed, first, BLOCK):
            index = start + tl.arange(0, BLOCK)
            page = tl.load(own + index // page_size, index < first, 0).to(tl.int64)
            place = ((page * HEADS + head) * page_size + index % page_size) * WORDS
            both = (index < first)[:, None] & (w < WORDS)[None, :]
            tl.store(data + place[:, None] + w[None, :], (index + shift)[:, None] + tl.zeros([1, BLOCK_W], tl.int32), both)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        if LISTS:  # noqa: SIM108 - a constant, which decides what is compiled
            source = tl.load(kept + origin + index, inside, 0)
        else:
            source = tl.where(inside, origin + index, 0)
        page = tl.load(own + source // page_size, inside, 0).to(tl.int64)
        place = ((page * HEADS + head) * page_size + source % page_size) * WORDS
        both = inside[:, None] & (w < WORDS)[None, :]
        words = tl.load(data + place[:, None] + w[None, :], both, 0)
        if POSITIONS:
            words = tl.where((source < placed)[:, None], words, (source + shift)[:, None])
        target = first + index
        page = tl.load(own + target // page_size, inside, 0).to(tl.int64)
        place = ((page * HEADS + head) * page_size + target % page_size) * WORDS
        tl.debug_barrier()
        tl.store(data + place[:, None] + w[None, :], words, both)


@triton.jit
def received_kernel(
    keys,
    query,
    mass,
    table,
    lens,
    table_stride,
    page_size,
    query_layer,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the attention that a query pays to mass [P, GROUP, N] fp32, which begins anew for each row's newest token; grid [HEADS GROUP, L].

    keys [P, 1, N, D]; query [L, HEADS GROUP, D] by stride query_layer; table [L HEADS, table_stride], lens [L HEADS] int32.
    """
    query_head, layer = tl.program_id(0), tl.program_id(1)
    row = layer * HEADS + query_head // GROUP
    stored, own = tl.load(lens + row), table + row.to(tl.int64) * table_stride
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    q = tl.load(query + layer.to(tl.int64) * query_layer + query_head * D + d, inside, 0.0).to(tl.float32) * scale
    highest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, stored, BLOCK):
        token = start + tl.arange(0, BLOCK)
        page = tl.load(own + token // page_size, token < stored, 0).to(tl.int64)
        at = (page * page_size + token % page_size) * D
        k = tl.load(keys + at[:, None] + d[None, :], (token < stored)[:, None] & inside[None, :], 0.0).to(tl.float32)
        logit = tl.where(token < stored, tl.sum(k * q[None, :], 1), float("-inf"))
        peak = tl.maximum(highest, tl.max(logit, 0))
        total = total * tl.exp(highest - peak) + tl.sum(tl.exp(logit - peak), 0)
        highest = peak
    for start in range(0, stored, BLOCK):
        token = start + tl.arange(0, BLOCK)
        page = tl.load(own + token // page_size, token < stored, 0).to(tl.int64)
        at = (page * page_size + token % page_size) * D
        k = tl.load(keys + at[:, None] + d[None, :], (token < stored)[:, None] & inside[None, :], 0.0).to(tl.float32)
        share = tl.exp(tl.sum(k * q[None, :], 1) - highest) / total
        to = mass + (page * GROUP + query_head % GROUP) * page_size + token % page_size
        tl.store(to, share + tl.load(to, token < stored - 1, 0.0), token < stored)

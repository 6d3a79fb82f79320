"""Append and attention where every KV head keeps its own number of tokens, in torch and by kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plugins.append import launch as launch_append
from plugins.attend import launch_dense
from plugins.attend.prefill import attend_with_lse
from plugins.cache.batch import Row
from plugins.cache.eviction.observe import remember
from plugins.cache.eviction.per_head.pool import HeadPool
from plugins.cache.eviction.per_head.received import observe_chunk
from plugins.cache.eviction.per_head.ring import slides
from plugins.cache.session import Session
from plugins.cache.support import overlaps
from plugins.nodes.node import OpConfig


def attend(session: Session, layer: int, config: OpConfig, b: int, row: Row, query: Tensor) -> Tensor:
    """Attend query [n, Hq, D] of sequence b's n new tokens to what each head stores, in torch: [n, Hq, D]."""
    out = torch.empty_like(query)
    parts: list[tuple[Tensor, Tensor | None]] = []
    for own, keys, values in _pool(session).parts(layer, b, config.num_q_heads):
        new, stored = row.new, keys.shape[1]
        mask = torch.ones(new, stored, dtype=torch.bool, device=query.device).tril(stored - new) if new > 1 else None
        asked = query[:, own].transpose(0, 1)[None]
        done = scaled_dot_product_attention(asked, keys[None], values[None], attn_mask=mask, scale=config.scale, enable_gqa=True)
        out[:, own] = done[0].transpose(0, 1)
        parts.append((keys, None))
    observe_chunk(session, layer, b, row, query, parts)
    return out


def append_by_kernels(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Rotate and store new tokens: every head at its own length, in its own pages; inputs and result as the torch form's."""
    qkv, positions, starts, _, stored, slots, table, rope = inputs[:8]
    own, step, ragged = _own(session, layer), session.step(layer), session.plan.ragged
    sink = slides(session.plan.evict) if ragged and session.plan.evict is not None else None
    rings = None if sink is None else _pool(session).rings.data[:, own]
    launch_append.launch(
        qkv, positions, starts, stored[own], table[own], rope, (inputs[9], inputs[10]) if len(inputs) > 9 else None, out,
        session.buffer("keys", layer), session.buffer("values", layer), None, None,
        eps=config.rms_eps, group=launch_append.NO_GROUP, summary=launch_append.NONE, longest=step.longest,
        overlap=step.decoding and overlaps(session, table[own]), heads=config.num_kv_heads if ragged else None,
        slots=slots, rings=rings, sink=-1 if sink is None else sink,
    )  # fmt: skip


def attend_by_kernels(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Attend to the stored tokens by kernels; inputs and result as the torch form's."""
    query, _, _, stored, _, table = inputs[:6]
    step, rows = session.step(layer), [_own(session, layer)]
    if session.plan.mixed:
        rows.append(session.plan.num_layers + layer)  # of the layer's codes
    lens, pages = [stored[own] for own in rows], [table[own] for own in rows]
    if step.decoding:
        _decode(session, layer, config, query, lens, pages, out)
        if all(row.answers for row in step.rows):
            remember(session, layer, step.rows, query, inputs[2], inputs[4])
            return
    else:
        _chunks(session, layer, config, query, out)
        which = step.decode_rows
        if len(which):
            places = inputs[1][:-1][which]
            answer = query.new_empty(len(which), query.shape[1])
            # Lengths and pages are gathered just before, and attention reads them before it waits.
            lens, pages = [one.index_select(-1, which) for one in lens], [one.index_select(-2, which) for one in pages]
            _decode(session, layer, config, query[places], lens, pages, answer, overlap=False)
            out[places] = answer
    for b, row in enumerate(step.rows):
        if row.decodes:
            keys = [(keys, None) for _, keys, _ in _pool(session).parts(layer, b, config.num_q_heads)] if not row.answers else []
            observe_chunk(session, layer, b, row, query[row.start : row.start + 1].unflatten(1, (config.num_q_heads, -1)), keys)


def _chunks(session: Session, layer: int, config: OpConfig, query: Tensor, out: Tensor) -> None:
    """Attend with every sequence that has several new tokens."""
    for b, row in enumerate(session.step(layer).rows):
        if row.decodes:
            continue
        rows = slice(row.start, row.start + row.new)
        chunk = query[rows].unflatten(1, (config.num_q_heads, config.head_dim))
        seen: list[tuple[Tensor, Tensor | None]] = []
        for heads, keys, values in _pool(session).parts(layer, b, config.num_q_heads):
            answer, lse = attend_with_lse(chunk[:, heads], keys, values, config.scale)
            out[rows].unflatten(1, chunk.shape[1:])[:, heads] = answer
            seen.append((keys, lse))
        observe_chunk(session, layer, b, row, chunk, seen)


def _decode(
    session: Session, layer: int, config: OpConfig, query: Tensor, lens: Sequence[Tensor], tables: Sequence[Tensor], out: Tensor,
    overlap: bool = True,
) -> None:  # fmt: skip
    """Attend one token a sequence: lens [Hk, B], table [Hk, B, M] of heads, or those [B], [B, M] of tokens in full precision and of codes."""
    keys, values = session.buffer("keys", layer), session.buffer("values", layer)
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    group, batch = config.num_q_heads // config.num_kv_heads, lens[0].shape[-1]
    plan = launch_dense.DenseScratch.plan(group, config.head_dim, sms)
    scratch = session.scratch(("attend", batch), lambda: plan.allocate(query.device))
    codes = None
    if len(lens) > 1:
        codes = launch_dense.Codes(lens[1], tables[1], session.buffer("key_scale", layer), session.buffer("value_scale", layer))
    launch_dense.attend_dense(query, keys, values, tables[0], lens[0], out, *scratch, scale=config.scale, overlap=overlap, codes=codes)


def _own(session: Session, layer: int) -> slice | int:
    """Return the rows of a layer among all: its heads, or itself where heads are alike."""
    first = session.plan.page_groups[layer]
    return slice(first, first + session.plan.num_kv_heads) if session.plan.ragged else first


def _pool(session: Session) -> HeadPool:
    assert session.ragged is not None, "pages are not those of one pool"
    return session.ragged

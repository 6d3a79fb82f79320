"""KvAttend in torch: causal attention of each sequence's new tokens over what is stored, by the library's fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plugins.cache.batch import Row
from plugins.cache.eviction.observe import observe
from plugins.cache.eviction.per_head import ops as ragged
from plugins.cache.gather import read_pages, read_rows, token_rows
from plugins.cache.session import Session
from plugins.cache.tiers.host.attend import read_chosen, read_whole
from plugins.cache.tiers.host.chunk import read_prompt, stage_next
from plugins.cache.tiers.host.op import recall_ahead
from plugins.nodes.node import OpConfig
from trtkv.plan import SelectPlan


def attend(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Attend to the stored tokens.

    inputs: rotated queries [T, Hq D], tensors that `Session.begin_step` already carries and, where the layer selects, a selection
    [B, H, K + 1] int32. Writes out [T, Hq D]. Query i of a sequence's n new tokens sees all but the last n - 1 - i stored tokens.
    """
    selection = inputs[7] if len(inputs) > 7 else None
    for b, row in enumerate(session.step(layer).rows):
        plan = session.own.plan(layer, row.slot)
        rows = slice(row.start, row.start + row.new)
        query = inputs[0][rows].unflatten(1, (config.num_q_heads, config.head_dim))
        target = out[rows].unflatten(1, (config.num_q_heads, config.head_dim))
        if session.held is not None:
            cache = session.held.find(layer, row.slot)
            target.copy_(cache.attend(query))
            session.note_read(row, cache.read_tokens)
        elif session.ragged is not None:
            target.copy_(ragged.attend(session, layer, config, b, row, query))
        elif session.offload is not None and session.offload.covers(layer):
            target.copy_(_offloaded(session, layer, config, row, query, None if selection is None else selection[b], b))
        elif plan is not None and selection is not None and row.decodes and row.stored > max(plan.budget, session.dense_below):
            count = min(plan.width, -(-row.stored // plan.unit))
            target[0] = _sparse(session, layer, config, plan, row, query[0], selection[b, :, :count].long())
        else:
            target.copy_(dense(session, layer, config, row, query))
            observe(session, layer, row, query)


def dense(session: Session, layer: int, config: OpConfig, row: Row, query: Tensor) -> Tensor:
    """Attend query [n, Hq, D] of a sequence's n new tokens to everything stored: [n, Hq, D]."""
    keys, values = (read_pages(session.buffer(name, layer), row)[:, : row.stored] for name in ("keys", "values"))
    return attend_all(config, row, query, keys, values)


def attend_all(config: OpConfig, row: Row, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend query [n, Hq, D] of a sequence's n new tokens to keys and values [Hk, S, D], of which the last n are their own: [n, Hq, D]."""
    if row.new == 1:
        return _decode(query[0], keys, values, config).unsqueeze(0)
    heads_first = query.transpose(0, 1).unsqueeze(0)
    whole = row.new == row.stored
    mask = None if whole else torch.ones(row.new, row.stored, dtype=torch.bool, device=query.device).tril(row.stored - row.new)
    out = scaled_dot_product_attention(heads_first, keys[None], values[None], attn_mask=mask, is_causal=whole, scale=config.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _offloaded(session: Session, layer: int, config: OpConfig, row: Row, query: Tensor, selection: Tensor | None, b: int) -> Tensor:
    """Attend query [n, Hq, D] of sequence b of the step in a layer whose pages live on the host: [n, Hq, D]."""
    store, plan = session.offload, session.plan.select[layer]
    assert store is not None and plan is not None
    if not row.decodes:
        stage_next(store, layer, session.step(layer), [b])
        return attend_all(config, row, query, *read_prompt(store, layer, session.step(layer), b))
    if not store.recall.reuse:
        store.forget(layer, [row.slot])
    if selection is None or row.stored <= plan.budget:
        out = attend_all(config, row, query, *read_whole(store, layer, row))
    else:
        keys, values, tokens = read_chosen(store, layer, row, selection, plan)
        out = _decode(query[0], keys, values, config, _beyond(tokens, row, plan)).unsqueeze(0)
    if store.recall.ahead:
        recall_ahead(session, layer, config, plan, row, query[0])
    return out


def _sparse(session: Session, layer: int, config: OpConfig, plan: SelectPlan, row: Row, query: Tensor, units: Tensor) -> Tensor:
    """Attend query [Hq, D] to selected units [H, K] int64 of pages: [Hq, D]."""
    keys, values = session.buffer("keys", layer), session.buffer("values", layer)

    def read(tokens: Tensor) -> tuple[Tensor, Tensor]:
        rows = token_rows(tokens, row, keys.shape[1], keys.shape[2])
        return read_rows(keys, rows), read_rows(values, rows)

    return attend_units(config, plan, row, query, units, read)


def attend_units(
    config: OpConfig, plan: SelectPlan, row: Row, query: Tensor, units: Tensor, read: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Tensor:  # fmt: skip
    """Attend query [Hq, D] to selected units [H, K] int64, whose keys and values [Hk, K, D] `read` returns for tokens [Hk, K]: [Hq, D]."""
    if plan.unit > 1:
        units = (units[..., None] * plan.unit + torch.arange(plan.unit, device=units.device)).flatten(1)
    heads, parts = config.num_kv_heads, []
    each = units.shape[0] // heads  # lists of a group's query heads: heads j, j + G, ... are one per key-value head
    for j in range(each):
        own = units[j::each]
        keys, values = read(own.clamp(max=row.stored - 1))
        part = query if each == 1 else query.unflatten(0, (heads, -1))[:, j]
        parts.append(_decode(part, keys, values, config, _beyond(own, row, plan)))
    return parts[0] if each == 1 else torch.stack(parts, 1).flatten(0, 1)


def _beyond(tokens: Tensor, row: Row, plan: SelectPlan) -> Tensor | None:
    """Mark [H, K] tokens behind the end, which only the last page of a selection can hold; None when there are none."""
    return tokens >= row.stored if plan.unit > 1 and row.stored % plan.unit else None


def _decode(query: Tensor, keys: Tensor, values: Tensor, config: OpConfig, hidden: Tensor | None = None) -> Tensor:
    """Attend query [H, D] to keys and values [Hk, K, D] without the tokens hidden [Hk, K]: [H, D]."""
    grouped = query.unflatten(0, (keys.shape[0], -1))
    mask = None if hidden is None else ~hidden[None, :, None]
    out = scaled_dot_product_attention(grouped[None], keys[None], values[None], attn_mask=mask, scale=config.scale)
    return out[0].flatten(0, 1)

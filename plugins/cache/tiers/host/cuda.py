"""Offloaded layers on an NVIDIA GPU: append into the ring, recall what is selected, attend over frames, recall ahead beside the rest of the step.

A decode step reads nothing from the host's side of the program, so it is captured as it is; only the engines that it is measured against let the
host read selections. Steps with a prompt's chunk go through `chunk.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.attend import launch as attend_launch
from plugins.attend.prefill import attend_chunk
from plugins.cache.batch import StepGroup
from plugins.cache.session import Session
from plugins.cache.support import overlaps, summary_of
from plugins.cache.tiers.host import launch
from plugins.cache.tiers.host.by_host import copy_pages
from plugins.cache.tiers.host.chunk import begin_chunk, plan_chunk, read_prompt, settle_chunk, stage_next
from plugins.cache.tiers.host.store import Offload
from plugins.nodes.node import OpConfig
from plugins.select.cuda import choose_units
from trtkv.plan import SelectPlan


@dataclass(frozen=True, slots=True)
class Target:
    """Where new tokens go: pools keys and values, stored tokens lens [B] and pages table [B, M] in them; homes [B, M] are the summaries' pages."""

    keys: Tensor
    values: Tensor
    lens: Tensor
    table: Tensor
    homes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Desk:
    """What the launches of a decode step hand to each other, for B sequences: see `recall.cu`; found [5, B] is of all layers, the rest of one.

    likely [L, B, Hk, K + 1] holds what every offloaded layer's next selection will probably be: it is read while the next layer selects.
    """

    found: Tensor
    places: Tensor
    rows: Tensor
    likely: Tensor
    pending: Tensor


def begin_append(session: Session, layer: int, lens: Tensor, slots: Tensor, table: Tensor) -> Target:
    """Say where an offloaded layer's new tokens are written: into the ring, or into pages of their own where a prompt's chunk is among them."""
    store, step = _store(session), session.step(layer)
    if not _only_answers(step):
        chunk = plan_chunk(store, step)
        keys, values = begin_chunk(store, layer, chunk)
        return Target(keys, values, chunk.lens, chunk.table, chunk.homes)
    desk = _desk(session, lens.shape[0])
    if layer == store.shape.layers[0]:
        _open(session, desk, lens, slots, table)
    tier = store.tiers[layer]
    return Target(tier.keys, tier.values, desk.found[1], desk.found[0][:, None], desk.found[2][:, None])


def end_append(session: Session, layer: int) -> None:
    """Move a chunk's tokens to where they belong; summaries that torch makes read complete pages right behind that."""
    store, step = _store(session), session.step(layer)
    if not _only_answers(step):
        settle_chunk(store, layer, plan_chunk(store, step), beside=summary_of(session.plan, layer) is not None)


def attend(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Attend in an offloaded layer; inputs and result as the torch form's."""
    query, starts, _, stored, slots, table, _, selection = inputs[:8]
    lens, pages, step = stored[0], table[0], session.step(layer)
    if step.decoding:
        _decode(session, layer, config, query, lens, slots, pages, selection, out)
        if _store(session).recall.ahead and _only_answers(step):
            _recall_ahead(session, layer, config, query, lens, slots, pages)
        return
    store = _store(session)
    prompts = [b for b, row in enumerate(step.rows) if not row.decodes]
    stage_next(store, layer, step, prompts)
    for b in prompts:
        row = step.rows[b]
        rows = slice(row.start, row.start + row.new)
        keys, values = read_prompt(store, layer, step, b)
        own = query[rows].unflatten(1, (config.num_q_heads, config.head_dim))
        out[rows] = attend_chunk(own, keys, values, config.scale).flatten(1)
    which = step.decode_rows
    if len(which):
        places = starts[:-1][which]
        own = query[places]
        answer = own.new_empty(own.shape)
        _decode(session, layer, config, own, lens[which], slots[which], pages[which], selection[which], answer)
        out[places] = answer


def _decode(
    session: Session, layer: int, config: OpConfig, query: Tensor, lens: Tensor, slots: Tensor, table: Tensor, selection: Tensor, out: Tensor
) -> None:
    store, desk, step = _store(session), _desk(session, lens.shape[0]), session.step(layer)
    tier, shape, overlap = store.tiers[layer], store.shape, overlaps(session, table)
    if not _only_answers(step):
        _open(session, desk, lens, slots, table)
    by_host = store.recall.engine != "kernel"
    if not store.recall.reuse:
        tier.held.fill_(-1)
    launch.recall_pages(
        tier, shape, selection, lens, slots, table, desk.places, desk.rows, num_slots=store.num_slots, ahead=False,
        flush=not store.recall.ahead and _only_answers(step), pending=desk.pending if by_host else None, overlap=overlap and store.recall.reuse,
    )  # fmt: skip
    if by_host:
        copy_pages(store, layer, [row for row in step.rows if row.decodes], desk.pending)
    unit = shape.unit
    given = (query, tier.keys, tier.values, desk.rows, desk.found[4], desk.places, out)
    attend_launch.attend_list(*given, unit=unit, scale=config.scale, overlap=overlap, settled=True)


def _recall_ahead(session: Session, layer: int, config: OpConfig, query: Tensor, lens: Tensor, slots: Tensor, table: Tensor) -> None:
    """Recall what this step's query chooses for the next one, beside what follows of this step."""
    store, plan, desk = _store(session), _plan(session, layer), _desk(session, lens.shape[0])
    store.kept += (query, lens, slots, table)
    likely = desk.likely[store.shape.layers.index(layer)]
    with store.lane.behind():
        choose_units(session, layer, config, plan, query, lens, slots, table, likely, ahead=desk.found[3])
    with store.lane.after():
        launch.recall_pages(
            store.tiers[layer], store.shape, likely, lens, slots, table, None, None, num_slots=store.num_slots, ahead=True, flush=True,
            blocks=store.recall.blocks,
        )  # fmt: skip


def _open(session: Session, desk: Desk, lens: Tensor, slots: Tensor, table: Tensor) -> None:
    store = _store(session)
    layer = store.shape.layers[0]
    row_bytes = session.plan.head_dim * store.tiers[layer].keys.element_size()
    budget = session.reads_all_up_to(layer)
    launch.open_pages(store.shape, lens, slots, table, desk.found, row_bytes, num_slots=store.num_slots, budget=budget)


def _desk(session: Session, batch: int) -> Desk:
    return session.scratch(("recall", batch), lambda: _furnish(session, batch))


def _furnish(session: Session, batch: int) -> Desk:
    shape, heads = _store(session).shape, session.plan.num_kv_heads
    make = lambda *size: torch.zeros(size, dtype=torch.int32, device=session.device)  # noqa: E731
    lists = (batch, heads, shape.entries + 1)
    likely = make(len(shape.layers), *lists)
    return Desk(make(5, batch), make(*lists), make(batch, shape.places), likely, make(batch, heads, 1 + 2 * shape.frames))


def _only_answers(step: StepGroup) -> bool:
    """Whether all sequences are behind their prompt and have one new token."""
    return all(row.answers for row in step.rows)


def _store(session: Session) -> Offload:
    assert session.offload is not None
    return session.offload


def _plan(session: Session, layer: int) -> SelectPlan:
    plan = session.plan.select[layer]
    assert plan is not None
    return plan

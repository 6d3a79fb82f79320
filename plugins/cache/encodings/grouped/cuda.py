"""KvAppend and KvAttend over encoded caches: decode steps by kernels that read lengths on the device, prompts in full precision until complete."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.append import launch as plain
from plugins.attend.op import attend_units
from plugins.attend.prefill import attend_with_lse
from plugins.cache.batch import Row, StepGroup
from plugins.cache.encodings.grouped import launch, launch_list, recalled
from plugins.cache.encodings.grouped.layout import TILE
from plugins.cache.encodings.grouped.settle import Settler
from plugins.cache.encodings.grouped.store import EncodedStore
from plugins.cache.encodings.grouped.summaries import summarize_prompt, summarize_step
from plugins.cache.encodings.per_token import cuda as replaced
from plugins.cache.encodings.per_token.store import ReplacedStore
from plugins.cache.indexes.summary import kept_of
from plugins.cache.session import Session
from plugins.cache.support import overlaps
from plugins.device.driver import arch
from plugins.nodes.node import OpConfig


def append(session: Session, store: EncodedStore, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Rotate and store new tokens; inputs and result as the plain op's. What a decode step's token completes is encoded with it."""
    qkv, positions, starts, _, stored, slots, table, rope = inputs[:8]
    group, step = session.plan.page_groups[layer], session.step(layer)
    norms, kept = (inputs[9], inputs[10]) if len(inputs) > 9 else None, kept_of(session, layer)
    for b, row in enumerate(step.rows):
        if not row.answers:
            keys, values = store.prompt(layer, row)
            plain.launch(
                qkv, positions, starts[b : b + 2], stored[group][b : b + 1], store.one_page, rope, norms, out, keys, values, None, None,
                eps=config.rms_eps, group=plain.NO_GROUP, summary=plain.NONE, longest=row.new,
            )  # fmt: skip
            if kept.kind != plain.NONE:
                summarize_prompt(keys[0], table[group][b], store.pages[layer], kept, row.stored - row.new, row.stored)
    which = _answering(step)
    if store.settler is not None:
        if which is None or len(which):
            _append_to_rings(session, store, store.settler, layer, config, inputs, which, out)
    elif which is None or len(which):
        begin, lens, own, pages = (x if which is None else x[which] for x in (starts[:-1], stored[group], slots, table[group]))
        alone = which is None and overlaps(session, table)
        homes, away = pages, store.away
        if away is not None and away.covers(layer):
            pages, alone = recalled.ring_table(away, step, own), False
        launch.append(qkv, positions, begin, lens, own, pages, rope, norms, out, store.pages[layer], eps=config.rms_eps, overlap=alone, early=alone)
        if kept.kind != plain.NONE:
            summarize_step(store.pages[layer], lens, own, pages, kept, homes=homes, overlap=alone)


def _append_to_rings(
    session: Session, store: EncodedStore, settler: Settler, layer: int, config: OpConfig, inputs: Sequence[Tensor], which: Tensor | None, out: Tensor
) -> None:  # fmt: skip
    """Append the newest tokens of sequences `which` (None: all) to their slots' rings, which are pages of a plain cache; nothing is encoded."""
    qkv, positions, starts, _, stored, slots, table, rope = inputs[:8]
    group, step, pages = session.plan.page_groups[layer], session.step(layer), store.pages[layer]
    norms = (inputs[9], inputs[10]) if len(inputs) > 9 else None
    lens, to, overlap = stored[group], out, which is None and overlaps(session, table)
    if which is not None:
        places, lens, slots = starts[:-1][which], lens[which], slots[which]
        qkv, positions, to = qkv[places], positions[places], out.new_empty(len(places), out.shape[1])
        starts = torch.arange(len(places) + 1, dtype=torch.int32, device=out.device)
    plain.launch(
        qkv, positions, starts, lens, settler.ring_table(step, slots), rope, norms, to, pages.keys, pages.values, None, None,
        eps=config.rms_eps, group=plain.NO_GROUP, summary=plain.NONE, longest=1, overlap=overlap, early=overlap,
    )  # fmt: skip
    if which is not None:
        out[places] = to


def attend(session: Session, store: EncodedStore, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Attend to the stored or selected tokens; inputs and result as the plain op's. What stays of a prompt that this step completes is encoded."""
    query, starts, _, stored, slots, table = inputs[:6]
    group, step = session.plan.page_groups[layer], session.step(layer)
    selection = inputs[7] if len(inputs) > 7 else None
    for b, row in enumerate(step.rows):
        if not row.answers:
            _attend_prompt(session, store, layer, config, row, query, None if selection is None else selection[b], out)
            if row.seen >= row.prompt:
                store.encode_prompt(layer, row, table[group][b])
    if session.reads_all:
        selection = None
    which = _answering(step)
    if isinstance(store, ReplacedStore):
        _decode_replaced(session, store, layer, config, inputs, which, out)
    elif which is None:
        _decode(session, store, layer, config, query, stored[group], slots, table[group], selection, out)
    elif len(which):
        places = starts[:-1][which]
        own, lists = query[places], None if selection is None else selection[which]
        answer = own.new_empty(own.shape)
        # Lengths and pages are gathered just before, and attention reads them before it waits.
        _decode(session, store, layer, config, own, stored[group][which], slots[which], table[group][which], lists, answer, overlap=False)
        out[places] = answer


def _decode_replaced(
    session: Session, store: ReplacedStore, layer: int, config: OpConfig, inputs: Sequence[Tensor], which: Tensor | None, out: Tensor
) -> None:  # fmt: skip
    query, starts, seen, stored, slots, table = inputs[:6]
    if which is None:
        replaced.decode(session, store, layer, config, query, stored[0], seen, slots, table[0], out)
    elif len(which):
        places = starts[:-1][which]
        answer = query.new_empty(len(which), query.shape[1])
        replaced.decode(session, store, layer, config, query[places], stored[0][which], seen[which], slots[which], table[0][which], answer)
        out[places] = answer


def _attend_prompt(
    session: Session, store: EncodedStore, layer: int, config: OpConfig, row: Row, query: Tensor, chosen: Tensor | None, out: Tensor
) -> None:  # fmt: skip
    """Attend to a prompt that is being read; a chunk of one token reads what it chose, [H, K + 1], where the prompt is longer than that."""
    rows, plan = slice(row.start, row.start + row.new), session.own.plan(layer, row.slot)
    keys, values = (x[0, :, : row.stored] for x in store.prompt(layer, row))
    chunk = query[rows].unflatten(1, (config.num_q_heads, config.head_dim))
    if chosen is not None and plan is not None and row.decodes and row.stored > max(plan.budget, session.dense_below):
        units = chosen[:, : min(plan.width, -(-row.stored // plan.unit))].long()
        out[rows] = attend_units(config, plan, row, chunk[0], units, lambda tokens: (_taken(keys, tokens), _taken(values, tokens))).flatten()
        return
    answer, lse = attend_with_lse(chunk, keys, values, config.scale)
    out[rows] = answer.flatten(1)
    if store.keeper is not None:
        store.keeper.observe(layer, row, chunk, keys, lse)


def _taken(x: Tensor, tokens: Tensor) -> Tensor:
    """Return tokens [H, K] of keys or values x [H, S, D]."""
    return x.gather(1, tokens[..., None].expand(-1, -1, x.shape[2]))


def _decode(
    session: Session, store: EncodedStore, layer: int, config: OpConfig, query: Tensor, lens: Tensor, slots: Tensor, table: Tensor,
    chosen: Tensor | None, out: Tensor, overlap: bool = True,
) -> None:  # fmt: skip
    batch, heads, dim, plan = lens.shape[0], config.num_kv_heads, config.head_dim, session.plan.select[layer]
    overlap = overlap and overlaps(session, table)
    if chosen is None or plan is None:
        scratch = session.scratch(("attend encoded", batch), lambda: _scratch(store, config, batch, table.shape[1] * session.plan.page_size))
        assert isinstance(scratch, launch.Scratch) and scratch.parts.shape[4] == dim and scratch.parts.shape[1] == heads
        launch.attend(query, store.pages[layer], table, lens, slots, out, scratch, scale=config.scale, overlap=overlap)
        return
    sequences, alone = batch * (chosen.shape[1] // heads), chosen.shape[1] != heads
    most = launch_list.most_tiles(plan) * TILE
    scratch = session.scratch(("attend encoded list", sequences, most), lambda: _scratch(store, config, sequences, most, listed=True, alone=alone))
    if store.away is not None and store.away.covers(layer):
        assert isinstance(scratch, launch.Scratch)
        recalled.attend(session, store, layer, config, plan, query, lens, slots, table, chosen, out, scratch, overlap)
        return
    given = (query, store.pages[layer], table, lens, slots, chosen, out, scratch)
    if alone:
        launch_list.attend_per_head(*given, unit=plan.unit, scale=config.scale)
        return
    launch_list.attend_list(*given, unit=plan.unit, scale=config.scale, overlap=overlap)


def _scratch(store: EncodedStore, config: OpConfig, batch: int, most_tokens: int, *, listed: bool = False, alone: bool = False) -> launch.Scratch:
    device, name, rows = store.device, arch(), batch * config.num_kv_heads
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if listed:
        block = launch.attend_block(store.form, config.head_dim, name, True)
        splits = launch.choose_splits(block, rows, multiprocessors, most_tokens)
    else:
        block, splits = launch.choose_shape(store.form, config.head_dim, name, rows, multiprocessors, most_tokens)
    group = 1 if alone else config.num_q_heads // config.num_kv_heads
    return launch.Scratch.allocate(batch, config.num_kv_heads, group, config.head_dim, splits, device, block)


def _answering(step: StepGroup) -> Tensor | None:
    """Return which of the B sequences decode behind their prompt, int64; None where all do."""
    key = "answering"
    if key not in step.cache:
        own = [b for b, row in enumerate(step.rows) if row.answers]
        step.cache[key] = None if len(own) == len(step.rows) else torch.tensor(own, dtype=torch.int64, device=step.device)
    return step.cache[key]  # type: ignore[return-value]

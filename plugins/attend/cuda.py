"""KvAttend on an NVIDIA GPU: sequences with one new token by the list kernel or the dense one, chunks of a prompt by the library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.attend import launch, launch_dense
from plugins.attend.per_head import attend_per_head
from plugins.attend.prefill import attend_with_lse
from plugins.cache.batch import StepGroup
from plugins.cache.encodings.grouped import cuda as encoded
from plugins.cache.eviction.observe import evicts_in_step, looks_at, observe, observe_chunk, remember
from plugins.cache.eviction.per_head import ops as ragged
from plugins.cache.gather import read_pages
from plugins.cache.session import Session
from plugins.cache.support import overlaps
from plugins.cache.tiers.host import cuda as offloaded
from plugins.nodes.node import OpConfig
from plugins.select import told


def attend(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Attend to the stored tokens; inputs and result as the torch form's."""
    if session.encoded is not None:
        encoded.attend(session, session.encoded, layer, config, inputs, out)
        return
    if session.ragged is not None:
        ragged.attend_by_kernels(session, layer, config, inputs, out)
        return
    query, _, _, stored, _, table = inputs[:6]
    group, step = session.plan.page_groups[layer], session.step(layer)
    selection = inputs[7] if len(inputs) > 7 else None
    if session.offload is not None and session.offload.covers(layer):
        offloaded.attend(session, layer, config, inputs, out)
        return
    if step.decoding:
        _decode(session, layer, config, query, stored[group], table[group], selection, out)
        evictor = evicts_in_step(session, step.rows)
        if evictor is not None:
            evictor.attended(layer, query, stored, inputs[2], inputs[4], table)
        else:
            remember(session, layer, step.rows, query, inputs[2], inputs[4])
        return
    for row in step.rows:
        if not row.decodes:
            rows = slice(row.start, row.start + row.new)
            chunk = query[rows].unflatten(1, (config.num_q_heads, config.head_dim))
            keys, values = (read_pages(session.buffer(name, layer), row)[:, : row.stored] for name in ("keys", "values"))
            answer, lse = attend_with_lse(chunk, keys, values, config.scale)
            out[rows] = answer.flatten(1)
            observe_chunk(session, layer, row, chunk, keys, lse)
    which = step.decode_rows
    if len(which):
        places, lens, pages = _decoding(step, inputs[1], stored[group], table[group])
        own, chosen = query[places], None if selection is None or session.reads_all else selection[which]
        answer = own.new_empty(own.shape)
        # Lengths and pages may have been gathered just before, and attention reads them before it waits.
        _decode(session, layer, config, own, lens, pages, chosen, answer, overlap=False)
        out[places] = answer
        for row in step.rows:
            if row.decodes and looks_at(session, row):
                observe(session, layer, row, query[row.start : row.start + 1].unflatten(1, (config.num_q_heads, -1)))


def _decoding(step: StepGroup, starts: Tensor, lens: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of the sequences that have one new token, their lengths and their pages; gathered once for all layers."""
    if "decoding" not in step.cache:
        which = step.decode_rows
        step.cache["decoding"] = (starts[:-1][which], lens[which], table[which])
    return step.cache["decoding"]  # type: ignore[return-value]


def _decode(
    session: Session, layer: int, config: OpConfig, query: Tensor, lens: Tensor, table: Tensor, selection: Tensor | None, out: Tensor,
    overlap: bool = True,
) -> None:  # fmt: skip
    plan = session.plan.select[layer]
    keys, values = session.buffer("keys", layer), session.buffer("values", layer)
    if plan is None or selection is None or session.reads_all:
        scratch = _scratch(session, config, lens.shape[0], query.device)
        launch_dense.attend_dense(query, keys, values, table, lens, out, *scratch, scale=config.scale, overlap=overlap)
        return
    if selection.shape[1] != keys.shape[1]:
        attend_per_head(query, keys, values, table, lens, selection, out, unit=plan.unit, scale=config.scale)
        return
    overlap = overlap and (overlaps(session, table) or launch.begins_early(lens.shape[0] * keys.shape[1], launch.device_arch()))
    launch.attend_list(query, keys, values, table, lens, selection, out, unit=plan.unit, scale=config.scale, overlap=overlap, settled=True)
    told.attended(session)


def _scratch(session: Session, config: OpConfig, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    group = config.num_q_heads // config.num_kv_heads
    plan = launch_dense.DenseScratch.plan(group, config.head_dim, sms)
    return session.scratch(("attend", batch), lambda: plan.allocate(device))

"""KvSelect on an NVIDIA GPU: score, then choose, both launches reading lengths and pages on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_select import launch, launch_pages, op
from trtkv.plugins.kv_select.launch_speculate import speculate
from trtkv.plugins.session import Session
from trtkv.plugins.support import overlaps, summary_kind


def select(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Choose units for the sequences that decode; inputs and result as the torch form's, what prefill rows hold is not read."""
    plan, step = session.plan.select[layer], session.step(layer)
    assert plan is not None, f"layer {layer} selects nothing"
    if summary_kind(session.plan, layer) is None:
        op.select(session, layer, config, inputs, out)
        return
    query, starts, _, stored, slots, table = inputs[:6]
    fresh = [row.slot for row in step.rows if not row.answers]
    if plan.speculative and fresh:
        session.buffer("previous_query", layer)[fresh] = torch.nan
    if not any(row.decodes for row in step.rows):
        return
    group = session.plan.page_groups[layer]
    asking = query if step.decoding else query.index_select(0, starts[1:] - 1)
    if plan.speculative:
        remembered, tau = session.buffer("previous_query", layer), float(plan.meaning.fields["tau"])
        asking = speculate(asking, remembered, slots, tau, config.num_kv_heads)
    _launch(session, layer, config, plan, asking, stored[group], table[group], out)


def _launch(session: Session, layer: int, config: OpConfig, plan: SelectPlan, query: Tensor, lens: Tensor, table: Tensor, out: Tensor) -> None:
    batch, page = table.shape[0], session.plan.page_size
    units = table.shape[1] * page // plan.unit
    scores, parts = session.scratch(("select", batch, units, plan.pooling), lambda: _allocate(batch, units, config, plan, query.device))
    threshold, overlap = session.reads_all_up_to(layer), overlaps(session, table)
    common = {"budget": threshold, "scale": config.scale, "pooling": plan.pooling, "overlap": overlap}
    if summary_kind(session.plan, layer) == "fier":
        launch.fier_score(query, session.words(layer), session.ranges(layer), table, lens, scores, parts, page_size=page, **common)
    else:
        bounds = session.buffer("page_bounds", layer)
        launch_pages.score_pages(query, bounds, None, table, lens, scores, parts, kind="box", unit=plan.unit, **common)
    launch.select_units(
        scores, parts, lens, out, budget=threshold, sink=plan.sink, window=plan.window, unit=plan.unit, group=plan.group, pooling=plan.pooling,
        overlap=overlap,
    )  # fmt: skip


def _allocate(batch: int, units: int, config: OpConfig, plan: SelectPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    group = config.num_q_heads // config.num_kv_heads
    if plan.unit == 1:
        rows = batch * config.num_kv_heads
        return launch.Scratch.plan(rows, group, plan.pooling, units, sms).allocate(rows, device)
    return launch_pages.PageScratch.plan(batch, config.num_kv_heads, group, plan.pooling, units, sms).allocate(device)

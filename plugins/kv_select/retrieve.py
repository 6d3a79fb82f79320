"""Selection and attention of a layer in one launch, for few sequences: when that is done, what it needs, and lists for those who read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_select import launch, launch_pages, launch_retrieve
from trtkv.plugins.session import Session
from trtkv.plugins.support import Summary, outliers, overlaps, summary_of


@dataclass(frozen=True, slots=True)
class Together:
    """A launch that scores, chooses and attends, what its blocks tell each other, and the cut [B, Hk, 2] int32 for outliers."""

    retrieval: launch_retrieve.Retrieval
    mail: Tensor
    stamps: Tensor
    cut: Tensor


def together(session: Session, layer: int, config: OpConfig, table: Tensor) -> Together | None:
    """Return the scratch of the one launch for tables [B, M], which layers use in turn; None where a selection and attention are launched apart.

    KvSelect and KvAttend ask this alike: then the first leaves everything to the second. Only steps in which every sequence decodes are launched so.
    """
    plan, summary = session.plan.select[layer], summary_of(session.plan, layer)
    if plan is None or summary is None or plan.speculative or session.lists == "apart" or not session.step(layer).decoding:
        return None
    if session.offload is not None or session.encoded is not None or session.ragged is not None or session.reads_all:
        return None
    batch, units = table.shape[0], table.shape[1] * session.plan.page_size // plan.unit
    key = ("retrieve", batch, units, plan.unit, plan.pooling)
    return session.scratch(key, lambda: _furnish(batch, units, config, plan, summary, table.device))


def _furnish(batch: int, units: int, config: OpConfig, plan: SelectPlan, summary: Summary, device: torch.device) -> Together | None:
    group, sms = config.num_q_heads // config.num_kv_heads, multiprocessors(device)
    retrieval = launch_retrieve.plan_retrieval(plan, summary, batch, config.num_kv_heads, group, config.head_dim, units, sms, launch.arch())
    if retrieval is None:
        return None
    return Together(retrieval, *retrieval.allocate(device), torch.empty(batch, config.num_kv_heads, 2, dtype=torch.int32, device=device))


def retrieve(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor, one: Together) -> None:
    """Attend to what is chosen; inputs and result as KvAttend's, of which the selection is written only where the session keeps lists."""
    plan, summary = session.plan.select[layer], summary_of(session.plan, layer)
    assert plan is not None and summary is not None, f"layer {layer} selects nothing"
    page_group = session.plan.page_groups[layer]
    query, lens, slots, table = inputs[0], inputs[3][page_group], inputs[4], inputs[5][page_group]
    keys, values = session.buffer("keys", layer), session.buffer("values", layer)
    record = None
    if session.lists == "kept":
        rows, units = lens.shape[0] * config.num_kv_heads, table.shape[1] * session.plan.page_size // plan.unit
        record = launch_retrieve.Record(torch.zeros(rows, units, dtype=torch.uint8, device=out.device))
    overlap = overlaps(session, table)
    handed, own = (
        (keys, values, table, lens, out, one.mail, one.stamps, one.retrieval),
        launch.OwnBudgets(slots, session.own.budgets, session.dense_below),
    )
    common = {
        "width": config.select_width, "budget": session.reads_all_up_to(layer), "own": own, "scale": config.scale, "pooling": plan.pooling,
        "sink": plan.sink, "window": plan.window, "record": record,
    }  # fmt: skip
    if summary.scorer == "fier":
        launch_retrieve.fier_retrieve(query, session.words(layer), session.ranges(layer), *handed, overlap=overlap, **common)
    else:
        vectors, beside, cut = index(session, layer, plan, summary, lens, table, one.cut, budget=session.scores_from(layer), overlap=overlap)
        launch_retrieve.page_retrieve(query, vectors, beside, *handed, kind=summary.scorer, unit=plan.unit, cut=cut, overlap=overlap, **common)
    if record is not None:
        write_lists(record.marks, inputs[7])


def index(
    session: Session, layer: int, plan: SelectPlan, summary: Summary, lens: Tensor, table: Tensor, cut: Tensor, *, budget: int, overlap: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the buffers that a page scorer reads, and where outliers are kept the cut, found by a launch."""
    vectors, beside = session.buffer(summary.vectors, layer), None if summary.beside is None else session.buffer(summary.beside, layer)
    count = outliers(plan)
    if not count:
        return vectors, beside, None
    assert beside is not None
    launch_pages.outlier_cut(beside, table, lens, cut, unit=plan.unit, outliers=count, budget=budget, overlap=overlap)
    return vectors, beside, cut


def write_lists(marks: Tensor, lists: Tensor) -> None:
    """Write lists [B, Hk, K + 1] as KvSelect does, from marks [B Hk, U]; a row without any is read whole."""
    width, units = lists.shape[2] - 1, marks.shape[1]
    counts = marks.sum(1, dtype=torch.int32)
    every = torch.arange(units, dtype=torch.int32, device=marks.device)
    ascending = torch.where(marks.bool(), every, units).sort(1).values[:, :width]
    rows = lists.view(-1, width + 1)
    rows.fill_(-1)
    rows[:, : ascending.shape[1]] = torch.where(ascending < units, ascending, -1)
    rows[:, -1] = torch.where(counts > 0, counts, -1)


def multiprocessors(device: torch.device) -> int:
    """Count a GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

"""KvAppend on an NVIDIA GPU: one launch of the append kernel, summaries included; every per-step value is read on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_append import launch
from trtkv.plugins.kv_select import indexes
from trtkv.plugins.session import Session
from trtkv.plugins.support import overlaps, summary_kind


def append(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Rotate and store new tokens; inputs and result as the torch form's."""
    qkv, positions, starts, _, stored, _, table, rope = inputs[:8]
    group, step = session.plan.page_groups[layer], session.step(layer)
    tokens, summary, bits, meta = _summary(session, layer)
    launch.launch(
        qkv, positions, starts, stored[group], table[group], rope, (inputs[9], inputs[10]) if len(inputs) > 9 else None, out,
        session.buffer("keys", layer), session.buffer("values", layer), bits, meta,
        eps=config.rms_eps, group=tokens, summary=summary, longest=step.longest, overlap=step.decoding and overlaps(session, table),
    )  # fmt: skip
    select = session.plan.select[layer]
    if select is not None and summary == launch.NONE:
        indexes.find(select).update(session, layer, select)


def _summary(session: Session, layer: int) -> tuple[int, int, Tensor | None, Tensor | None]:
    """Return tokens of a group, kind of summary, bits and bounds that the kernel keeps."""
    kind, select = summary_kind(session.plan, layer), session.plan.select[layer]
    if kind is None or select is None:
        return 16, launch.NONE, None, None
    if kind == "fier":
        return select.group, launch.FIER, session.words(layer), session.ranges(layer)
    return select.group, launch.MINMAX, None, session.buffer("page_bounds", layer)

"""KvAppend on an NVIDIA GPU: one launch of the append kernel, summaries included; every per-step value is read on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.append import launch, launch_token
from plugins.cache.encodings.grouped import cuda as encoded
from plugins.cache.eviction.per_head import ops as ragged
from plugins.cache.indexes import index as indexes
from plugins.cache.indexes.summary import kept_of
from plugins.cache.session import Session
from plugins.cache.support import begins_early, overlaps
from plugins.cache.tiers.host import cuda as recall
from plugins.nodes.node import OpConfig
from plugins.select import told


def append(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Rotate and store new tokens; inputs and result as the torch form's."""
    if session.encoded is not None:
        encoded.append(session, session.encoded, layer, config, inputs, out)
        return
    if session.ragged is not None:
        ragged.append_by_kernels(session, layer, config, inputs, out)
        return
    qkv, positions, starts, _, stored, _, table, rope = inputs[:8]
    group, step = session.plan.page_groups[layer], session.step(layer)
    kept = kept_of(session, layer)
    if session.offload is not None and session.offload.covers(layer):
        to = recall.begin_append(session, layer, stored[group], inputs[5], table[group])
    else:
        to = recall.Target(session.buffer("keys", layer), session.buffer("values", layer), stored[group], table[group])
    bulky, select = not launch_token.takes(kept.kind), session.plan.select[layer]
    overlap = step.decoding and overlaps(session, table, bulky=bulky)
    words = told.tell(session, layer, overlap=overlap) if kept.kind == launch.FIER else None
    # What is read early was written by the step's first kernel, and behind that one comes one that lets nothing begin early: whatever stands between
    # that and this. With keys on the host a kernel just in front of this says where tokens go.
    launch.launch(
        qkv, positions, starts, to.lens, to.table, rope, (inputs[9], inputs[10]) if len(inputs) > 9 else None, out,
        to.keys, to.values, kept.bits, kept.meta, homes=to.homes,
        eps=config.rms_eps, group=kept.group, summary=kept.kind, longest=step.longest, overlap=overlap,
        early=overlap and begins_early(session, layer, table, bulky=bulky), settled=overlap and session.offload is None,
        told=words,
    )  # fmt: skip
    if session.offload is not None and session.offload.covers(layer):
        recall.end_append(session, layer)
    if select is not None and kept.kind == launch.NONE:
        indexes.find(select).update(session, layer, select)

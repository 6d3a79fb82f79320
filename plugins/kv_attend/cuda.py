"""KvAttend on an NVIDIA GPU: sequences with one new token by the list kernel, chunks of a prompt by the library."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trtkv.plugins._torch.paged import read_pages
from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_attend import launch, op
from trtkv.plugins.kv_attend.prefill import attend_chunk
from trtkv.plugins.session import Session
from trtkv.plugins.support import overlaps


def attend(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Attend to the stored tokens; inputs and result as the torch form's."""
    query, _, _, stored, _, table = inputs[:6]
    group, step = session.plan.page_groups[layer], session.step(layer)
    selection = inputs[7] if len(inputs) > 7 else None
    if selection is not None and selection.shape[1] != config.num_kv_heads:
        op.attend(session, layer, config, inputs, out)
        return
    if step.decoding:
        _decode(session, layer, config, query, stored[group], table[group], selection, out)
        return
    for row in step.rows:
        if not row.decodes:
            rows = slice(row.start, row.start + row.new)
            chunk = query[rows].unflatten(1, (config.num_q_heads, config.head_dim))
            keys, values = (read_pages(session.buffer(name, layer), row)[:, : row.stored] for name in ("keys", "values"))
            out[rows] = attend_chunk(chunk, keys, values, config.scale).flatten(1)
    which = step.decode_rows
    if len(which):
        places = inputs[1][:-1][which]
        own, lens, pages = query[places], stored[group][which], table[group][which]
        chosen = None if selection is None else selection[which]
        answer = own.new_empty(own.shape)
        _decode(session, layer, config, own, lens, pages, chosen, answer)
        out[places] = answer


def _decode(
    session: Session, layer: int, config: OpConfig, query: Tensor, lens: Tensor, table: Tensor, selection: Tensor | None, out: Tensor
) -> None:
    plan = session.plan.select[layer]
    keys, values = session.buffer("keys", layer), session.buffer("values", layer)
    unit = plan.unit if plan is not None and selection is not None else 1
    launch.attend_list(query, keys, values, table, lens, selection, out, unit=unit, scale=config.scale, overlap=overlaps(session, table))

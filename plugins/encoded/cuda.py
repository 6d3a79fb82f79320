"""KvAppend and KvAttend over encoded caches: decode steps by kernels that read lengths on the device, prompts in full precision until complete."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtkv.plugins._device.driver import arch
from trtkv.plugins.encoded import launch
from trtkv.plugins.encoded.store import EncodedStore
from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_append import launch as plain
from trtkv.plugins.kv_attend.prefill import attend_with_lse
from trtkv.plugins.rows import StepGroup
from trtkv.plugins.session import Session
from trtkv.plugins.support import overlaps


def append(session: Session, store: EncodedStore, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Rotate and store new tokens; inputs and result as the plain op's. What a decode step's token completes is encoded with it."""
    qkv, positions, starts, _, stored, slots, table, rope = inputs[:8]
    group, step = session.plan.page_groups[layer], session.step(layer)
    norms = (inputs[9], inputs[10]) if len(inputs) > 9 else None
    for b, row in enumerate(step.rows):
        if not row.answers:
            keys, values = store.prompt(layer, row)
            plain.launch(
                qkv, positions, starts[b : b + 2], stored[group][b : b + 1], store.one_page, rope, norms, out, keys, values, None, None,
                eps=config.rms_eps, group=plain.NO_GROUP, summary=plain.NONE, longest=row.new,
            )  # fmt: skip
    which = _answering(step)
    if which is None or len(which):
        begin, lens, own, pages = (x if which is None else x[which] for x in (starts[:-1], stored[group], slots, table[group]))
        alone = which is None and overlaps(session, table)
        launch.append(qkv, positions, begin, lens, own, pages, rope, norms, out, store.pages[layer], eps=config.rms_eps, overlap=alone)


def attend(session: Session, store: EncodedStore, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Attend to the stored tokens; inputs and result as the plain op's. What stays of a prompt that this step completes is encoded behind it."""
    query, starts, _, stored, slots, table = inputs[:6]
    group, step = session.plan.page_groups[layer], session.step(layer)
    for b, row in enumerate(step.rows):
        if not row.answers:
            rows = slice(row.start, row.start + row.new)
            keys, values = (x[0, :, : row.stored] for x in store.prompt(layer, row))
            chunk = query[rows].unflatten(1, (config.num_q_heads, config.head_dim))
            answer, lse = attend_with_lse(chunk, keys, values, config.scale)
            out[rows] = answer.flatten(1)
            if store.keeper is not None:
                store.keeper.observe(layer, row, chunk, keys, lse)
            if row.stored >= row.prompt:
                store.encode_prompt(layer, row, table[group][b])
    which = _answering(step)
    if which is None:
        _decode(session, store, layer, config, query, stored[group], slots, table[group], out)
    elif len(which):
        places = starts[:-1][which]
        own = query[places]
        answer = own.new_empty(own.shape)
        _decode(session, store, layer, config, own, stored[group][which], slots[which], table[group][which], answer)
        out[places] = answer


def _decode(
    session: Session, store: EncodedStore, layer: int, config: OpConfig, query: Tensor, lens: Tensor, slots: Tensor, table: Tensor, out: Tensor
) -> None:
    batch, heads, dim = lens.shape[0], config.num_kv_heads, config.head_dim
    scratch = session.scratch(("attend encoded", batch), lambda: _scratch(store, config, batch, table.shape[1] * session.plan.page_size))
    assert isinstance(scratch, launch.Scratch) and scratch.parts.shape[4] == dim and scratch.parts.shape[1] == heads
    launch.attend(query, store.pages[layer], table, lens, slots, out, scratch, scale=config.scale, overlap=overlaps(session, table))


def _scratch(store: EncodedStore, config: OpConfig, batch: int, most_tokens: int) -> launch.Scratch:
    device = store.device
    splits = launch.choose_splits(
        launch.attend_block(store.form, config.head_dim, arch()),
        batch * config.num_kv_heads,
        torch.cuda.get_device_properties(device).multi_processor_count,
        most_tokens,
    )
    group = config.num_q_heads // config.num_kv_heads
    return launch.Scratch.allocate(batch, config.num_kv_heads, group, config.head_dim, splits, device)


def _answering(step: StepGroup) -> Tensor | None:
    """Return which of the B sequences decode behind their prompt, int64; None where all do."""
    key = "answering"
    if key not in step.cache:
        own = [b for b, row in enumerate(step.rows) if row.answers]
        step.cache[key] = None if len(own) == len(step.rows) else torch.tensor(own, dtype=torch.int64, device=step.device)
    return step.cache[key]  # type: ignore[return-value]

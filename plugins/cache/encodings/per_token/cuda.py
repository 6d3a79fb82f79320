"""KvAttend over single encoded tokens and the newest, and behind the last layer the exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.attend import launch_dense
from plugins.cache.encodings.per_token import launch
from plugins.cache.encodings.per_token.store import ReplacedStore
from plugins.cache.eviction import launch as compaction
from plugins.cache.session import Session
from plugins.nodes.node import OpConfig


def decode(
    session: Session, store: ReplacedStore, layer: int, config: OpConfig, query: Tensor, lens: Tensor, seen: Tensor, slots: Tensor, table: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Attend one token a sequence: query, out [B, Hq D], lens [B] stored tokens, seen [B] all there were, slots [B], table [B, M] int32.

    The last layer's call lets the newest tokens of all layers become codes, so that no step asks the host for anything.
    """
    batch, stacks = lens.shape[0], store.stacks
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    plan = launch_dense.DenseScratch.plan(config.num_q_heads // config.num_kv_heads, config.head_dim, sms)
    scratch = session.scratch(("attend", batch), lambda: plan.allocate(query.device))
    codes = launch_dense.Nibbles(*(stacks[name][layer] for name in launch_dense.NIBBLES))
    newest = stacks["keys"][layer], stacks["values"][layer]
    lse, notes = session.scratch(("exchange", batch), lambda: launch.scratch(stacks, batch, store.rule))
    launch_dense.attend_replaced(query, *newest, codes, table, lens, slots, out, *scratch, lse[layer], scale=config.scale)
    compaction.remember(query, seen, slots, stacks["last_queries"][layer])
    if layer == store.plan.num_layers - 1:
        store.exchange(lse, notes, table, lens, seen, slots)

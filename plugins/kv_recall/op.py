"""Recall in torch, for any device and dtype: what the kernels do, one KV head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_recall.reference import assign
from trtkv.plugins.kv_recall.store import Offload
from trtkv.plugins.kv_select import indexes
from trtkv.plugins.rows import Row
from trtkv.plugins.selection import choose, pool, spread


def recall(store: Offload, layer: int, row: Row, pages: Tensor, stored: int, *, ahead: bool) -> Tensor:
    """Bring the listed pages [Hk, n] int64 of a sequence of `stored` tokens into frames: their places [Hk, n] int64.

    ahead says that they are for the next step: `stored` then counts its token too.
    """
    tier, shape = store.tiers[layer], store.shape
    newest, clock = (stored - 1) // shape.page_size, 2 * stored - ahead
    held, stamps, places = tier.held[row.slot].tolist(), tier.stamps[row.slot].tolist(), []
    for head, wanted in enumerate(pages.tolist()):
        found, copies = assign(wanted, newest, shape.ring, held[head], stamps[head], clock)
        places.append(found)
        for page, frame in copies:
            source = tier.host[row.page_numbers[page], head]
            tier.keys[row.slot * shape.frames + frame, head], tier.values[row.slot * shape.frames + frame, head] = source[0], source[1]
        tier.moved[int(ahead)] += len(copies)
    tier.held[row.slot] = torch.tensor(held, dtype=torch.int32, device=tier.held.device)
    tier.stamps[row.slot] = torch.tensor(stamps, dtype=torch.int32, device=tier.held.device)
    return torch.tensor(places, dtype=torch.int64, device=tier.held.device)


def read_places(store: Offload, layer: int, row: Row, places: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [Hk, K, D] of tokens [Hk, K] int64 of a sequence, whose pages lie at places [Hk, K] int64."""
    tier, newest = store.tiers[layer], (row.stored - 1) // store.shape.page_size
    heads, size = tier.keys.shape[1], store.shape.page_size
    rows = store.place_rows(row.slot, newest)[places]
    at = ((rows * heads + torch.arange(heads, device=rows.device)[:, None]) * size + tokens % size).flatten()
    read = lambda pool: pool.view(-1, pool.shape[-1]).index_select(0, at).view(heads, -1, pool.shape[-1])  # noqa: E731
    return read(tier.keys), read(tier.values)


def every_page(store: Offload, stored: int, heads: int) -> Tensor:
    """List all pages of a sequence that is read whole: [Hk, n] int64."""
    return torch.arange(-(-stored // store.shape.page_size), device=store.device).expand(heads, -1)


def likely_pages(session: object, layer: int, config: OpConfig, plan: SelectPlan, row: Row, query: Tensor) -> Tensor:
    """List the pages [Hk, n] int64 that this step's query [Hq, D] chooses for the next step, which has one token more."""
    store: Offload = session.offload  # type: ignore[attr-defined]
    if row.stored + 1 <= session.reads_all_up_to(layer):  # type: ignore[attr-defined]
        return every_page(store, row.stored + 1, config.num_kv_heads)
    scores, forced = indexes.find(plan).score(session, layer, plan, row, query)  # type: ignore[arg-type]
    pooled = pool(scores, config.num_kv_heads, config.scale, plan.pooling)
    return choose(plan, pooled, row.stored + 1, spread(forced, len(pooled)))

"""Recall that the host carries out: it reads which pages are missing, copies them and waits, in every layer of every step.

"blocking" is what ArkVale (NeurIPS 2024) and systems like it do, one copy a page and KV head; "copies" hands all copies of a layer to the driver at
once. Neither can be captured. They are here to be measured against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from trtkv.errors import EngineError
from trtkv.plugins.kv_recall.store import Offload
from trtkv.plugins.rows import Row

Copy = tuple[int, int, int]  # to, from, bytes


def copy_pages(store: Offload, layer: int, rows: Sequence[Row], pending: Tensor) -> None:
    """Make the copies that pending [B, Hk, 1 + 2 F] int32 asks for, for the decoding sequences of the step, and wait for them."""
    listed = pending[: len(rows)].cpu()  # waits for the selection, so the copies may go to any stream
    copies = list(_copies(store, layer, rows, listed))
    if copies:
        stream = _stream(store.device)
        (_copy_batch if store.recall.engine == "copies" else _copy_each)(copies, stream.cuda_stream)
        stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream for copies: a batch of them is refused by the default stream."""
    return torch.cuda.Stream(device)


def _copies(store: Offload, layer: int, rows: Sequence[Row], listed: Tensor) -> Iterator[Copy]:
    """Name the contiguous pieces of every page: keys and values of a head, token by token where the host's layout parts them; a record's parts."""
    if store.shape.parts:
        yield from _record_copies(store, layer, rows, listed)
        return
    tier, frames = store.tiers[layer], store.shape.frames
    width, heads, size = tier.host.element_size(), tier.keys.shape[1], tier.keys.shape[2]
    page_step, head_step, part_step, token_step, _ = (step * width for step in tier.host.stride())
    row_bytes = tier.keys.shape[3] * width
    pieces, piece = (1, size * row_bytes) if token_step == row_bytes else (size, row_bytes)
    for row, lists in zip(rows, listed.tolist(), strict=True):
        for head, one in enumerate(lists):
            for page, frame in zip(one[1 : 1 + 2 * one[0] : 2], one[2 : 2 + 2 * one[0] : 2], strict=True):
                source = tier.host.data_ptr() + row.page_numbers[page] * page_step + head * head_step
                offset = ((row.slot * frames + frame) * heads + head) * size * row_bytes
                for part, pool in enumerate((tier.keys, tier.values)):
                    for i in range(pieces):
                        yield pool.data_ptr() + offset + i * piece, source + part * part_step + i * token_step, piece


def _record_copies(store: Offload, layer: int, rows: Sequence[Row], listed: Tensor) -> Iterator[Copy]:
    tier, frames, heads = store.coded[layer], store.shape.frames, store.shape.num_kv_heads
    page_step, head_step, _ = tier.host.stride()
    for row, lists in zip(rows, listed.tolist(), strict=True):
        for head, one in enumerate(lists):
            for page, frame in zip(one[1 : 1 + 2 * one[0] : 2], one[2 : 2 + 2 * one[0] : 2], strict=True):
                source = tier.host.data_ptr() + row.page_numbers[page] * page_step + head * head_step
                for pool, size in zip(tier.pools, store.shape.parts, strict=True):
                    yield pool.data_ptr() + ((row.slot * frames + frame) * heads + head) * size, source, size
                    source += size


def _copy_each(copies: Sequence[Copy], stream: int) -> None:
    from cuda.bindings import driver

    for to, source, size in copies:
        _check(driver.cuMemcpyHtoDAsync(to, source, size, stream))


def _copy_batch(copies: Sequence[Copy], stream: int) -> None:
    from cuda.bindings import driver

    kind = driver.CUmemcpyAttributes()
    kind.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    to, sources = ([driver.CUdeviceptr(one[i]) for one in copies] for i in range(2))
    _check(driver.cuMemcpyBatchAsync(to, sources, [one[2] for one in copies], len(copies), [kind], [0], 1, stream))


def _check(answer: tuple[object, ...]) -> None:
    if int(answer[0]) != 0:  # type: ignore[call-overload]
        raise EngineError(f"the CUDA driver answered {answer[0]!r} to a copy from host memory", "Check the driver with trtkv doctor.")

"""Sending what is kept of a prompt, block by block."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from plugins.cache.pieces import Piece
from trtkv.runtime.handoff import wire
from trtkv.runtime.handoff.blocks import Blocks, copy, cut, sizes_of, used
from trtkv.runtime.handoff.kept import Kept
from trtkv.runtime.handoff.transports import Transport, agreed
from trtkv.runtime.handoff.wire import Broken

WAIT_S = 15.0  # for a block of host memory


def send(
    link: socket.socket, kept: Kept, ask: Mapping[str, Any], blocks: Blocks, transports: Sequence[Transport], device: torch.device
) -> int:  # fmt: skip
    """Send what another engine asks for of a kept prompt, without the pages that it knows; returns the bytes of it. Raises Broken."""
    known = ask.get("known")
    known = known if isinstance(known, int) and known > 0 else 0
    pieces = [Piece(one.buffer, one.rows[known:]) for one in kept.pieces] + kept.own
    sizes = sizes_of(pieces)
    transport, total = agreed(transports, ask.get("transports")), 0
    kept.wait()
    own = blocks.take(1, time.monotonic() + WAIT_S)
    try:
        wire.write(link, {"note": kept.note, "sizes": sizes, "transport": transport.name, "hello": transport.hello()})
        transport = agreed(transports, [wire.read(link).get("go")])
        for spans in cut(sizes):
            if kept.gone:
                raise Broken("the prompt was cancelled")
            with _beside(device):
                for span in spans:
                    copy(pieces[span.piece], span.first, span.count, own[0], span.at, out=True)
            transport.send(link, own[0], used(spans, sizes))
            total += used(spans, sizes)
        wire.read(link)
    finally:
        blocks.give(own)
    return total


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Copy beside the steps, and wait for it."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        yield
    stream.synchronize()

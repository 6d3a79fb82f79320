"""Frames over a connection: JSON of a stated length, and blocks of bytes whose length both sides know."""

from __future__ import annotations

import json
import socket
from typing import Any

from torch import Tensor

from trtkv.errors import EngineError

MOST_FRAME = 64 << 20  # bytes of a JSON frame
MOST_ASKED = 1 << 20  # of the first one, whose sender is not known yet
LENGTH = 4


class Broken(EngineError):
    """The other side of a connection has ended, is silent, or says what makes no sense."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a prompt's transfer between two engines broke ({why})", "Send the request again.")


def write(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a frame; raises Broken."""
    data = json.dumps(message).encode()
    try:
        link.sendall(len(data).to_bytes(LENGTH, "little") + data)
    except OSError as error:
        raise Broken(_words(error)) from None


def read(link: socket.socket, most: int = MOST_FRAME) -> dict[str, Any]:
    """Take a frame; raises Broken, also for what is longer than `most` bytes or is no JSON object."""
    head = bytearray(LENGTH)
    _fill(link, memoryview(head))
    size = int.from_bytes(head, "little")
    if size > most:
        raise Broken(f"a message of {size} bytes")
    data = bytearray(size)
    _fill(link, memoryview(data))
    try:
        found = json.loads(data)
    except ValueError:
        raise Broken("a message that is no JSON") from None
    if not isinstance(found, dict):
        raise Broken("a message that is no object")
    return found


def write_block(link: socket.socket, block: Tensor, size: int) -> None:
    """Send the first bytes of a block."""
    try:
        link.sendall(_bytes(block, size))
    except OSError as error:
        raise Broken(_words(error)) from None


def read_block(link: socket.socket, block: Tensor, size: int) -> None:
    """Take the first bytes of a block."""
    _fill(link, _bytes(block, size))


def _bytes(block: Tensor, size: int) -> memoryview:
    return memoryview(block[:size].numpy())  # type: ignore[arg-type]


def _fill(link: socket.socket, into: memoryview) -> None:
    while into:
        try:
            count = link.recv_into(into)
        except OSError as error:
            raise Broken(_words(error)) from None
        if not count:
            raise Broken("the other engine has closed the connection")
        into = into[count:]


def _words(error: OSError) -> str:
    return "the other engine is silent" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()

"""Streams beside the step's own, and the order of what runs on them.

A decode step of an offloaded engine has two branches. The step's stream appends, selects, recalls what is missing and attends, layer by layer; a
layer's recall stands in front of its attention on the same stream. Behind a layer's attention the side stream takes over: it selects with this step's
query for the next step. A third stream follows it: it writes a page that the step completed to the host, and recalls what was selected into frames
which this layer's attention no longer reads; so a layer's pages still move while the next one selects. The step waits for both at its end, before the
next step may append to the ring, and nowhere else. Captured, the branches and the edges between them are one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A second CUDA stream that branches off the current one, a third that follows it, and their joining with it again; in a capture too."""

    def __init__(self, device: torch.device) -> None:
        """Create the streams."""
        self._stream, self._follower = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._used: set[torch.cuda.Stream] = set()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Enqueue what is done inside behind all that the current stream has, and behind what the side stream has."""
        yield from self._enqueue(self._stream, torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def after(self) -> Iterator[None]:
        """Enqueue what is done inside behind all that the side stream has, and behind what was enqueued so before; beside what that gets next."""
        yield from self._enqueue(self._follower, self._stream)

    def join(self) -> None:
        """Let the current stream wait for these, if anything runs there."""
        for stream in self._used:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._used.clear()

    def _enqueue(self, stream: torch.cuda.Stream, first: torch.cuda.Stream) -> Iterator[None]:
        stream.wait_stream(first)
        self._used.add(stream)
        with torch.cuda.stream(stream):
            yield

"""Streams beside the step's own, and the order of what runs on them.

A decode step of an offloaded engine has two branches. The step's stream appends, selects, recalls what is missing and attends, layer by layer; a
layer's recall stands in front of its attention on the same stream. Behind a layer's attention the side stream takes over: it writes a page that
the step completed to the host, selects with this step's query for the next step, and recalls that into frames which this layer's attention no
longer reads. The step waits for the side stream at its end, before the next step may append to the ring, and nowhere else. Captured, both
branches and the two kinds of edges between them are one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A second CUDA stream that branches off the current one and is joined to it again, in a capture too."""

    def __init__(self, device: torch.device) -> None:
        """Create the stream."""
        self._stream = torch.cuda.Stream(device)
        self._branched = False

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Enqueue what is done inside behind all that the current stream has, and behind what this one has."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._branched = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for this one, if anything runs there."""
        if self._branched:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._branched = False

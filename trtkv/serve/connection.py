"""Connections that end when nothing of them is answered for too long: idle ones, and those whose request comes drop by drop."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

CLOSE_S = 1.0  # for a client of TLS to agree to the end of an idle connection


class Connection(H11Protocol):
    """uvicorn's connection with a limit for a request's head, which uvicorn waits for without end."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take a piece, which prolongs nothing unless it ends the head."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of one that was answered before it was complete."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        self._stop()

    def shutdown(self) -> None:
        """Close an idle connection; the others end with their answers."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(CLOSE_S, self.transport.abort)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(self.config.timeout_keep_alive, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

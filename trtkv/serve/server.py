"""The process of `trtkv serve`: sockets, signals, the order in which things begin and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

import uvicorn

from trtkv.errors import ConfigError
from trtkv.serve.app import Settings, make_app
from trtkv.serve.backend import Backend
from trtkv.serve.metrics import Prometheus

GRACE_S = 5.0  # to write the errors of aborted requests


def listen(host: str, port: int) -> socket.socket:
    """Take an address before anything is loaded; raises ConfigError when that cannot be. Connections are refused until it is served."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # With the protocol named, asyncio turns Nagle's algorithm off: every piece leaves at once instead of waiting 40 ms for an acknowledgement.
        own = socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened to: {error}", "Choose another --host or --port.") from None
    return own


def serve(
    own: socket.socket,
    start: Callable[[Prometheus], Awaitable[Mapping[str, Backend]]],
    settings: Settings,
    drain_s: float,
    ready: Callable[[], None] = lambda: None,
    log_level: str = "warning",
) -> None:
    """Serve until SIGTERM or Ctrl-C, then let requests finish for drain_s seconds; a second signal ends at once.

    start makes the backends inside the event loop; ready is called once connections are taken. From log_level info on, every request is logged.
    """
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    metrics = Prometheus()
    backends: dict[str, Backend] = {}

    async def main() -> None:
        backends.update(await start(metrics))
        app = make_app(backends, metrics, settings)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="off", timeout_keep_alive=30,
            timeout_graceful_shutdown=int(drain_s + GRACE_S),
        )  # fmt: skip
        server = Draining(config, backends, drain_s, ready)
        try:
            await server.serve([own])
        finally:
            # The interpreter must not end under a running engine.
            await asyncio.gather(*(one.close(0.0) for one in backends.values()))

    asyncio.run(main())


class Draining(uvicorn.Server):
    """Closes the door at the first signal and ends what is still going after drain_s with an error that clients can read."""

    def __init__(self, config: uvicorn.Config, backends: Mapping[str, Backend], drain_s: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._backends, self._drain_s, self._ready = backends, drain_s, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections, and say so."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, wait for the others."""
        ending = asyncio.create_task(self._end_after(time.monotonic() + self._drain_s))
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_after(self, deadline_s: float) -> None:
        await asyncio.sleep(max(0.0, deadline_s - time.monotonic()))
        await asyncio.gather(*(one.close(0.0) for one in self._backends.values()))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Listen to signals without raising them again after the shutdown: a server that was stopped has not failed."""
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                loop.add_signal_handler(one, self._signal)
        yield

    def _signal(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

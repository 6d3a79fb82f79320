"""A collector of traces on this machine: what is sent to it over OTLP and HTTP."""

from __future__ import annotations

import http.server
import threading
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Listens at `url` while the block lasts, and afterwards still knows its spans."""

    def __init__(self) -> None:
        received: list[tuple[str, bytes]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._received = received
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self) -> list[tuple[str, Any]]:
        """Return the name of the service that sent it, and every span."""
        found = []
        for path, data in list(self._received):
            if path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    service = attributes(resource.resource)["service.name"]
                    found += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return found


def attributes(of: Any) -> dict[str, Any]:
    """Return a span's or a resource's attributes."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}

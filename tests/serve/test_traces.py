"""Traces: what a collector receives, and that nothing of OpenTelemetry's SDK is touched without one."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.console import Capture, complaint
from tests.serve.rig import Server

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


class Collector(http.server.BaseHTTPRequestHandler):
    received: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    received: list[tuple[str, bytes]] = []
    kind = type("Own", (Collector,), {"received": received})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()
        thread.join()


def spans(received: list[tuple[str, bytes]]) -> list[Any]:
    found = []
    for path, data in received:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == "trtkv"
            found += [span for scope in resource.scope_spans for span in scope.spans]
    return found


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_span_continues_the_clients_trace(engine_dir: Path, collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    url, received = collector
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"max_tokens": 6, "ignore_eos": True}
    with Server(engine_dir, "--no-triton", "--device", "cpu", "--otlp-endpoint", url) as server:
        sent = {"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "mine-1"}
        usage = server.http.post(TEXT, json={**body, "prompt": "hello"}, headers=sent).json()["usage"]
        messages = [{"role": "user", "content": "hello"}]
        server.http.post(CHAT, json={**body, "messages": messages, "stream": True})
        server.http.post(TEXT, json={**body, "prompt": [9999]})
        server.http.get("/health")
        assert server.stop() == 0
    text, chat, refused = spans(received)
    assert text.trace_id.hex() == trace and text.parent_span_id.hex() == parent and text.name == "text_completion tiny" and text.kind == 2
    told = attributes(text)
    assert told["gen_ai.operation.name"] == "text_completion" and told["gen_ai.request.model"] == "tiny" and told["trtkv.request_id"] == "mine-1"
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] and told["gen_ai.usage.output_tokens"] == 6
    assert 0 <= told["gen_ai.latency.time_in_queue"] <= told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert [one.string_value for one in told["gen_ai.response.finish_reasons"].values] == ["length"]
    assert abs(text.end_time_unix_nano - text.start_time_unix_nano - told["gen_ai.latency.e2e"] * 1e9) < 1000
    assert (
        chat.name == "chat tiny" and chat.trace_id.hex() != trace and not chat.parent_span_id and attributes(chat)["gen_ai.usage.output_tokens"] == 6
    )
    assert attributes(refused)["http.response.status_code"] == 400 and attributes(refused)["error.type"] == "400"


def test_a_collector_that_is_not_there_hinders_nothing(engine_dir: Path) -> None:
    with Server(engine_dir, "--no-triton", "--device", "cpu", "--otlp-endpoint", "http://127.0.0.1:9") as server:
        assert server.http.post(TEXT, json={"prompt": "hello", "max_tokens": 2}).status_code == 200
        assert server.stop() == 0


def test_nothing_is_imported_without_the_flag() -> None:
    code = "import sys, trtkv.serve.server; sys.exit(any(one.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for one in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_missing_or_no_address(engine_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ("serve", engine_dir, "--no-triton", "--otlp-endpoint")
    assert "'collector:4318' is no address" in complaint(capsys, *serve, "collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert "pip install 'trtkv[otel]'" in complaint(capsys, *serve, "http://localhost:4318")

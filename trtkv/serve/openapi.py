"""The OpenAPI document, made from the very models that read the requests."""

from __future__ import annotations

from functools import cache
from typing import Any

import trtkv
from trtkv.serve.schema import ChatRequest, CompletionRequest

REFUSALS = {
    400: "A parameter or prompt that cannot be served.", 401: "The API key is missing or wrong.", 404: "No such model.",
    413: "The body is too large.", 415: "The body is no JSON by its Content-Type.", 429: "Too many requests wait.", 500: "The engine failed on it.",
    503: "The engine is not available.",
}  # fmt: skip
OBJECT = {"type": "object"}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the server."""
    schemas: dict[str, Any] = {"Error": _error()}
    for kind in (ChatRequest, CompletionRequest):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = schema
    paths = {
        "/v1/chat/completions": {"post": _generation("chat", "ChatRequest")},
        "/v1/completions": {"post": _generation("completions", "CompletionRequest")},
        "/v1/models": {"get": _plain("models", "What is served.", keyed=True)},
        "/v1/models/{model}": {
            "get": {
                **_plain("model", "One engine.", keyed=True, refusals=(401, 404)),
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            }
        },
        "/health": {"get": _plain("health", "The process answers.")},
        "/ready": {"get": _plain("ready", "Every engine generates.", refusals=(503,))},
        "/metrics": {"get": _plain("metrics", "Prometheus' text format.", kind="text/plain", schema={"type": "string"})},
        "/status": {"get": _plain("status", "What the engines are and hold.", keyed=True)},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "trtkv", "version": trtkv.__version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _generation(name: str, schema: str) -> dict[str, Any]:
    kinds = {"application/json": {"schema": OBJECT}, "text/event-stream": {}}
    return {
        "operationId": name,
        "security": [{"key": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}},
        "responses": {"200": {"description": "The answer, whole or as a stream.", "content": kinds}, **_refusals(tuple(REFUSALS))},
    }


def _plain(
    name: str,
    what: str,
    *,
    keyed: bool = False,
    refusals: tuple[int, ...] = (),
    kind: str = "application/json",
    schema: dict[str, Any] = OBJECT,
) -> dict[str, Any]:
    security = {"security": [{"key": []}, {}]} if keyed else {}
    told = (401, *refusals) if keyed else refusals
    return {"operationId": name, **security, "responses": {"200": {"description": what, "content": {kind: {"schema": schema}}}, **_refusals(told)}}


def _refusals(codes: tuple[int, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(code): {"description": REFUSALS[code], "content": content} for code in codes}


def _error() -> dict[str, Any]:
    fields = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "integer", "null"]},
    }
    return {"type": "object", "required": ["error"], "properties": {"error": {"type": "object", "properties": fields, "required": list(fields)}}}

"""Events turned into the OpenAI API's JSON: whole answers, stream chunks, log probabilities, usage."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from trtkv.runtime.batcher import Event
from trtkv.runtime.tokenizer import BAD, Tokenizer
from trtkv.serve.errors import describe
from trtkv.serve.reading.parts import Part, joined
from trtkv.serve.reading.reader import Reader


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of one request: of its prompt, of those how many were not computed again, and of its answers."""

    prompt: int
    cached: int
    answered: int


class Shape(Protocol):
    """How one kind of request is answered: whole, or as a stream of server-sent events."""

    def whole(self, events: Sequence[Sequence[Event]], counts: Counts) -> dict[str, Any]:
        """Return a complete answer; events are those of each choice."""

    def begin(self, count: int) -> bytes:
        """Return what opens a stream of so many choices."""

    def more(self, events: Sequence[Event], counts: Counts | None) -> bytes:
        """Return events as they come, with the counts so far where they are wanted."""

    def fail(self, error: Exception) -> bytes:
        """Return what says that an answer cannot continue."""

    def end(self, counts: Counts | None) -> bytes:
        """Return what closes a stream, with the counts where they are wanted."""


@dataclass(slots=True)
class Choices:
    """What chat completions and completions share: an answer is a list of choices, a stream of chunks with a delta of one choice each."""

    id: str
    model: str
    created_s: int
    tokenizer: Tokenizer | None
    logprobs: bool = False
    kind: ClassVar[str]

    @property
    def head(self) -> dict[str, Any]:
        """Fields that every object of one answer shares."""
        return {"id": self.id, "created": self.created_s, "model": self.model}

    def fail(self, error: Exception) -> bytes:
        """Return an error event."""
        return sse(describe(error))

    def end(self, counts: Counts | None) -> bytes:
        """Return the chunk with the counts where they are wanted, and the end."""
        return (self._sent([], counts) if counts is not None else b"") + b"data: [DONE]\n\n"

    def usage(self, counts: Counts) -> dict[str, Any]:
        """Return the counts in the API's form."""
        return usage(counts)

    def _sent(self, choices: list[dict[str, Any]], counts: Counts | None = None) -> bytes:
        counted = {"usage": self.usage(counts)} if counts is not None else {}
        return sse({**self.head, "object": self.kind, "choices": choices, **counted})

    def _token(self, id_: int | None, logprob: float | None) -> dict[str, Any]:
        text = self.text_of(id_)
        return {"token": text, "logprob": max(-9999.0, logprob or 0.0), "bytes": None if BAD in text else list(text.encode())}

    def text_of(self, id_: int | None) -> str:
        """Return a token as it looks inside a text."""
        if id_ is None or self.tokenizer is None:
            return "" if id_ is None else f"token_id:{id_}"
        return token_text(self.tokenizer, id_)


@dataclass(slots=True)
class CompletionShape(Choices):
    """Completions; echo[i] is put before the i-th answer."""

    echo: Sequence[str] = ()
    offsets: dict[int, int] = field(default_factory=dict)
    kind = "text_completion"

    def whole(self, events: Sequence[Sequence[Event]], counts: Counts) -> dict[str, Any]:
        """Return a complete answer."""
        texts = (self._echoed(index) + "".join(one.text for one in own) for index, own in enumerate(events))
        choices = [
            {"index": index, "text": text, "logprobs": self._logprobs(index, own), "finish_reason": own[-1].finish_reason}
            for index, (text, own) in enumerate(zip(texts, events, strict=True))
        ]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage(counts)}

    def begin(self, count: int) -> bytes:
        """Return the prompts that are echoed."""
        echoes = [{"index": index, "text": self._echoed(index), "logprobs": None, "finish_reason": None} for index in range(count)]
        return b"".join(self._sent([one]) for one in echoes) if self.echo else b""

    def more(self, events: Sequence[Event], counts: Counts | None) -> bytes:
        """Return a chunk for every choice that has something to say: clients look at the first choice of a chunk only."""
        chunks = []
        for index, own in by_choice(events):
            text, reason = "".join(one.text for one in own), own[-1].finish_reason
            if text or reason or self.logprobs:
                choice = {"index": index, "text": text, "logprobs": self._logprobs(index, own), "finish_reason": reason}
                chunks.append(self._sent([choice], counts))
        return b"".join(chunks)

    def _echoed(self, index: int) -> str:
        return self.echo[index] if self.echo else ""

    def _logprobs(self, index: int, events: Sequence[Event]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        events = with_logprobs(events)
        tokens = [self.text_of(one.token_id) for one in events]
        start, offsets = self.offsets.get(index, 0), []
        for text in tokens:
            offsets.append(start)
            start += len(text)
        self.offsets[index] = start
        tops = [{self.text_of(id_): value for id_, value in reversed(one.top)} for one in events]
        return {"tokens": tokens, "token_logprobs": [one.logprob for one in events], "top_logprobs": tops, "text_offset": offsets}


@dataclass(slots=True)
class ChatShape(Choices):
    """Chat completions; a reader for every choice parts its text into reasoning, calls of tools and content."""

    readers: Sequence[Reader] = ()
    thought: int = 0
    called: dict[int, int] = field(default_factory=dict)
    kind = "chat.completion.chunk"

    def whole(self, events: Sequence[Sequence[Event]], counts: Counts) -> dict[str, Any]:
        """Return a complete answer."""
        choices = [
            {"index": index, "message": self._message(index, own), "logprobs": self._logprobs(own), "finish_reason": self._reason(index, own)}
            for index, own in enumerate(events)
        ]
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": self.usage(counts)}

    def begin(self, count: int) -> bytes:
        """Return the role of every choice."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._sent([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]) for index in range(count))

    def more(self, events: Sequence[Event], counts: Counts | None) -> bytes:
        """Return a chunk for every part of every choice; the last one of a choice says why it ended."""
        chunks = []
        for index, own in by_choice(events):
            deltas = [_delta(one) for one in self.read(index, own)]
            reason, logprobs = self._reason(index, own), self._logprobs(own)
            if not deltas and (reason or logprobs):
                deltas = [{}]
            for place, delta in enumerate(deltas):
                told = {"logprobs": None if place else logprobs, "finish_reason": reason if place + 1 == len(deltas) else None}
                chunks.append(self._sent([{"index": index, "delta": delta, **told}], counts))
        return b"".join(chunks)

    def read(self, index: int, events: Sequence[Event]) -> list[Part]:
        """Return the parts that are certain with some events of a choice; tokens of reasoning and calls are counted."""
        reader, parts = self.readers[index], []
        for one in events:
            self.thought += reader.reasons and one.token_id is not None
            parts += reader.push(one.text, one.finish_reason is not None)
        parts = joined(parts)
        self.called[index] = self.called.get(index, 0) + sum(bool(one.name) for one in parts)
        return parts

    def usage(self, counts: Counts) -> dict[str, Any]:
        """Return the counts in the API's form."""
        return {**usage(counts), "completion_tokens_details": {"reasoning_tokens": self.thought}}

    def _message(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        parts = self.read(index, events)
        content, reasoning = ("".join(one.text for one in parts if one.kind == kind) for kind in ("content", "reasoning"))
        calls = [_call(one) for one in parts if one.name]
        for one in parts:
            if one.kind == "call":
                calls[one.call]["function"]["arguments"] += one.text
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return {**message, **({"reasoning_content": reasoning} if reasoning else {}), **({"tool_calls": calls} if calls else {})}

    def _reason(self, index: int, events: Sequence[Event]) -> str | None:
        reason = events[-1].finish_reason
        return "tool_calls" if reason == "stop" and self.called[index] else reason

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        tokens = [
            {**self._token(one.token_id, one.logprob), "top_logprobs": [self._token(*pair) for pair in one.top]} for one in with_logprobs(events)
        ]
        return {"content": tokens, "refusal": None}


def _delta(part: Part) -> dict[str, Any]:
    if part.kind != "call":
        return {"content" if part.kind == "content" else "reasoning_content": part.text}
    piece = _call(part) if part.name else {"function": {"arguments": part.text}}
    return {"tool_calls": [{"index": part.call, **piece}]}


def _call(part: Part) -> dict[str, Any]:
    return {"id": call_id(), "type": "function", "function": {"name": part.name, "arguments": ""}}


def call_id() -> str:
    """Return a new call's id: nine letters and digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def by_choice(events: Sequence[Event]) -> list[tuple[int, list[Event]]]:
    """Return events by the choice that they belong to."""
    return [(index, [one for one in events if one.request == index]) for index in dict.fromkeys(one.request for one in events)]


def with_logprobs(events: Sequence[Event]) -> list[Event]:
    """Return the events that carry a token's log probability."""
    return [one for one in events if one.token_id is not None and one.logprob is not None]


@lru_cache(maxsize=1 << 18)
def token_text(tokenizer: Tokenizer, id_: int) -> str:
    """Return a token as it looks inside a text: decoders strip a space only at the beginning."""
    return tokenizer.decode([id_, id_])[len(tokenizer.decode([id_])) :]


def usage(counts: Counts) -> dict[str, Any]:
    """Return the token counts of one request."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.answered,
        "total_tokens": counts.prompt + counts.answered,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }


def sse(data: dict[str, Any], event: str = "") -> bytes:
    """Write one server-sent event, with its name where it has one."""
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + dump(data) + b"\n\n"


def dump(data: Any) -> bytes:
    """Write JSON in UTF-8; halves of surrogate pairs, which no UTF-8 holds, as escapes."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()

"""Events turned into the OpenAI API's JSON: whole answers, stream chunks, log probabilities, usage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from trtkv.runtime.batcher import Event
from trtkv.runtime.tokenizer import BAD, Tokenizer


@dataclass(slots=True)
class Shape:
    """How one kind of request is answered; echo[i] is put before the i-th answer."""

    chat: bool
    id: str
    model: str
    created_s: int
    tokenizer: Tokenizer | None
    logprobs: bool = False
    echo: Sequence[str] = ()
    offsets: dict[int, int] = field(default_factory=dict)

    @property
    def head(self) -> dict[str, Any]:
        """Fields that every object of one answer shares."""
        return {"id": self.id, "created": self.created_s, "model": self.model}

    def whole(self, events: Sequence[Sequence[Event]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a complete answer; events are those of each choice."""
        choices = []
        for index, own in enumerate(events):
            text = "".join(one.text for one in own)
            choice: dict[str, Any] = {"index": index}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = self._echoed(index) + text
            choices.append({**choice, "logprobs": self._logprobs(index, own), "finish_reason": own[-1].finish_reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": usage}

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the chunks that open a stream: the role of every choice, or the prompts that are echoed."""
        if not self.chat and not self.echo:
            return []
        begins = [{"delta": {"role": "assistant", "content": ""}} if self.chat else {"text": self._echoed(index)} for index in range(count)]
        return [self._chunk([{"index": index, **one, "logprobs": None, "finish_reason": None}]) for index, one in enumerate(begins)]

    def chunks(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return events as chunks, one for every choice that has something to say: clients look at the first choice of a chunk only."""
        chunks = []
        for index in dict.fromkeys(one.request for one in events):
            own = [one for one in events if one.request == index]
            text, reason = "".join(one.text for one in own), own[-1].finish_reason
            if not text and not reason and not self.logprobs:
                continue
            piece: dict[str, Any] = {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
            chunks.append(self._chunk([{"index": index, **piece, "logprobs": self._logprobs(index, own), "finish_reason": reason}]))
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that ends a stream whose usage was requested."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion.chunk" if self.chat else "text_completion", "choices": choices}

    def _echoed(self, index: int) -> str:
        return self.echo[index] if self.echo else ""

    def _logprobs(self, index: int, events: Sequence[Event]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        told = [one for one in events if one.token_id is not None and one.logprob is not None]
        return self._chat_logprobs(told) if self.chat else self._text_logprobs(index, told)

    def _chat_logprobs(self, events: Sequence[Event]) -> dict[str, Any]:
        return {
            "content": [{**self._token(one.token_id, one.logprob), "top_logprobs": [self._token(*pair) for pair in one.top]} for one in events],
            "refusal": None,
        }

    def _text_logprobs(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        tokens = [self.text_of(one.token_id) for one in events]
        start, offsets = self.offsets.get(index, 0), []
        for text in tokens:
            offsets.append(start)
            start += len(text)
        self.offsets[index] = start
        tops = [{self.text_of(id_): value for id_, value in reversed(one.top)} for one in events]
        return {"tokens": tokens, "token_logprobs": [one.logprob for one in events], "top_logprobs": tops, "text_offset": offsets}

    def _token(self, id_: int | None, logprob: float | None) -> dict[str, Any]:
        text = self.text_of(id_)
        return {"token": text, "logprob": max(-9999.0, logprob or 0.0), "bytes": None if BAD in text else list(text.encode())}

    def text_of(self, id_: int | None) -> str:
        """Return a token as it looks inside a text."""
        if id_ is None or self.tokenizer is None:
            return "" if id_ is None else f"token_id:{id_}"
        return token_text(self.tokenizer, id_)


@lru_cache(maxsize=1 << 18)
def token_text(tokenizer: Tokenizer, id_: int) -> str:
    """Return a token as it looks inside a text: decoders strip a space only at the beginning."""
    return tokenizer.decode([id_, id_])[len(tokenizer.decode([id_])) :]


def usage(prompt_tokens: int, events: int, cached_tokens: int) -> dict[str, Any]:
    """Return the token counts of one request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": events,
        "total_tokens": prompt_tokens + events,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def sse(data: dict[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + dump(data) + b"\n\n"


def dump(data: Any) -> bytes:
    """Write JSON in UTF-8; halves of surrogate pairs, which no UTF-8 holds, as escapes."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()

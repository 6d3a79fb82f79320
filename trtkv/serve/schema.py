"""What clients may send: the OpenAI API's fields with vLLM's additions; everything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, model_validator

from trtkv.errors import RequestError
from trtkv.runtime.sampler import SamplingParams
from trtkv.serve.errors import ApiError

INT64 = 2**63 - 1
Text = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-INT64 - 1, le=INT64)]


class Strict(BaseModel):
    """JSON as it is written: no text is taken for a number, no unknown field is passed over."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """include_usage: end a stream with a chunk that counts tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextFormat(Strict):
    """The one answer format there is."""

    type: Literal["text"]


class Part(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message; fields beside role and content reach the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=4096)] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates read it, with content as one text."""
        content = self.content if isinstance(self.content, str | None) else "".join(part.text for part in self.content)
        return {**(self.model_extra or {}), "role": self.role, "content": content if content is not None else ""}


class Generation(Strict):
    """What both kinds of request share. Sampling follows OpenAI's defaults: temperature 1, top_p 1."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT64)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: Seed | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    budget: int | None = Field(None, ge=1, le=2**31 - 1)
    tau: float | None = Field(None, ge=-1, le=1)
    ignore_eos: bool = False
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-1000, le=1000)
    user: str | None = Field(None, max_length=512)
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def count(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def logprobs_asked(self) -> tuple[bool, int]:
        """Return whether log probabilities are reported, and how many likeliest tokens beside each."""
        raise NotImplementedError

    def limit(self, default: int) -> int:
        """Return the longest answer in tokens; default where the request names none."""
        return self.max_tokens or default

    def sampling(self, default_max_tokens: int, index: int) -> SamplingParams:
        """Return how the index-th answer is sampled; raises RequestError for what cannot be."""
        report, top = self.logprobs_asked()
        given = {
            "top_p": self.top_p, "min_p": self.min_p, "presence_penalty": self.presence_penalty, "stop": self.stop,
            "frequency_penalty": self.frequency_penalty, "repetition_penalty": self.repetition_penalty,
        }  # fmt: skip
        return SamplingParams.checked(
            max_tokens=self.limit(default_max_tokens),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            seed=None if self.seed is None else self.seed + index,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            budget=self.budget,
            tau=self.tau,
            logprobs=int(report),
            top_logprobs=top,
            **{name: value for name, value in given.items() if value is not None},
        )

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        return self


class ChatRequest(Generation):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    max_completion_tokens: int | None = Field(None, ge=1, le=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: TextFormat | None = None
    add_generation_prompt: bool = True

    def logprobs_asked(self) -> tuple[bool, int]:
        """Return whether log probabilities are reported, and how many likeliest tokens beside each."""
        return bool(self.logprobs), self.top_logprobs or 0

    def limit(self, default: int) -> int:
        """Return the longest answer in tokens; default where the request names none."""
        return self.max_completion_tokens or self.max_tokens or default

    @model_validator(mode="after")
    def _no_contradiction(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ")
        return self


Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=256)]
Lists = Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=256)]


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: str | Tokens | Texts | Lists
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def logprobs_asked(self) -> tuple[bool, int]:
        """Return whether log probabilities are reported, and how many likeliest tokens beside each."""
        return self.logprobs is not None, self.logprobs or 0

    @model_validator(mode="after")
    def _no_contradiction(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not served: prompts get no log probabilities")
        return self


def refusal(error: RequestValidationError) -> ApiError:
    """Turn a body that breaks these rules into a 400 with the name of the field at fault."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, int) or part.isidentifier()) or None
    reason = first["msg"].removeprefix("Value error, ")
    problem = f"the parameter '{where}' is not supported" if first["type"] == "extra_forbidden" else f"{where}: {reason}" if where else reason
    return ApiError(400, problem, "See /openapi.json.", param=where)


def user_error(error: RequestError) -> ApiError:
    """Turn what the engine refuses into a 400; a prompt that is too long carries OpenAI's code for it."""
    code = "context_length_exceeded" if "the engine takes" in error.problem else None
    return ApiError(400, error.problem, error.fix, code=code)

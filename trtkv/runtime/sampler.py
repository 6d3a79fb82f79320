"""From logits to the next tokens, and from tokens to the end of an answer."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from trtkv.errors import EngineError, RequestError
from trtkv.runtime.tokenizer import Detokenizer

if TYPE_CHECKING:
    from trtkv.runtime.tokenizer import Tokenizer

COLDEST = 1e-5  # below this temperature the likeliest token is certain to many digits
UNIT = 2.0**40  # integer weight of the likeliest token; sums of a vocabulary stay far below 2**63


class SamplingParams(BaseModel):
    """How one request is sampled and when it ends; raises RequestError for a value out of range.

    max_tokens: longest answer; temperature: 0 takes the likeliest token; top_k: draw from the k likeliest (0: all); top_p: draw from the
    likeliest that together have this probability; min_p: draw from those at least this fraction as likely as the likeliest;
    repetition_penalty: divides the logits of tokens in prompt and answer; presence_penalty and frequency_penalty: taken from the logits of
    tokens in the answer, once or for every time; seed: makes draws reproducible; stop: texts that end the answer and are not part of it;
    stop_token_ids: tokens that do; ignore_eos: go on after the end-of-text token; logprobs: 1 or more reports log probabilities; top_logprobs:
    report so many of the likeliest tokens beside each answered one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = Field(0, ge=0, le=20)
    top_logprobs: int = Field(0, ge=0, le=20)

    def __init__(self, **fields: Any) -> None:
        """Check every field."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                raise RequestError(f"there is no sampling parameter '{name}'", f"There are: {', '.join(type(self).model_fields)}.") from None
            reason = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            raise RequestError(f"{name} is {first['input']!r}", f"It should be {reason}.") from None

    @classmethod
    def checked(cls, **fields: Any) -> SamplingParams:
        """Make parameters from what a user typed; raises RequestError."""
        return cls(**fields)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        value = (value,) if isinstance(value, str) else value
        if isinstance(value, list | tuple) and any(one == "" for one in value):
            raise ValueError("texts of at least one character")
        return () if value is None else value

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < COLDEST or self.top_k == 1


def sample(
    logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> tuple[list[int], list[float | None]]:
    """Choose the next token of every sequence from logits [B, V], as `choose` does; raises EngineError for logits that are not finite."""
    ids, logprobs = choose(logits, params, histories, prompt_lengths)
    if -1 in ids:
        raise not_finite(f"sequence {ids.index(-1)} of the batch")
    return ids, logprobs


def not_finite(what: str) -> EngineError:
    """Return the error for logits of a sequence that are not finite."""
    return EngineError(f"the logits of {what} are not finite", "Build with --dtype float32, and check the checkpoint.")


def choose(
    logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> tuple[list[int], list[float | None]]:
    """Choose the next token of every sequence from logits [B, V]; -1 where they are not finite.

    histories are the tokens of prompt and answer so far, prompt_lengths how many of them are the prompt. Ties go to the lowest id. A draw
    depends on the logits, the seed and the number of tokens answered, never on the rest of the batch; without a seed it is fresh.
    Returns the ids and, where asked for, the log probability of each under the model's own distribution.
    """
    raw = logits.float()
    usable = raw.amax(-1).isfinite()
    scores = _penalized(raw, params, histories, prompt_lengths)
    chosen = scores.argmax(-1)
    drawn = [row for row, one in enumerate(params) if not one.greedy]
    plain = [row for row in drawn if not _filters(params[row])]
    for rows, choose in ((plain, _draw), ([row for row in drawn if _filters(params[row])], _draw_filtered)):
        if rows:
            index = torch.tensor(rows, device=raw.device)
            numbers = [uniform(params[row].seed, len(histories[row]) - prompt_lengths[row]) for row in rows]
            chosen[index] = choose(scores[index], [params[row] for row in rows], numbers)
    ids = chosen.where(usable, -1).tolist()
    return ids, _logprobs(raw, ids, [bool(one.logprobs) and id_ >= 0 for one, id_ in zip(params, ids, strict=True)])


def top_logprobs(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the count likeliest tokens of logits [B, V] with their log probabilities, likeliest first, for every sequence."""
    values, ids = logits.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    pairs = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
    return [list(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]


def uniform(seed: int | None, step: int) -> float:
    """Return the number in (0, 1) that decides the step-th token of a request: a hash of both, the same on every device and version."""
    if seed is None:
        bits = secrets.randbits(52)
    else:
        bits = int.from_bytes(hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest(), "little") >> 12
    return (bits + 0.5) / 2.0**52


class StopChecker:
    """Turns the tokens of one answer into text and says when it ends.

    Text that may be the beginning of a stop string is held back, so that nothing of a stop string is ever returned.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, eos_ids: Iterable[int] = ()) -> None:
        """Begin an answer; eos_ids are the model's end-of-text ids, to which the tokenizer's are added."""
        if params.stop and tokenizer is None:
            raise RequestError("stop strings need a tokenizer", "Give stop_token_ids instead.")
        ends = () if params.ignore_eos else (*eos_ids, *(tokenizer.eos_ids if tokenizer else ()))
        self._ends = frozenset((*ends, *params.stop_token_ids))
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._params, self._count, self._held = params, 0, ""

    def push(self, token: int) -> tuple[str, str | None]:
        """Take a token; returns the text that is final with it, and "stop" or "length" when the answer ends."""
        self._count += 1
        if token in self._ends:
            return self._end("stop")
        text, found = self._scan(self._detokenizer.push(token) if self._detokenizer else "")
        if found:
            return text, "stop"
        if self._count >= self._params.max_tokens:
            rest, reason = self._end("length")
            return text + rest, reason
        return text, None

    def flush(self) -> str:
        """Return the text that is still held back, up to a stop string in it; for an answer that is cut off."""
        return self._end("length")[0]

    def _end(self, reason: str) -> tuple[str, str]:
        text, found = self._scan(self._detokenizer.flush() if self._detokenizer else "")
        rest, self._held = self._held, ""
        return (text, "stop") if found else (text + rest, reason)

    def _scan(self, new: str) -> tuple[str, bool]:
        text = self._held + new
        places = [(at + len(stop), at) for stop in self._params.stop if (at := text.find(stop)) >= 0]
        if places:
            # The stop string that ends first: so the answer does not depend on how its text was cut into tokens.
            self._held = ""
            return text[: min(places)[1]], True
        keep = max((_overlap(text, stop) for stop in self._params.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of text that begins stop."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _filters(one: SamplingParams) -> bool:
    return one.top_k > 0 or one.top_p < 1.0


def _penalized(logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Tensor:
    scores = logits
    for row, one in enumerate(params):
        if one.repetition_penalty == 1.0 and not one.presence_penalty and not one.frequency_penalty:
            continue
        scores = logits.clone() if scores is logits else scores
        seen = torch.tensor(histories[row], dtype=torch.int64, device=logits.device)
        unique = seen.unique()
        values = scores[row, unique]
        scores[row, unique] = torch.where(values > 0, values / one.repetition_penalty, values * one.repetition_penalty)
        answered, counts = seen[prompt_lengths[row] :].unique(return_counts=True)
        scores[row, answered] -= one.presence_penalty + one.frequency_penalty * counts
    return scores


def _weights(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Turn scores [B, V] into integer weights [B, V]: sums of integers are exact, in whatever order a device adds them."""
    settings = torch.tensor([[one.temperature, one.min_p] for one in params], dtype=torch.float32, device=scores.device)
    relative = ((scores - scores.amax(-1, keepdim=True)) / settings[:, :1]).exp()
    relative = relative.where(relative >= settings[:, 1:], 0.0)
    return (relative.double() * UNIT).long()


def _pick(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """Choose positions [B] from weights [B, V]: the first whose running sum exceeds the number's share of the total."""
    sums = weights.cumsum(-1)
    share = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, share.long(), right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def _draw(scores: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    return _pick(_weights(scores, params), numbers)


def _draw_filtered(scores: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    weights = _weights(ordered, params)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    k = torch.tensor([one.top_k or weights.shape[-1] for one in params], device=weights.device)[:, None]
    weights = weights.where(rank < k, 0)
    sums = weights.cumsum(-1)
    p = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=weights.device)[:, None]
    weights = weights.where((sums - weights) < p * sums[:, -1:], 0)
    return ids.gather(-1, _pick(weights, numbers)[:, None])[:, 0]


def _logprobs(logits: Tensor, ids: list[int], wanted: list[bool]) -> list[float | None]:
    out: list[float | None] = [None] * len(ids)
    rows = [row for row, want in enumerate(wanted) if want]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        chosen = torch.tensor([ids[row] for row in rows], device=logits.device)
        values = logits[index].log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
        for row, value in zip(rows, values.tolist(), strict=True):
            out[row] = value
    return out

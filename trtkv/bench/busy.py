"""How much of the time a GPU works while many requests share it, and what lies between two steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtkv.bench.profile import Span, trace_spans
from trtkv.bench.records import make_record
from trtkv.bench.serving import percentile
from trtkv.errors import ConfigError
from trtkv.runtime.batcher import Batcher, Call
from trtkv.runtime.loading import Options, open_engine
from trtkv.runtime.sampler import SamplingParams

FIRST, LAST = ("fetch", "feed"), "sample"  # kernels of a step that chooses its tokens on the device, captured or not
ENOUGH = 0.95  # of the time: the goal
MOST_PLACES = 12  # where a GPU waits that a record names


@dataclass(frozen=True, slots=True)
class Streams:
    """A load: how many sequences run at a time, tokens of prompts and answers (answers differ by up to a half), seconds that are measured."""

    count: int
    prompt_tokens: int
    answer_tokens: int
    seconds: float


def measure_busy(engine_dir: Path, streams: Streams, options: Options, command: str) -> dict[str, Any]:
    """Run streams and return a record: the share of the time in which the GPU works, and the microseconds between two decode steps.

    Raises ConfigError without a GPU, or where the engine does not take as many streams.
    """
    engine = open_engine(engine_dir, options)
    device, limits = engine.cache.device, engine.manifest.limits
    if device.type != "cuda":
        raise ConfigError("there is no GPU to measure", "Run this on a machine with one.")
    if streams.count > limits.max_batch_size:
        raise ConfigError(f"{streams.count} streams are more than the engine's {limits.max_batch_size}", "Build with a larger --max-batch-size.")
    batcher, rng = Batcher(engine, None), random.Random(0)
    calls: list[Call] = []
    _go(batcher, calls, streams, rng, 2.0 * streams.seconds)  # every batch size is captured on the way, every kernel loaded
    steps: list[float] = []
    spans = trace_spans(lambda: steps.extend(_go(batcher, calls, streams, rng, streams.seconds)))
    for call in calls:
        batcher.cancel(call)
    gaps, waits = between(spans), idle_by_place(spans)
    facts = {
        "model": engine.manifest.model_name, "policy": engine.cache.plan.policy, "streams": streams.count, "prompt_tokens": streams.prompt_tokens,
        "answer_tokens": streams.answer_tokens, "executor": engine.stepper.executor.name,
    }  # fmt: skip
    figures: dict[str, Any] = {"busy_share": round(busy_share(spans), 4), "steps": len(steps), "step_p50_ms": round(percentile(steps, 50) * 1e3, 3)}
    figures["idle_shares"] = {place: round(share, 5) for place, share in list(waits.items())[:MOST_PLACES]}
    if gaps:
        figures |= {f"between_steps_p{share}_us": round(percentile(gaps, share), 2) for share in (50, 90, 99)}
    return make_record("busy", command, device, {"passed": bool(spans), "compared": "the profiler saw kernels"}, facts, figures)


def _go(batcher: Batcher, calls: list[Call], streams: Streams, rng: random.Random, seconds: float) -> list[float]:
    """Run streams for so long; returns the seconds of every step."""
    vocab, steps = batcher.engine.manifest.model.vocab_size, []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        calls[:] = [call for call in calls if call.open]
        while len(calls) < streams.count:
            answer = streams.answer_tokens // 2 + rng.randrange(streams.answer_tokens)
            prompt = [rng.randrange(vocab) for _ in range(streams.prompt_tokens)]
            calls.append(batcher.submit([prompt], [SamplingParams(max_tokens=answer, ignore_eos=True)]))
        batcher.advance()
        for call in calls:
            call.events.clear()
        steps.append(time.perf_counter() - began)
    return steps


def busy_share(spans: Sequence[Span]) -> float:
    """Return the part of the time from the first span's start to the last one's end in which at least one runs."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0
    worked, until = 0.0, ordered[0][0]
    for start, end, _ in ordered:
        worked += max(0.0, end - max(start, until))
        until = max(until, end)
    return worked / (until - ordered[0][0])


def idle_by_place(spans: Sequence[Span]) -> dict[str, float]:
    """Return the shares of the time in which nothing runs, by what ran before and what ran after ("a > b"), the largest first."""
    ordered, idle = sorted(spans), dict[str, float]()
    if not ordered:
        return {}
    (first, until, before), rest = ordered[0], ordered[1:]
    for start, end, name in rest:
        if start > until:
            place = f"{before} > {name}"
            idle[place] = idle.get(place, 0.0) + start - until
        if end > until:
            until, before = end, name
    return {place: took / (until - first) for place, took in sorted(idle.items(), key=lambda item: -item[1])}


def between(spans: Sequence[Span]) -> list[float]:
    """Return the microseconds from the end of a step's last kernel to the start of the next one's first, where nothing else computes in between."""
    gaps, last = [], None
    for start, end, name in sorted(spans):
        if name == LAST:
            last = end
        elif last is not None and not name.startswith("Memcpy"):
            if name in FIRST:
                gaps.append(start - last)
            last = None
    return gaps

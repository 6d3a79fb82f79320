"""Whole decode steps of an engine: time to the first token, latency between tokens, memory, and where a step's time goes."""

from __future__ import annotations

import gc
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtkv.api import build
from trtkv.bench.load import Load, Work
from trtkv.bench.records import make_record
from trtkv.bench.split import kv_bytes_read, largest_gap, least_times, weight_bytes
from trtkv.bench.timing import Times, copy_bandwidth
from trtkv.builder.kernels import write_kernels
from trtkv.checkpoint.find import resolve_model
from trtkv.config import Limits
from trtkv.errors import CapacityError
from trtkv.plugins._device import store
from trtkv.plugins.kernels import request
from trtkv.policies.registry import parse_policy
from trtkv.runtime.loading import Engine, Options, open_engine

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One row: an engine of a model and a policy, and how it is loaded with work."""

    model: str
    policy: str
    budget: int | None
    sets: tuple[str, ...]
    context: int
    batch: int
    weights: str | None
    dtype: str | None
    chunk: int
    steps: int
    fill: str = "prefill"

    def command(self) -> str:
        """Write the command that measures this row."""
        words = ["trtkv", "bench", "step", "--model", self.model, "--policy", self.policy, "--context", str(self.context), "--batch", str(self.batch)]
        words += [] if self.weights is None else ["--weights", self.weights]
        words += [] if self.budget is None else ["--budget", str(self.budget)]
        words += [word for item in self.sets for word in ("--set", item)]
        words += [] if self.fill == "prefill" else ["--fill", self.fill]
        return shlex.join([*words, "--chunk", str(self.chunk), "--steps", str(self.steps)])


def run_cells(cells: Sequence[Cell], device: torch.device, report: Report = lambda stage, fraction: None) -> Iterator[dict[str, Any]]:
    """Measure cells one by one and yield a record each; a cell that does not fit the memory has status "skipped" and says why."""
    bandwidth = copy_bandwidth(device)
    with tempfile.TemporaryDirectory(prefix="trtkv-bench-") as folder:
        for index, cell in enumerate(cells):
            stage = f"{cell.policy} {cell.batch} x {cell.context}"
            show = lambda what, share, stage=stage, index=index: report(f"{stage}: {what}", (index + share) / len(cells))  # noqa: E731
            try:
                yield measure(cell, Path(folder) / str(index), device, bandwidth, show)
            except CapacityError as error:
                yield {"benchmark": "step", "status": "skipped", "reason": str(error), **_facts(cell), "command": cell.command()}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def compile_cells(cells: Sequence[Cell], sm: str, report: Report = lambda stage, fraction: None) -> int:
    """Compile the kernels that cells would load on a GPU of a compute capability into the user's folder; returns how many there are.

    Triton's own norms and activations are left out: Triton compiles them when they are first called.
    """
    with store.listing() as asked:
        for cell in cells:
            model = resolve_model(cell.model).config
            model = model if cell.dtype is None else model.model_copy(update={"dtype": cell.dtype})
            limits = Limits(max_seq_len=cell.context, max_batch_size=cell.batch, max_chunk_tokens=max(cell.chunk, cell.batch))
            plan = parse_policy(cell.policy, budget=cell.budget, sets=cell.sets).plan(model)
            request(plan, model, limits, sm)
    with tempfile.TemporaryDirectory(prefix="trtkv-bench-") as folder:
        write_kernels(list(asked), Path(folder), report)
    return len(asked)


@torch.inference_mode()
def measure(cell: Cell, folder: Path, device: torch.device, bandwidth: float, report: Report) -> dict[str, Any]:
    """Build, open and load an engine, then time its steps; raises CapacityError where it does not fit."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    path = _build(cell, folder)
    cache = None if device.type == "cuda" else 4 << 30
    engine = open_engine(path, Options(cell.weights, str(device), "torch", cache), lambda stage, fraction: report(stage, 0.3 * fraction))
    load = Load(engine, Work(cell.context, cell.batch, cell.chunk, cell.steps, cell.fill == "direct"))
    ttft_s = load.fill(lambda fraction: report("fill", 0.3 + 0.4 * fraction))
    latencies = load.decode(lambda fraction: report("decode", 0.7 + 0.2 * fraction))
    times, least = Times.of(latencies, "wall clock"), least_times(engine, bandwidth)
    split = load.split() if device.type == "cuda" else {}
    split |= largest_gap(split, least, times.median_us)  # type: ignore[arg-type]
    check = {"passed": load.finite, "compared": "logits of every step are finite; answers are compared by the tests"}
    figures = _figures(cell, engine, load, ttft_s, times, bandwidth) | least | split
    return make_record("step", cell.command(), device, check, _facts(cell) | {"executor": engine.stepper.executor.name}, figures)


def _build(cell: Cell, folder: Path) -> Path:
    model = resolve_model(cell.model).config
    factor = -(-cell.context // model.max_positions)
    rope = f"yarn:{factor}" if factor > 1 else None
    return build(
        cell.model, cell.policy, budget=cell.budget, sets=cell.sets, out=folder, max_seq_len=cell.context, max_batch_size=cell.batch,
        max_chunk_tokens=max(cell.chunk, cell.batch), dtype=cell.dtype, rope_scaling=rope, backend="none", sms=("none",),
    )  # fmt: skip


def _facts(cell: Cell) -> dict[str, Any]:
    return {
        "model": cell.model, "policy": cell.policy, "budget": cell.budget, "sets": list(cell.sets), "context": cell.context, "batch": cell.batch,
        "weights": cell.weights or "checkpoint", "chunk": cell.chunk, "steps": cell.steps, "fill": cell.fill,
    }  # fmt: skip


def _figures(cell: Cell, engine: Engine, load: Load, ttft_s: float | None, times: Times, bandwidth: float) -> dict[str, Any]:
    session, device = engine.session, engine.session.device
    stored = session.stored_bytes()
    figures = {} if ttft_s is None else {"ttft_ms": round(ttft_s * 1e3, 1), "prefill_tokens_per_s": round(load.prompt / ttft_s)}
    figures |= {
        "prefill_tokens": load.prompt, "itl_p50_ms": round(times.median_us / 1e3, 3), "itl_p90_ms": round(times.p90_us / 1e3, 3),
        "itl_p99_ms": round(times.p99_us / 1e3, 3),
        "decode_tokens_per_s": round(cell.batch / times.median_us * 1e6, 1), "kv_bytes": stored,
        "tokens_read_per_step": round(load.read_tokens / cell.batch, 1),
    }  # fmt: skip
    moved = weight_bytes(engine.manifest) + sum(kv_bytes_read(engine))
    if device.type == "cuda":
        figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    figures |= {"copy_GBps": round(bandwidth / 1e9, 1), "bytes_read_per_step": moved}
    least_us = moved / bandwidth * 1e6
    return figures | {"least_us": round(least_us, 1), "bandwidth_share": round(least_us / times.median_us, 3)}

"""Whole decode steps of an engine: time to the first token, latency between tokens, memory, and where a step's time goes."""

from __future__ import annotations

import gc
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtkv.api import build
from trtkv.bench.profile import kernel_times_of
from trtkv.bench.records import make_record
from trtkv.bench.timing import Times, copy_bandwidth
from trtkv.checkpoint.find import resolve_model
from trtkv.config import DTYPE_BYTES
from trtkv.errors import CapacityError, ConfigError
from trtkv.manifest import Manifest
from trtkv.runtime.loading import Engine, Options, open_engine
from trtkv.runtime.sampler import SamplingParams, sample
from trtkv.runtime.step import StepRow

Report = Callable[[str, float], None]
WARM_UP, PROFILED = 3, 5
GREEDY = SamplingParams()


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

    def command(self) -> str:
        """Write the command that measures this row."""
        words = ["trtkv", "bench", "step", "--model", self.model, "--policy", self.policy, "--context", str(self.context), "--batch", str(self.batch)]
        words += [] if self.weights is None else ["--weights", self.weights]
        words += [] if self.budget is None else ["--budget", str(self.budget)]
        words += [word for item in self.sets for word in ("--set", item)]
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


@torch.inference_mode()
def measure(cell: Cell, folder: Path, device: torch.device, bandwidth: float, report: Report) -> dict[str, Any]:
    """Build, open and load an engine, then time its steps; raises CapacityError where it does not fit."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    path = _build(cell, folder)
    cache = None if device.type == "cuda" else 4 << 30
    engine = open_engine(path, Options(cell.weights, str(device), "torch", cache), lambda stage, fraction: report(stage, 0.3 * fraction))
    load = Load(engine, cell)
    ttft_s = load.prefill(lambda fraction: report("prefill", 0.3 + 0.4 * fraction))
    latencies = load.decode(cell.steps, lambda fraction: report("decode", 0.7 + 0.2 * fraction))
    split = load.split() if device.type == "cuda" else {}
    finite = bool(torch.isfinite(load.logits).all())
    check = {"passed": finite, "compared": "logits of the last step are finite; answers are compared by the tests"}
    figures = _figures(cell, engine, load, ttft_s, Times.of(latencies, "wall clock"), bandwidth) | split
    return make_record("step", cell.command(), device, check, _facts(cell) | {"executor": engine.stepper.executor.name}, figures)


class Load:
    """An engine filled with sequences of random tokens: the first is prefilled, the others take copies of its pages where there are pages."""

    def __init__(self, engine: Engine, cell: Cell) -> None:
        self.engine, self.cell = engine, cell
        self.prompt = cell.context - cell.steps - WARM_UP - PROFILED
        if self.prompt < 2:
            raise ConfigError(f"context {cell.context} leaves no prompt before {cell.steps} steps", "Give a longer --context or fewer --steps.")
        plan = engine.session.plan
        self.pages = [engine.pages.take(plan.pages(engine.manifest.limits.max_seq_len)) for _ in range(cell.batch)]
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, engine.manifest.model.vocab_size, (self.prompt,), generator=generator).tolist()
        self.seen, self.last = self.prompt, [0] * cell.batch
        self.logits = torch.empty(0)

    def prefill(self, report: Callable[[float], None]) -> float:
        """Fill every sequence; returns the seconds that the first one took to its first token, with all shapes prepared before."""
        held, short = self.engine.session.held is not None, min(self.prompt, 2 * self.cell.chunk)
        self._fill(0, self.tokens[:short], lambda fraction: None)
        started = time.perf_counter()
        self._fill(0, self.tokens, report)
        took = time.perf_counter() - started
        for slot in range(1, self.cell.batch):
            if held:
                self._fill(slot, self.tokens, report)
            else:
                self._copy(slot)
        return took

    def decode(self, steps: int, report: Callable[[float], None]) -> list[float]:
        """Run steps and return the microseconds of each, sampling included."""
        for _ in range(WARM_UP):
            self._step()
        took = []
        for index in range(steps):
            started = time.perf_counter()
            self._step()
            took.append((time.perf_counter() - started) * 1e6)
            report(index / steps)
        return took

    def split(self) -> dict[str, float]:
        """Return the microseconds of a step by what they are spent on, from a trace of its kernels."""
        shares = dict.fromkeys(("weights_us", "attention_us", "selection_us", "append_us", "rest_us"), 0.0)
        for name, took in kernel_times_of(self._step, PROFILED).items():
            shares[f"{_kind(name)}_us"] += took
        return {name: round(took, 1) for name, took in shares.items()}

    def _fill(self, slot: int, tokens: list[int], report: Callable[[float], None]) -> None:
        chunk, total = self.cell.chunk, len(tokens)
        for start in range(0, total, chunk):
            part = tokens[start : start + chunk]
            ends = start + len(part) == total
            logits = self.engine.stepper.run([StepRow(part, start, slot, self.pages[slot], (len(part) - 1,) if ends else (), self.prompt)])
            report(start / total)
        self.last[slot] = self._sample(logits, 1)[0]

    def _copy(self, slot: int) -> None:
        for tensors, spec in ((self.engine.session.buffers[spec.name], spec) for spec in self.engine.session.plan.buffers):
            for tensor in (one for one in tensors if one is not None):
                if spec.paged:
                    tensor[self.pages[slot]] = tensor[self.pages[0]]
                else:
                    tensor[slot] = tensor[0]
        self.last[slot] = self.last[0]

    def _step(self) -> None:
        rows = [StepRow([token], self.seen, slot, self.pages[slot], (0,), self.prompt) for slot, token in enumerate(self.last)]
        self.logits = self.engine.stepper.run(rows)
        self.last = self._sample(self.logits, self.cell.batch)
        self.seen += 1

    def _sample(self, logits: Tensor, count: int) -> list[int]:
        return sample(logits, [GREEDY] * count, [self.tokens[:1]] * count, [1] * count)[0]


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
        "model": cell.model, "policy": cell.policy, "budget": cell.budget, "context": cell.context, "batch": cell.batch,
        "weights": cell.weights or "checkpoint", "chunk": cell.chunk, "steps": cell.steps,
    }  # fmt: skip


def _figures(cell: Cell, engine: Engine, load: Load, ttft_s: float, times: Times, bandwidth: float) -> dict[str, Any]:
    session, device = engine.session, engine.session.device
    stored = session.stored_bytes()
    figures = {
        "prefill_tokens": load.prompt, "ttft_ms": round(ttft_s * 1e3, 1), "prefill_tokens_per_s": round(load.prompt / ttft_s),
        "itl_p50_ms": round(times.median_us / 1e3, 3), "itl_p90_ms": round(times.p90_us / 1e3, 3), "itl_p99_ms": round(times.p99_us / 1e3, 3),
        "decode_tokens_per_s": round(cell.batch / times.median_us * 1e6, 1), "kv_bytes": stored,
        "tokens_read_per_step": round(session.read_tokens / cell.batch, 1),
    }  # fmt: skip
    moved = weight_bytes(engine.manifest) + kv_bytes_read(engine)
    if device.type == "cuda":
        figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    figures |= {"copy_GBps": round(bandwidth / 1e9, 1), "bytes_read_per_step": moved}
    return figures | {"bandwidth_share": round(moved / bandwidth / (times.median_us * 1e-6), 3)}


def weight_bytes(manifest: Manifest) -> int:
    """Bytes of the weights that every step reads: all but an embedding that is only looked up."""
    looked_up = set() if manifest.model.tie_embeddings else {"embed"}
    sizes = (torch.Size(one.shape).numel() for one in manifest.weights if one.name not in looked_up)
    return sum(sizes) * DTYPE_BYTES[manifest.model.dtype]


def kv_bytes_read(engine: Engine) -> int:
    """Bytes of keys, values and summaries that the announced step reads: the tokens read, and the whole index where there is one."""
    session, plan = engine.session, engine.session.plan
    if session.held is not None:
        return session.stored_bytes()
    token = 2 * plan.num_kv_heads * plan.head_dim * DTYPE_BYTES[plan.kv_dtype] * plan.num_layers
    rows = session.step(0).rows
    index = sum(plan.stored_bytes(row.stored) - row.stored * token for row in rows) if any(plan.select) else 0
    return int(session.read_tokens * token) + index


def _kind(name: str) -> str:
    """Say what a kernel is for, by its name."""
    if name.startswith(("append", "_append")):
        return "append"
    if any(word in name for word in ("score", "select", "speculate")):
        return "selection"
    if any(word in name for word in ("attend", "flash", "fmha")):
        return "attention"
    return "weights" if any(word in name for word in ("nvjet", "gemm", "splitK", "gemv", "cutlass")) else "rest"

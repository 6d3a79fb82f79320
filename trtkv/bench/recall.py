"""Decode steps of one engine with its pages on the device and on the host, each way of bringing them back in turn, and the bus by itself.

With random weights the queries of consecutive steps have nothing in common, and most selected pages are new ones. The tokens of the decode steps
are therefore taken from a few whose embeddings are drawn towards one of them: `drift` is the share of their own that they keep. Each row says how
alike consecutive queries were and how many pages moved.
"""

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
from trtkv.bench.records import make_record
from trtkv.bench.timing import Times, measure
from trtkv.checkpoint.find import resolve_model
from trtkv.config import DTYPE_BYTES
from trtkv.errors import ConfigError
from trtkv.plugins.kv_recall import launch
from trtkv.plugins.kv_recall.store import Recall
from trtkv.plugins.session import Session
from trtkv.runtime.executor import TorchExecutor
from trtkv.runtime.host_memory import HostPool
from trtkv.runtime.loading import Engine, Options, open_engine
from trtkv.runtime.rope import rope_table
from trtkv.runtime.step import Stepper, StepRow

Report = Callable[[str, float], None]
WARM_UP, SLOW_SHARE = 4, 4
BUS_BYTES = 256 << 20
COMPARED = 64  # logits of each sequence
ALIKE = 256  # tokens that decode steps take, of vocabularies that have four times as many

# What is compared: the engine's recall, and whether it needs tiers of its own. The first row keeps everything on the device.
VARIANTS: dict[str, Recall] = {
    "ahead": Recall(),
    "in front": Recall(ahead=False),
    "without reuse": Recall(ahead=False, reuse=False),
    "without slack": Recall(slack=0.0),
    "tokens first": Recall(order="tokens"),
    "one batch of copies": Recall("copies", ahead=False),
    "page by page": Recall("blocking", ahead=False),
    "page by page, tokens first": Recall("blocking", ahead=False, order="tokens"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine under one load; variants name rows of VARIANTS, full adds an engine that reads everything."""

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
    drift: float
    variants: tuple[str, ...] = tuple(VARIANTS)

    def command(self) -> str:
        """Write the command that measures this row."""
        words = ["trtkv", "bench", "step", "--model", self.model, "--policy", self.policy, "--offload"]
        words += ["--context", str(self.context), "--batch", str(self.batch)]
        words += ["--weights", self.weights] if self.weights else []
        words += ["--drift", str(self.drift)] if self.weights == "random" else []
        words += [] if self.budget is None else ["--budget", str(self.budget)]
        words += [word for item in self.sets for word in ("--set", item)]
        return shlex.join([*words, "--chunk", str(self.chunk), "--steps", str(self.steps)])


def run_cells(cells: Sequence[Cell], device: torch.device, report: Report = lambda stage, fraction: None) -> Iterator[dict[str, Any]]:
    """Measure cells one by one: a record for the resident engine, then one for every variant."""
    bus = bus_bandwidth(device) if device.type == "cuda" else 0.0
    with tempfile.TemporaryDirectory(prefix="trtkv-bench-") as folder:
        for index, cell in enumerate(cells):
            path = _build(cell, Path(folder) / str(index))
            base = 0.0

            def show(name: str, share: float, cell: Cell = cell, index: int = index) -> None:
                report(f"{cell.batch} x {cell.context}: {name}", (index + share) / len(cells))

            for row in _measure(cell, path, device, show):
                base = base or row["itl_p50_ms"]
                facts = _facts(cell) | {"recall": row.pop("recall")}
                row |= {"x_resident": round(row["itl_p50_ms"] / base, 3), "bus_GBps": round(bus / 1e9, 1)}
                yield make_record("step", cell.command(), device, row.pop("check"), facts, row)


@torch.inference_mode()
def _measure(cell: Cell, path: Path, device: torch.device, report: Report) -> Iterator[dict[str, Any]]:
    """Run the same tokens through the resident engine and every variant; their logits must be the same bits."""
    wanted: Tensor | None = None
    groups: dict[tuple[float, str], list[str]] = {}
    for name in cell.variants:
        groups.setdefault((VARIANTS[name].slack, VARIANTS[name].order), []).append(name)
    for names in ([], *groups.values()):
        how = VARIANTS[names[0]] if names else None
        report(", ".join(names) or "resident", 0.0)
        engine = open_engine(path, Options(cell.weights, str(device), "torch", offload=how or False))
        load = Load(engine, cell)
        if cell.weights == "random":
            load.calm(cell.drift)
        ttft_s = load.prefill()
        begun = load.saved()
        for name in names or ["resident"]:
            load.restore(begun, VARIANTS.get(name))
            row = load.run(VARIANTS.get(name))
            wanted = load.logits if wanted is None else wanted
            same = torch.equal(load.logits, wanted)
            check = {"passed": same, "compared": f"{COMPARED} logits of every step with the resident engine's"}
            yield {"recall": name, "ttft_ms": round(ttft_s * 1e3, 1), **row, "check": check}
        del engine, load, begun
        _free(device)


class Load:
    """An engine filled with sequences of random tokens, which then answer given ones, so that every variant does the same work."""

    def __init__(self, engine: Engine, cell: Cell) -> None:
        """Choose the tokens."""
        self.engine, self.cell, self.session = engine, cell, engine.session
        self.prompt = cell.context - cell.steps - WARM_UP - 1
        if self.prompt < 2:
            raise ConfigError(f"context {cell.context} leaves no prompt before {cell.steps} steps", "Give a longer --context or fewer --steps.")
        longest = self.session.plan.pages(engine.manifest.limits.max_seq_len)
        self.pages = [engine.pages.take(longest) for _ in range(cell.batch)]
        vocab = engine.manifest.model.vocab_size
        self.alike = min(ALIKE, vocab // 4)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(self.alike, vocab, (self.prompt,), generator=generator).tolist()
        self.forced = torch.randint(0, self.alike, (cell.steps + WARM_UP, cell.batch), generator=generator).tolist()
        self.logits = torch.empty(0)

    def calm(self, drift: float) -> None:
        """Draw the embeddings of the tokens that decode steps take towards the first."""
        executor = self.engine.stepper.executor
        assert isinstance(executor, TorchExecutor)
        table = executor.weight("embed")
        first = table[:1].clone()
        table[: self.alike].sub_(first).mul_(drift).add_(first)

    def prefill(self) -> float:
        """Fill the first sequence and copy it to the others; returns the seconds to its first token."""
        short = min(self.prompt, 2 * self.cell.chunk)
        self._fill(self.tokens[:short])
        _wait(self.session)
        started = time.perf_counter()
        self._fill(self.tokens)
        _wait(self.session)
        took = time.perf_counter() - started
        for slot in range(1, self.cell.batch):
            self._copy(slot)
        return took

    def run(self, how: Recall | None) -> dict[str, Any]:
        """Decode: figures of the steps. Steps whose copies the host makes are fewer, because they are slow."""
        steps = self.cell.steps if how is None or how.engine == "kernel" else max(2, self.cell.steps // SLOW_SHARE)
        stepper = Stepper(self.engine.stepper.executor, self.session, self.engine.manifest.limits, self._rope())
        took, kept, alike, moved = [], [], [], (0, 0)
        for step, tokens in enumerate(self.forced[: steps + WARM_UP]):
            rows = [StepRow([token], self.prompt + step, slot, self.pages[slot], (0,), self.prompt) for slot, token in enumerate(tokens)]
            if step == WARM_UP:
                moved = self.session.offload.moved_pages() if self.session.offload else (0, 0)
            before = self._queries()
            _wait(self.session)
            started = time.perf_counter()
            logits = stepper.run(rows)
            _wait(self.session)
            took.append((time.perf_counter() - started) * 1e6)
            kept.append(logits[:, :COMPARED].clone())
            alike.append(_cosine(before, self._queries()))
        self.logits = torch.stack(kept)[: WARM_UP + max(2, self.cell.steps // SLOW_SHARE)]
        times = Times.of(took[WARM_UP:], "wall clock")
        figures: dict[str, Any] = {
            "itl_p50_ms": round(times.median_us / 1e3, 3), "itl_p90_ms": round(times.p90_us / 1e3, 3), "itl_p99_ms": round(times.p99_us / 1e3, 3),
            "query_cosine": round(sum(alike[WARM_UP:]) / len(alike[WARM_UP:]), 3), "device_kv_bytes": self._device_bytes(),
        }  # fmt: skip
        return figures | (self._traffic(moved, steps, times.median_us) if self.session.offload else {})

    def saved(self) -> list[Tensor]:
        """Copy what a decode step changes and the next run must find as it was: slots, rings and the open pages' summaries are written again."""
        return [tensor[: self.cell.batch].clone() for tensor in self._slot_state()]

    def restore(self, saved: list[Tensor], how: Recall | None) -> None:
        """Go back to the end of the prompt, and recall in another way from now on."""
        for tensor, old in zip(self._slot_state(), saved, strict=True):
            tensor[: self.cell.batch] = old
        if self.session.offload is not None and how is not None:
            self.session.offload.recall = how

    def _slot_state(self) -> list[Tensor]:
        plan = self.session.plan
        state = [self.session.buffer(spec.name, layer) for spec in plan.buffers if not spec.paged for layer in spec.layers]
        tiers = self.session.offload.tiers.values() if self.session.offload else ()
        return state + [x for tier in tiers for x in (tier.held, tier.stamps, *self._rings(tier))]

    def _rings(self, tier: Any) -> list[Tensor]:
        shape = self.session.offload.shape  # type: ignore[union-attr]
        first = self.session.num_slots * shape.frames
        return [pool[first:].view(self.session.num_slots, shape.ring, *pool.shape[1:]) for pool in (tier.keys, tier.values)]

    def _fill(self, tokens: list[int]) -> None:
        for start in range(0, len(tokens), self.cell.chunk):
            part = tokens[start : start + self.cell.chunk]
            self.engine.stepper.run([StepRow(part, start, 0, self.pages[0], (len(part) - 1,), self.prompt)])

    def _copy(self, slot: int) -> None:
        for spec in self.session.plan.buffers:
            for layer in spec.layers:
                tensor = self.session.buffer(spec.name, layer)
                if spec.paged:
                    tensor[self.pages[slot]] = tensor[self.pages[0]]
        for tensor in self._slot_state():
            tensor[slot] = tensor[0]

    def _queries(self) -> list[Tensor]:
        found = self.session.buffers.get("previous_query", [])
        return [tensor[: self.cell.batch].clone() for tensor in found if tensor is not None]

    def _device_bytes(self) -> int:
        hosted = set(self.session.offload.tiers) if self.session.offload else set()
        total = self.session.offload.device_bytes() if self.session.offload else 0
        for name, tensors in self.session.buffers.items():
            total += sum(x.nbytes for layer, x in enumerate(tensors) if x is not None and not (name in ("keys", "values") and layer in hosted))
        return total

    def _traffic(self, moved: tuple[int, int], steps: int, median_us: float) -> dict[str, Any]:
        store, plan = self.session.offload, self.session.plan
        assert store is not None
        front, ahead = (now - before for now, before in zip(store.moved_pages(), moved, strict=True))
        rows = steps * self.cell.batch * plan.num_kv_heads * len(store.tiers)
        page = store.shape.page_bytes // plan.num_kv_heads
        return {
            "pages_in_front": round(front / rows, 2), "pages_ahead": round(ahead / rows, 2), "host_kv_bytes": store.host_bytes(),
            "recall_GBps": round((front + ahead) / steps * page / median_us / 1e3, 1),
        }  # fmt: skip

    def _rope(self) -> Tensor:
        manifest = self.engine.manifest
        return rope_table(manifest.model.rope, manifest.model.head_dim, manifest.limits.max_seq_len)


def bus_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that the copy engine brings from pinned host memory."""
    source, target = HostPool(device, 1).allocate((BUS_BYTES,), torch.uint8), torch.empty(BUS_BYTES, dtype=torch.uint8, device=device)
    times = measure(lambda i: _copy_engine(target, source), 1, 9, device)
    return BUS_BYTES / (times.median_us * 1e-6)


def recall_bandwidth(heads: int, dim: int, page: int, pages: int, batch: int, device: torch.device, order: str = "heads") -> dict[str, float]:
    """Time one launch that brings `pages` pages of every KV head, none of which is there: microseconds and bytes a second.

    Two selections that have nothing in common take turns, so that each launch finds the other's pages.
    """
    from trtkv.bench.cases import find_policy
    from trtkv.config import ModelConfig
    from trtkv.plugins.kv_recall.store import Offload

    model = ModelConfig(
        model_type="llama", hidden_size=4 * heads * dim, intermediate_size=dim, num_layers=1, num_q_heads=4 * heads, num_kv_heads=heads, head_dim=dim,
        vocab_size=1, dtype="bfloat16",
    )  # fmt: skip
    sets = [f"retrieve.page={page}", "retrieve.sink=0", "retrieve.window=1"]
    plan = find_policy("freekv", 32768, page * pages, None, sets).plan(model)
    most = 16 * pages
    store = Offload(plan, batch * most, batch, device, Recall(slack=0.0, order=order), HostPool(device, 1).allocate)
    tier = store.tiers[0]
    integers = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    lens, slots = integers([most * page] * batch), integers(list(range(batch)))
    table = torch.randperm(batch * most, generator=torch.Generator().manual_seed(0)).view(batch, most).int().to(device)
    drawn = torch.stack([torch.randperm(most - 8, generator=torch.Generator().manual_seed(row))[: 2 * pages] for row in range(batch * heads)])
    lists = [drawn[:, turn * pages : (turn + 1) * pages].sort(1).values.view(batch, heads, pages).int() for turn in range(2)]
    selections = [torch.cat([one, torch.full((batch, heads, 1), pages, dtype=torch.int32)], 2).to(device) for one in lists]
    places = torch.empty_like(selections[0])
    rows = torch.empty(batch, store.shape.places, dtype=torch.int32, device=device)

    def call(i: int) -> None:
        given = (tier, store.shape, selections[i % 2], lens, slots, table, places, rows)
        launch.recall_pages(*given, num_slots=batch, ahead=False, flush=False)

    moved = batch * heads * pages * page * dim * 2 * DTYPE_BYTES[model.dtype]
    times = measure(call, 8, 9, device)
    return {"us": round(times.median_us, 1), "bytes": moved, "GBps": round(moved / times.median_us / 1e3, 1)}


def _copy_engine(target: Tensor, source: Tensor) -> None:
    from cuda.bindings import driver

    driver.cuMemcpyAsync(
        driver.CUdeviceptr(target.data_ptr()), driver.CUdeviceptr(source.data_ptr()), target.nbytes, torch.cuda.current_stream().cuda_stream
    )


def _build(cell: Cell, folder: Path) -> Path:
    model = resolve_model(cell.model).config
    factor = -(-cell.context // model.max_positions)
    return build(
        cell.model, cell.policy, budget=cell.budget, sets=cell.sets, out=folder, max_seq_len=cell.context, max_batch_size=cell.batch,
        max_chunk_tokens=max(cell.chunk, cell.batch), dtype=cell.dtype, rope_scaling=f"yarn:{factor}" if factor > 1 else None, backend="none",
        sms=("none",),
    )  # fmt: skip


def _facts(cell: Cell) -> dict[str, Any]:
    return {
        "model": cell.model, "policy": cell.policy, "budget": cell.budget, "context": cell.context, "batch": cell.batch,
        "weights": cell.weights or "checkpoint",
        "chunk": cell.chunk, "steps": cell.steps, "drift": cell.drift,
    }  # fmt: skip


def _cosine(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the mean cosine of two lists of queries [B, Hq, D], over all of them; 1 where there are none."""
    if not before:
        return 1.0
    means = [torch.cosine_similarity(x.float(), y.float(), dim=-1).mean() for x, y in zip(before, after, strict=True)]
    return float(torch.stack(means).mean())


def _wait(session: Session) -> None:
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

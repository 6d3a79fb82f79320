"""Times ways to launch the kernels of a decode step on this machine's GPU: each is captured anew over the same engine and the same cache.

python build_scripts/tune_step.py [--policy P ...] [--ways W ...] [--seconds N]     prints a line for every policy and way
python build_scripts/tune_step.py --compile 90 ...     only compiles the kernels that it would launch, into the user's folder

`before` is the step without any of them, `chosen` what engines do. Logits of a way are compared with those of the first.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from trtkv.api import build
from trtkv.bench.load import Load, Work
from trtkv.bench.split import least_times
from trtkv.bench.timing import copy_bandwidth
from trtkv.builder.kernels import write_kernels
from trtkv.checkpoint.find import resolve_model
from trtkv.config import Limits, ModelConfig
from trtkv.plugins._device import driver, nvrtc, store
from trtkv.plugins.kernels import request
from trtkv.plugins.kv_append import cuda as append
from trtkv.plugins.kv_attend import launch_dense
from trtkv.plugins.linear import ahead
from trtkv.plugins.linear import launch as linear
from trtkv.plugins.linear.launch import Form
from trtkv.plugins.linear.specs import products
from trtkv.policies.registry import parse_policy
from trtkv.runtime import graphs
from trtkv.runtime.loading import Engine, Options, open_engine

STEPS, SPARE_BYTES = 24, 2 << 30
MIB = 1 << 20
Way = dict[str, Any]  # what differs from the engine's own way, by the keys of `applied`

LOADED: list[tuple[str, driver.Kernel]] = []  # every kernel by its entry
_FORM_OF, _LOAD, _INIT, _LAUNCH = linear.form_of, nvrtc.load, driver.Kernel.__init__, driver.Kernel.launch

OLD: Way = {"early": False, "attending": 0, "selecting": 0, "chaining": 0, "short": 0, "at_once": 34}
NONE: Way = {"attending": 0, "selecting": 0, "chaining": 0, "short": 0}
WAYS: dict[str, Way] = {
    "before": OLD,
    "chosen": {},
    "old, L1 for products": {**OLD, "carve": {"gemv": 0}},
    "old, shared memory for all": {**OLD, "carve": {"": 100}},
    "chosen, L1 for products": {"carve": {"gemv": 0}},
    "chosen, shared memory for all": {"carve": {"": 100}},
    "L1, dense 4 x 4": {"dense": (4, 4), "carve": {"gemv": 0}},
    "old, early": {**OLD, "early": True},
    "early, at once 17": NONE,
    "products apart": {"apart": "gemv"},
    "short 0": {"short": 0},
    "short 8": {"short": 8},
    "short 32": {"short": 32},
    "no chaining": {"chaining": 0},
    "chaining 8": {"chaining": 8},
    "chaining 2": {"chaining": 2},
    "no ahead but chaining": {"attending": 0, "selecting": 0},
    "ahead 8, 8": {"attending": 8, "selecting": 8},
    "ahead 16, 16": {"attending": 16, "selecting": 16},
    "ahead 40, 40": {"attending": 40, "selecting": 40},
    "gate_up 4 8 1": {"forms": {"gate_up": Form(4, 8, 1, 8)}},
    "gate_up 4 7 1": {"forms": {"gate_up": Form(4, 7, 1, 7)}},
    "gate_up 3 7 1": {"forms": {"gate_up": Form(3, 7, 1, 7)}},
    "gate_up 2 7 1": {"forms": {"gate_up": Form(2, 7, 1, 7)}},
    "down 4 8 1": {"forms": {"down": Form(4, 8, 1, 8)}},
    "qkv 4 7 1": {"forms": {"qkv": Form(4, 7, 1, 7)}},
    "qkv 4 7 2": {"forms": {"qkv": Form(4, 7, 2, 7)}},
    "qkv 2 7 2": {"forms": {"qkv": Form(2, 7, 2, 7)}},
    "qkv 2 8 1": {"forms": {"qkv": Form(2, 8, 1, 8)}},
    "dense 4 x 4": {"dense": (4, 4)},
    "dense 8 x 2": {"dense": (8, 2)},
    "dense 4 x 6": {"dense": (4, 6)},
    "ahead by 132": {"ahead_blocks": 132},
    "ahead by 1024": {"ahead_blocks": 1024},
    "before, again": OLD,
    "chosen, again": {},
}
FOR_MANY = ("before", "chosen", "short 0", "short 8", "short 32", "chosen, shared memory for all", "before, again", "chosen, again")
ONLY_DENSE = ("dense 4 x 4", "dense 8 x 2", "dense 4 x 6", "L1, dense 4 x 4")


@contextmanager
def applied(way: Way, model: ModelConfig) -> Iterator[None]:
    """Let kernels be launched another way for a while."""
    with ExitStack() as stack:
        put: Callable[..., Any] = lambda *args: stack.enter_context(patch.object(*args))  # noqa: E731
        if "early" in way:
            put(append, "EARLY", way["early"])
        for key in ("attending", "selecting", "chaining", "short"):
            if key in way:
                put(ahead, f"{key.upper()}_BYTES", way[key] * MIB)
        if "ahead_blocks" in way:
            put(linear, "AHEAD_BLOCKS", way["ahead_blocks"])
        if "dense" in way:
            put(launch_dense, "dense_shape", lambda dim, arch: way["dense"])
        if "forms" in way:
            forms = {products(model)[name][:3]: form for name, form in way["forms"].items()}
            put(linear, "form_of", lambda *shape: forms.get(shape) or _FORM_OF(*shape))
        if "at_once" in way:
            put(launch_dense, "nvrtc", _WithDefine(f"-DMERGED_AT_ONCE={way['at_once']}"))
        if "apart" in way:
            put(driver.Kernel, "launch", _apart(way["apart"]))
        for entry, percent in way.get("carve", {}).items():
            stack.callback(_carve, entry, -1)
            _carve(entry, percent)
        yield


class _WithDefine:
    """Stands for the module `nvrtc`, with a definition more."""

    def __init__(self, define: str) -> None:
        self._define = define

    def load(self, path: Path, name: str, types: tuple[Any, ...], defines: tuple[str, ...], arch: str, shared: int) -> driver.Kernel:
        return _LOAD(path, name, types, (*defines, self._define), arch, shared)


def _apart(entry: str) -> Callable[..., None]:
    """Return a launch that lets no kernel of this name overlap with the one before it."""

    def launch(self: driver.Kernel, *args: Any, overlap: bool = False, **more: Any) -> None:
        _LAUNCH(self, *args, overlap=overlap and (entry, self) not in LOADED, **more)

    return launch


def _carve(entry: str, percent: int) -> None:
    """Ask for a part of an SM's memory as shared memory, of the kernels of this name; -1 is the driver's own choice."""
    for name, kernel in LOADED:
        if name == entry or not entry:
            kernel.prefer_shared(percent)


def _by_library(step: Callable[[], torch.Tensor], device: torch.device, pool: Any) -> tuple[Callable[[], None], torch.Tensor]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        logits = step()
    return graph.replay, logits


def _remember(self: driver.Kernel, spec: Any, binary: Any) -> None:
    _INIT(self, spec, binary)
    LOADED.append((spec.entry, self))


def opened(model: str, policy: str, budget: int, context: int, batch: int, folder: Path) -> Engine:
    """Build and open an engine with random weights."""
    own = None if policy == "full" else budget
    path = build(
        model, policy, budget=own, out=folder, max_seq_len=context, max_batch_size=batch, max_chunk_tokens=8192, backend="none", sms=("none",)
    )  # fmt: skip
    config = resolve_model(model).config
    kept = 4.8 * context * batch * config.num_kv_heads * config.head_dim * config.num_layers  # keys, values and an index
    return open_engine(path, Options("random", "cuda", "torch", int(kept) + SPARE_BYTES))


def timed(load: Load, way: Way, split: bool) -> tuple[list[float], dict[str, float], torch.Tensor]:
    """Capture the step in a way and return microseconds of its steps, of their parts, and the logits of the last."""
    engine = load.engine
    with applied(way, engine.manifest.model):
        executor, stepper = engine.stepper.executor, engine.stepper
        executor.ask_ahead()
        stepper._graphs = graphs.DecodeGraphs(executor, stepper.session, stepper._width, stepper._fixed)
        load.seen, load.last = load.prompt, [7] * load.work.batch
        load._run(3)
        if way.get("carve"):  # kernels that were first loaded by the step itself
            for entry, percent in way["carve"].items():
                _carve(entry, percent)
            stepper._graphs = graphs.DecodeGraphs(executor, stepper.session, stepper._width, stepper._fixed)
            load.seen = load.prompt + 3
            load._run(3)
            load.seen = load.prompt + 3
        took = load._run(STEPS)
        parts = load.split() if split else {}
        spoil(load)
        load.seen = load.prompt
        logits = next(iter(stepper._graphs._captured.values())).logits
        load.last = [7] * load.work.batch
        load._run(2)
        return took, parts, logits.float().clone()


def spoil(load: Load) -> None:
    """Overwrite what decoded tokens left in the cache, so that a kernel that reads before it is written again shows."""
    session, first = load.engine.session, load.prompt // load.engine.session.plan.page_size
    for tensor in (one for name in ("keys", "values") for one in session.buffers[name] if one is not None):
        for pages in load.pages:
            tensor[pages[first], :, load.prompt % session.plan.page_size :] = torch.nan
            tensor[pages[first + 1 :]] = torch.nan


@torch.inference_mode()
def compare(model: str, policy: str, budget: int, context: int, batch: int, ways: Sequence[str], until: float, bandwidth: float) -> None:
    """Print the step and its parts for every way."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        engine = opened(model, policy, budget, context, batch, Path(folder) / "engine")
        load = Load(engine, Work(context, batch, 8192, STEPS + 16, direct=True))
        load.fill(lambda fraction: None)
        print(f"{policy}: opened and filled in {time.perf_counter() - began:.1f} s", flush=True)
        truth: torch.Tensor | None = None
        for name in ways:
            if (policy != "full" and name in ONLY_DENSE) or (batch > 1 and name not in FOR_MANY) or (batch == 1 and name.startswith("short")):
                continue
            if time.perf_counter() > until:
                print(f"  {name}: no time left")
                continue
            took, parts, logits = timed(load, WAYS[name], True)
            truth = logits if truth is None else truth
            error = float((logits - truth).norm() / truth.norm())
            shown = " ".join(f"{part}={parts[part + '_us']:.0f}" for part in SHOWN if part + "_us" in parts)
            print(f"  {policy} {batch} {statistics.median(took):7.1f} us  {shown}  error {error:.1e}  {name}", flush=True)
        least = least_times(engine, bandwidth)
        print("  least:", {part: least[part + "_least_us"] for part in SHOWN if part + "_least_us" in least}, flush=True)


SHOWN = ("qkv", "o", "gate_up", "down", "head", "weights", "attention", "selection", "append", "norms", "sampling", "rest")


def compile_all(model: str, policies: Sequence[str], budget: int, context: int, batch: int, ways: Sequence[str], sm: str) -> None:
    """Compile what every way launches."""
    config = resolve_model(model).config
    limits = Limits(max_seq_len=context, max_batch_size=batch, max_chunk_tokens=8192)
    with store.listing() as asked:
        for policy in policies:
            plan = parse_policy(policy, budget=None if policy == "full" else budget).plan(config)
            for name in ways:
                with applied(WAYS[name], config):
                    request(plan, config, limits, sm)
    with tempfile.TemporaryDirectory() as stage:
        write_kernels(list(asked), Path(stage), lambda stage, done: None)
    print(f"{len(asked)} kernels lie in {store.user_folder()}")


def main() -> None:
    """Read the options and time."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--policy", nargs="+", default=["full", "fier", "quest"])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seconds", type=float, default=70.0, help="no way is begun later than this")
    parser.add_argument("--compile", metavar="SM")
    own = parser.parse_args()
    if own.compile:
        compile_all(own.model, own.policy, own.budget, own.context, own.batch, own.ways, own.compile)
        return
    bandwidth = copy_bandwidth(torch.device("cuda"))
    with patch.object(driver.Kernel, "__init__", _remember), patch.object(graphs, "capture", _by_library):
        for index, policy in enumerate(own.policy):
            share = began + own.seconds * (index + 1) / len(own.policy)
            partial(compare, own.model, policy, own.budget, own.context, own.batch, own.ways)(share, bandwidth)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

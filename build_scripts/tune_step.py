"""Times ways to launch the kernels of a decode step on this machine's GPU: each is captured over the same engine and the same cache.

python build_scripts/tune_step.py [--model M] [--policy P ...] [--batch N] [--seconds N]     prints a line for every policy and way
python build_scripts/tune_step.py --compile 90 ...     only compiles the kernels that it would launch, into the user's folder

`before` is the step without any of them, `chosen` what engines do. Then product by product the fastest form takes the place of the one that
`plugins/linear/launch.py` chooses: in a step other kernels stand between the products, which `tune_linear.py` leaves out. Before the step whose
logits are compared with those of the first way, its newest token's place is overwritten, so that a kernel that reads too early shows.
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

from plugins.append import launch as append
from plugins.attend import launch_dense
from plugins.device import driver, store
from plugins.device.spec import Spec
from plugins.kernel_list import kernels_for
from plugins.kernel_list.linear import products
from plugins.linear import launch as linear
from plugins.linear.launch import MOST_TOKENS, Form
from trtkv.api import build
from trtkv.bench.load import Load, Work
from trtkv.bench.split import least_times
from trtkv.bench.timing import copy_bandwidth
from trtkv.checkpoint.find import resolve_model
from trtkv.config import Limits, ModelConfig
from trtkv.engine.compile_kernels import write_kernels
from trtkv.policies.registry import parse_policy
from trtkv.runtime import graphs
from trtkv.runtime.loading import Engine, Options, open_engine

STEPS, SPARE_BYTES = 40, 2 << 30
WORTH_US = 6.0  # less is noise
SHOWN = ("qkv", "o", "gate_up", "down", "head", "weights", "attention", "selection", "append", "norms", "sampling", "rest")
Way = dict[str, Any]  # what differs from the engine's way, by the keys of `applied`

LOADED: list[tuple[driver.Kernel, str, bool]] = []  # every kernel, its entry, and whether its memory is to be cache
_FORM_OF, _INIT, _APPEND = linear.form_of, driver.Kernel.__init__, append.launch

WAYS: dict[str, Way] = {
    "before": {"early": False, "carve": {"gemv": -1}},
    "chosen": {},
    "early nowhere": {"early": False},
    "early everywhere": {"early": True},
    "dense 8 x 2": {"dense": (8, 2)},
    "dense 8 x 3": {"dense": (8, 3)},
    "dense 8 x 6": {"dense": (8, 6)},
    "dense 4 x 6": {"dense": (4, 6)},
    "dense 4 x 6, early nowhere": {"dense": (4, 6), "early": False},
    "dense 4 x 6, the driver's division": {"dense": (4, 6), "carve": {"gemv": -1}},
    "products with 0 % shared": {"carve": {"gemv": 0}},
    "products with 20 % shared": {"carve": {"gemv": 20}},
}


@contextmanager
def applied(way: Way, model: ModelConfig) -> Iterator[None]:
    """Let kernels be launched another way for a while."""
    with ExitStack() as stack:
        put: Callable[..., Any] = lambda *args: stack.enter_context(patch.object(*args))  # noqa: E731
        if "early" in way:
            put(append, "launch", lambda *args, **more: _APPEND(*args, **{**more, "early": more["overlap"] and way["early"]}))
        if "dense" in way:
            put(launch_dense, "dense_shape", lambda dim, group, arch, coded=False: way["dense"])
        if "forms" in way:
            forms = {products(model)[name][:3]: form for name, form in way["forms"].items()}
            put(linear, "form_of", lambda *shape: forms.get(shape) or _FORM_OF(*shape))
        for entry, percent in way.get("carve", {}).items():
            stack.callback(_carve, entry, None)
            _carve(entry, percent)
        yield


def _carve(entry: str, percent: int | None) -> None:
    """Request a part of a multiprocessor's memory as shared memory under the kernels of this name; None is what engines request."""
    for kernel, name, own in LOADED:
        if name == entry:
            kernel.prefer_shared(own if percent is None else percent)


def _remember(self: driver.Kernel, spec: Any, binary: Any) -> None:
    _INIT(self, spec, binary)
    LOADED.append((self, spec.entry, spec.shared_percent))


def forms_for(model: ModelConfig, name: str) -> list[Form]:
    """List the forms worth a try for a product in a step: warps that fit its inner size, and rows so that few waves of blocks take them all."""
    _, inner, gated, _ = products(model)[name]
    chunks = -(-inner // 256)
    warps = sorted({8, *sorted(range(5, 11), key=lambda count: (-(-chunks // count) * count / chunks, -count))[:2]})
    rows = {"qkv": (3, 4, 6, 8), "o": (3, 4, 5, 6, 8), "gate_up": (2, 3, 4), "down": (2, 3, 4)}[name]
    assert gated == (name == "gate_up")
    return [Form(count, split, 1, split) for split in warps for count in rows]


def opened(model: str, policy: str, budget: int, context: int, batch: int, folder: Path) -> Engine:
    """Build and open an engine with random weights."""
    own, config = None if policy == "full" else budget, resolve_model(model).config
    rope = f"yarn:{-(-context // config.max_positions)}" if context > config.max_positions else None
    path = build(
        model, policy, budget=own, out=folder, max_seq_len=context, max_batch_size=batch, max_chunk_tokens=8192, rope_scaling=rope, backend="none",
        sms=("none",),
    )  # fmt: skip
    kept = 4.8 * context * batch * config.num_kv_heads * config.head_dim * config.num_layers  # keys, values and an index
    return open_engine(path, Options("random", "cuda", "torch", int(kept) + SPARE_BYTES))


def timed(load: Load, way: Way, split: bool) -> tuple[float, dict[str, float], torch.Tensor]:
    """Capture the step in a way and return the median microseconds, those of its parts, and the logits of a step."""
    stepper, batch = load.engine.stepper, load.work.batch
    with applied(way, load.engine.manifest.model):
        for _ in range(2):  # the first loads what was not loaded before; what it is to be divided into is said then
            for entry, percent in way.get("carve", {}).items():
                _carve(entry, percent)
            stepper._graphs = graphs.DecodeGraphs(stepper.executor, stepper.cache, stepper._width, stepper._fixed)
            load.seen, load.last = load.prompt, [7] * batch
            load._run(3)
            if not way.get("carve"):
                break
        took = load._run(STEPS)
        parts = load.split() if split else {}
        spoil(load)
        load.seen, load.last = load.prompt, [7] * batch
        load._run(1)
        return statistics.median(took), parts, next(iter(stepper._graphs._captured.values())).logits.float().clone()


def spoil(load: Load) -> None:
    """Overwrite what decoded tokens left in the cache, so that a kernel that reads before it is written again shows."""
    cache, first = load.engine.cache, load.prompt // load.engine.cache.plan.page_size
    for tensor in (one for name in ("keys", "values") for one in cache.buffers[name] if one is not None):
        for pages in load.pages:
            tensor[pages[first], :, load.prompt % cache.plan.page_size :] = torch.nan
            tensor[pages[first + 1 :]] = torch.nan


@torch.inference_mode()
def compare(model: str, policy: str, budget: int, context: int, batch: int, until: float, bandwidth: float) -> None:
    """Print the step and its parts for every way, then tune the forms of the products."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        engine = opened(model, policy, budget, context, batch, Path(folder) / "engine")
        load = Load(engine, Work(context, batch, 8192, STEPS + 16, direct=True))
        load.fill(lambda fraction: None)
        print(f"{model} {batch} x {context} {policy}: opened and filled in {time.perf_counter() - began:.1f} s", flush=True)
        truth: list[torch.Tensor] = []

        def show(name: str, way: Way, split: bool = True) -> float:
            if time.perf_counter() > until:
                print(f"  {name}: no time left")
                return float("inf")
            took, parts, logits = timed(load, way, split)
            truth.append(logits)
            error = float((logits - truth[0]).norm() / truth[0].norm())
            shown = " ".join(f"{part}={parts[part + '_us']:.0f}" for part in SHOWN if part + "_us" in parts)
            print(f"  {took:7.1f} us  {shown}  error {error:.1e}  {name}", flush=True)
            return took

        ways = {name: way for name, way in WAYS.items() if policy == "full" or "dense" not in way}
        times = {name: show(name, way) for name, way in ways.items()}
        if batch <= MOST_TOKENS:
            best = min((name for name in times if name != "before"), key=lambda name: times[name])
            forms = tune(engine.manifest.model, ways[best], show)
            show(f"tuned: {best}, {forms}", {**ways[best], "forms": forms})
        show("before, again", WAYS["before"], False)
        show("chosen, again", {}, False)
        least = least_times(engine, bandwidth)
        print("  least:", {part: least[part + "_least_us"] for part in SHOWN if part + "_least_us" in least}, flush=True)


def tune(model: ModelConfig, way: Way, show: Callable[..., float]) -> dict[str, Form]:
    """Return the forms that made the step faster."""
    least, best = show("the best of these", way, False), dict[str, Form]()
    for name in ("qkv", "o", "gate_up", "down"):
        for form in forms_for(model, name):
            took = show(f"{name} {form}", {**way, "forms": {**best, name: form}}, False)
            if took < least - WORTH_US:
                least, best = took, {**best, name: form}
    return best


def compile_all(model: str, policies: Sequence[str], budget: int, context: int, batch: int, sm: str) -> None:
    """Compile what every way launches."""
    config = resolve_model(model).config
    limits = Limits(max_seq_len=context, max_batch_size=batch, max_chunk_tokens=8192)
    ways = [*WAYS.values(), *({"forms": {name: form}} for name in ("qkv", "o", "gate_up", "down") for form in forms_for(config, name))]
    specs: dict[Spec, None] = {}
    for policy in policies:
        plan = parse_policy(policy, budget=None if policy == "full" else budget).plan(config)
        for way in ways:
            with applied(way, config):
                specs |= dict.fromkeys(kernels_for(plan, config, limits, sm))
    with tempfile.TemporaryDirectory() as stage:
        write_kernels(list(specs), Path(stage), lambda stage, done: None)
    print(f"{len(specs)} kernels lie in {store.user_folder()}")


def main() -> None:
    """Read the options and time."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--policy", nargs="+", default=["full", "fier", "quest"])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=70.0, help="no way is begun later than this")
    parser.add_argument("--compile", metavar="SM")
    own = parser.parse_args()
    if own.compile:
        compile_all(own.model, own.policy, own.budget, own.context, own.batch, own.compile)
        return
    bandwidth = copy_bandwidth(torch.device("cuda"))
    with patch.object(driver.Kernel, "__init__", _remember):
        for index, policy in enumerate(own.policy):
            share = began + own.seconds * (index + 1) / len(own.policy)
            partial(compare, own.model, policy, own.budget, own.context, own.batch)(share, bandwidth)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

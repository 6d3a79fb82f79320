"""Compares the choice from lists with the choice from all scores on this machine's GPU.

python build_scripts/tune_lists.py [--seconds N] [--out FILE]

Lists of both must be the same, bit for bit. Then times of both in turn (choice alone, its kernels, attention, a whole layer) and clocks of the parts.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from plugins.device import driver, kernel, store
from plugins.device.nvrtc import CudaSpec
from plugins.select import launch, launch_lists
from tests.gpu import choice_checks, retrieval_case
from trtkv.bench.cases import Case, find_geometry, find_policy
from trtkv.bench.check import Findings, check_layer
from trtkv.bench.layer import Layers
from trtkv.bench.profile import kernel_times
from trtkv.bench.timing import measure

DEV = torch.device("cuda")
# Model, sequences, tokens, layers in rotation; those behind the line are not changed, and are measured once.
CHANGED = (
    ("qwen2.5-7b", 8, 131072, 5),
    ("llama-3.1-8b", 8, 131072, 3),
    ("qwen2.5-7b", 8, 65536, 6),
    ("qwen2.5-7b", 32, 32768, 4),
    ("qwen2.5-7b", 16, 65536, 4),
)
SAME = tuple((model, *load) for load in ((1, 32768, 32), (1, 131072, 16), (8, 32768, 8)) for model in ("qwen2.5-7b", "llama-3.1-8b"))
LISTING = launch_lists.lists
modules: dict[tuple[str, tuple[str, ...]], Any] = {}


@contextmanager
def form(listed: bool | None, *, traced: bool = False) -> Iterator[None]:
    """Let rows be listed first, or not; None: as the package decides."""

    def lists(rows: int, heads: int, units: int, width: int, arch: str) -> bool:
        return LISTING(rows, heads, units, width, arch) if listed is None else listed and rows <= 264

    def with_trace(make: Any) -> Any:
        def spec(*shape: Any, **more: Any) -> Any:
            made = make(*shape, **more)
            return replace(made, defines=(*made.defines, "-DTRACE")) if traced else made

        return spec

    with (
        patch.object(launch_lists, "lists", lists),
        patch.object(launch_lists, "list_kernel", with_trace(launch_lists.list_kernel)),
        patch.object(launch, "select_kernel", with_trace(launch.select_kernel)),
    ):
        yield


@contextmanager
def row_clusters() -> Iterator[None]:
    """Let the blocks of a row be a cluster where one launch scores and chooses, so that the launch need not be cooperative."""
    launch_of = kernel.launch

    def launched(spec: Any, grid: tuple[int, int, int], values: Any, *, cooperative: bool = False, **more: Any) -> None:
        launch_of(spec, grid, values, **more, **({"cluster": grid[0]} if cooperative and grid[0] <= 16 else {"cooperative": cooperative}))

    with patch.object(kernel, "launch", launched):
        yield


@contextmanager
def sixteen_warps() -> Iterator[None]:
    """Let the scorer of many rows have one block of sixteen warps a multiprocessor instead of two of eight. For new layers."""
    launch_of, spec_of, parts_of = kernel.launch, launch.score_kernel, launch._parts

    def launched(spec: Any, grid: tuple[int, int, int], values: Any, *, threads: int = 0, shared: int = 0, **more: Any) -> None:
        both = {"threads": 512, "shared": spec.shared} if spec.entry == "fier_score" else {"threads": threads, "shared": shared}
        launch_of(spec, grid, values, **both, **more)

    def spec(*shape: Any) -> CudaSpec:
        made = spec_of(*shape)
        return replace(made, defines=(*made.defines, "-DWARPS=16", "-DRESIDENT=1"), shared=2 * made.shared)

    with (
        patch.object(kernel, "launch", launched),
        patch.object(launch, "score_kernel", spec),
        patch.object(launch, "_parts", lambda rows, groups, slots: parts_of(rows, groups, slots // 2)),
    ):
        yield


def remember(self: Any, spec: Any, binary: Any) -> Any:
    """Load a kernel and remember its module, of which clocks are read."""
    module = self._core.ObjectCode.from_cubin(binary.cubin)
    modules[spec.entry, spec.defines] = module
    return module.get_kernel(spec.entry)


def clocks(layers: Layers) -> Iterator[str]:
    """Yield mean and greatest cycles from a block's begin to each of its marks, of one choice."""
    from cuda.bindings import driver as cuda

    with form(True, traced=True):
        for i in range(layers.count):
            layers.select(i)
        torch.cuda.synchronize()
    for (entry, defines), module in modules.items():
        if "-DTRACE" not in defines:
            continue
        _, at, size = cuda.cuLibraryGetGlobal(cuda.CUlibrary(int(module.handle)), b"trace")
        host = torch.empty(192, 32, dtype=torch.int64)
        cuda.cuMemcpyDtoH(host.data_ptr(), at, size)
        blocks = [row for row in host.tolist() if row[0]]
        used = [i for i in range(1, 32) if sum(1 for row in blocks if row[i]) * 2 > len(blocks)]
        marks = ((i, [row[i] - row[0] for row in blocks if row[i]]) for i in used)
        yield f"  cycles of {entry} ({len(blocks)} blocks): " + ", ".join(f"{i}: {statistics.mean(own):.0f} (most {max(own)})" for i, own in marks)


def build(model: str, batch: int, context: int, count: int) -> Layers:
    """Make layers of a case."""
    case = Case("retrieve", model, find_geometry(model, "bfloat16"), find_policy("fier", context, None, None, []), batch, context)
    return Layers(case, count, DEV)


def times(layers: Layers, listed: bool | None) -> dict[str, Any]:
    """Time a form."""
    with form(listed):
        own = {name: round(measure(call, layers.count, 15, DEV).median_us, 2) for name, call in
               (("choice", layers.select), ("attention", layers.attend), ("whole", layers.step))}  # fmt: skip
        return {**own, "kernels": kernel_times(layers.select, layers.count, DEV)}


def same_lists(layers: Layers) -> str:
    """Compare both forms' lists of every layer, and the first with torch."""
    differ = 0
    layers.step(0)
    for i in range(layers.count):
        found = []
        for listed in (False, True):
            layers.poison("select")
            with form(listed):
                layers.append(i), layers.select(i)
            found.append(layers.selection.clone())
        differ += int((found[0] != found[1]).any(-1).sum())
    findings = Findings()
    with form(True):
        layers.step(0)
    check_layer(layers, 0, findings, frozenset({"select", "attend"}))
    return f"rows that differ {differ} of {layers.count * found[0].shape[0] * found[0].shape[1]}, torch {findings.to_json()}"


def specs() -> Iterator[CudaSpec]:
    """Yield what this script launches and the package does not bring compiled."""
    for rows, heads, units, width, maximum, trace in (
        (32, 7, 131072, 2048, False, True), (64, 4, 131072, 2048, False, True), (32, 5, 131072, 2048, True, False),
        (32, 8, 131072, 2048, False, False), (32, 7, 65536, 2048, False, False), (128, 7, 32768, 1024, False, False),
        (64, 7, 65536, 2048, False, False),
    ):  # fmt: skip
        for listed in (False, True):
            cluster = launch.select_cluster(rows, units, "90", heads=heads, width=None if listed else width)
            filters = not listed and launch.select_filters(units, cluster, heads, "90")
            made = [launch.select_kernel(cluster, heads, maximum, 1, 32, "90", filters=filters, listed=listed)]
            made += [launch_lists.list_kernel(heads, maximum, 1, 32, "90")] * listed
            yield from made
            yield from (replace(one, defines=(*one.defines, "-DTRACE")) for one in made if listed and trace)


def compile_all() -> None:
    """Compile side by side into the user's folder."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda spec: store.write(store.user_folder(), spec, spec.compile()), dict.fromkeys(specs())))


def few_rows(layers: Layers) -> str:
    """Time the one launch of few rows as clusters, once its lists are the same."""
    layers.append(0), layers.select(0)
    wanted = layers.selection.clone()
    layers.poison("select")
    with row_clusters():
        layers.append(0), layers.select(0)
        differ = int((layers.selection != wanted).any(-1).sum())
        return f"  rows as clusters: rows that differ {differ}, {json.dumps(times(layers, None))}"


def check() -> None:
    """Compare with the choice from all scores where many tie, lie side by side or override budgets."""
    torch.manual_seed(int(time.time()))
    for heads, pooling in ((7, "softmax-mean"), (5, "softmax-max"), (8, "softmax-mean")):
        choice_checks.check_listed([131056] * 32, 2048, heads, pooling)
    choice_checks.check_listed([131056] * 64, 2048, 4, "softmax-mean")
    choice_checks.check_listed([131056, 70000, 300, 2049, 2112, 40000, 9000, 100001] * 4, 2048, 7, "softmax-mean")
    choice_checks.check_listed([131056] * 32, 2048, 7, "softmax-mean", clumped=True)
    choice_checks.check_listed([131056] * 32, 2048, 7, "softmax-mean", levels=4)
    choice_checks.check_listed([131056] * 32, 2048, 7, "softmax-mean", own=[0, 500, 2048, 100] * 8)
    print("choices that differ:", len(retrieval_case.failures), retrieval_case.failures[:5], flush=True)


def main() -> int:
    """Check, then measure until the time is up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    until, lines = time.time() + options.seconds, []
    patch.object(driver.Kernel, "_load", remember).start()

    def say(line: str) -> None:
        lines.append(line)
        print(f"[{until - time.time():.0f}]", line, flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")

    compile_all()
    say("compiled")
    with torch.inference_mode():
        check()
        for k, load in enumerate((*CHANGED, *SAME)):
            if time.time() > until:
                say(f"no time for {load}")
                break
            say("{} {} x {}".format(*load[:3]))
            for line in measured(load, changed=k < len(CHANGED), main=k < 2):
                say(line)
    return bool(retrieval_case.failures)


def measured(load: tuple[str, int, int, int], *, changed: bool, main: bool) -> Iterator[str]:
    """Yield what was found out about one load; main: with clocks and other forms of the scorer."""
    layers: Layers | None = build(*load)
    assert layers is not None
    if changed:
        yield f"  {same_lists(layers)}"
        for listed in (False, True, True, False)[: 4 if main else 2]:
            yield f"  {'lists' if listed else 'before'}: {json.dumps(times(layers, listed))}"
    else:
        yield f"  as before: {json.dumps(times(layers, None))}"
    try:
        if main:
            yield from clocks(layers)
            modules.clear()
            layers = None
            gc.collect(), torch.cuda.empty_cache()
            with sixteen_warps():
                layers = build(*load)
                yield f"  lists, sixteen warps: {same_lists(layers)} {json.dumps(times(layers, True))}"
        elif not changed and load[1:3] == (1, 32768):
            yield few_rows(layers)
    except Exception as error:  # noqa: BLE001 - these are extra
        yield f"  {error!r}"
    layers = None
    gc.collect(), torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())

"""Times the one launch that scores page summaries and chooses among them, with variants by definitions, and says where the time goes.

Run it on a machine with a GPU: python build_scripts/tune_pages.py [part ...], parts alone, marks, whole. Every variant's lists are compared with
those of the selector for the same scores before it is timed. Summaries are random; buffers in turn exceed the caches.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import torch

from trtkv.bench.cases import Case, find_geometry, find_policy, rotation
from trtkv.bench.layer import Layers
from trtkv.bench.timing import cache_bytes, measure
from trtkv.plugins._device import nvrtc
from trtkv.plugins.kv_append import cuda as append_cuda
from trtkv.plugins.kv_attend import cuda as attend_cuda
from trtkv.plugins.kv_select import cuda as select_cuda
from trtkv.plugins.kv_select import launch, launch_fused

DEVICE = torch.device("cuda")
UNIT, DIM, SINK, WINDOW = 32, 128, 16, 64
MARKS = 32  # of a block in the trace
BLOCKS = 192


@dataclass(frozen=True)
class Variant:
    """A build and a layout of the launch; blocks and pad (bytes of shared memory more) as the package has them where they are 0."""

    name: str
    defines: tuple[str, ...] = ()
    blocks: int = 0
    pad: int = 0
    overlap: bool = True


class Shape:
    """Random summaries of some layers, lengths half a page beyond the last full one, and the launch's scratch."""

    def __init__(self, heads: int, group: int, batch: int, pages: int, pooling: str) -> None:
        self.heads, self.group, self.batch, self.pages, self.pooling = heads, group, batch, pages, pooling
        self.rows, self.budget = heads * batch, 1024 if pages <= 1024 else 2048
        read = self.rows * pages * 2 * DIM * 2
        self.count = min(64, max(3, -(-2 * cache_bytes(DEVICE) // read) + 1))
        self.table = torch.randperm(batch * pages, device=DEVICE).view(batch, pages).int()
        self.lens = torch.full((batch,), pages * UNIT - 16, dtype=torch.int32, device=DEVICE)
        self.vectors = []
        for _ in range(self.count):
            low = torch.randn(batch * pages, heads, 1, 1, DIM, device=DEVICE, dtype=torch.bfloat16) - 2
            self.vectors.append(torch.cat([low, low + 4], 3))
        self.q = torch.randn(batch, heads * group * DIM, device=DEVICE, dtype=torch.bfloat16)
        self.out = torch.empty(batch, heads, self.budget // UNIT + 1, dtype=torch.int32, device=DEVICE)
        self.name = f"{self.rows:3} rows x {pages} G{group} {pooling}"

    def plan(self, variant: Variant) -> launch_fused.Fused:
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        plan = launch_fused.Fused.plan_pages(self.rows, self.group, self.pooling, self.pages, sms, launch.arch())
        assert plan is not None
        if variant.blocks:
            room = -(-(-(-self.pages // 32)) // variant.blocks) * 32
            shared = launch_fused._marks_bytes(room) + plan.heads * (room + 8) * 2
            plan = replace(plan, blocks=variant.blocks, room=room, shared=shared)
        return replace(plan, shared=plan.shared + variant.pad)


class Launch:
    """A variant of the launch on a shape."""

    def __init__(self, shape: Shape, variant: Variant, *more: str) -> None:
        self.shape, self.variant, self.plan = shape, variant, shape.plan(variant)
        defines = (*launch_fused._defines(DIM, shape.group, shape.pooling, self.plan), "-DKIND=0", "-DPER_PAGE=1", "-DBF16", *variant.defines, *more)
        folder = launch_fused._HERE
        self.kernel = nvrtc.load(folder / "page_select.cu", "page_select", launch_fused._PAGES, defines, launch.arch(), 190 * 1024)
        self.mail, self.stamps = self.plan.allocate(DEVICE)

    def __call__(self, i: int, scores: torch.Tensor | None = None, parts: torch.Tensor | None = None) -> None:
        s, plan = self.shape, self.plan
        given = (s.q, s.vectors[i % s.count], None, None, s.table, s.lens, s.out, None, None, self.mail, self.stamps, scores, parts)
        values = (*(0 if one is None else one.data_ptr() for one in given), s.q.stride(0), s.table.stride(0), UNIT,
                  0 if scores is None else scores.shape[2], s.budget, 0, s.out.shape[2] - 1, SINK, WINDOW, plan.room, DIM**-0.5 * 1.4426950408889634)  # fmt: skip
        self.kernel.launch(
            (plan.blocks, s.heads, s.batch), 32 * plan.warps, plan.shared, launch.stream(), values, overlap=self.variant.overlap, cooperative=True
        )

    def check(self) -> str:
        """Compare with the selector on the scores that the launch leaves, and again without them."""
        s, plan = self.shape, self.plan
        scores = torch.full((s.rows, plan.heads, -(-s.pages // 32) * 32), torch.nan, dtype=torch.float16, device=DEVICE)
        parts = torch.zeros(s.rows, plan.blocks, plan.heads, 4, device=DEVICE)
        again, wrong = torch.empty_like(s.out), 0
        for i in range(2):
            s.q.normal_()
            self(i, scores, parts)
            launch.select_units(scores, parts, s.lens, again, budget=s.budget, sink=SINK, window=WINDOW, unit=UNIT, group=UNIT, pooling=s.pooling)
            wrong += int((again != s.out).any(-1).sum())
            s.out.fill_(-7)
            self(i)
            wrong += int((again != s.out).any(-1).sum())
        torch.cuda.synchronize()
        return "right" if not wrong else f"WRONG in {wrong} of {4 * s.rows} rows"


def attempt(what: str, work: Callable[[], str]) -> None:
    """Print what some work finds; a failure is printed and loses nothing else."""
    began = time.perf_counter()
    try:
        found = work()
    except Exception as error:
        found = f"FAILED {type(error).__name__}: {str(error)[:300]}"
    print(f"{what:44} {found}   [{time.perf_counter() - began:.1f} s]", flush=True)


def time_alone(shape: Shape, variant: Variant) -> str:
    one = Launch(shape, variant)
    right = one.check()
    first, second = (measure(one, shape.count, 15, DEVICE) for _ in range(2))
    return f"{first.median_us:7.2f} {second.median_us:7.2f} us  {right}"


def mark(shape: Shape, variant: Variant) -> str:
    """Cycles from a block's start to its marks: mean over blocks, and the largest."""
    one = Launch(shape, variant, "-DTRACE")
    driver = one.kernel._driver
    code, address, size = driver.cuModuleGetGlobal(one.kernel._module, b"trace")
    assert int(code) == 0
    host = (ctypes.c_longlong * (size // 8))()
    found = []
    graph_calls = max(3, min(shape.count, 8))
    for i in range(graph_calls):
        one(i)
        torch.cuda.synchronize()
        driver.cuMemcpyDtoH(ctypes.addressof(host), address, size)
        trace = torch.tensor(list(host)).view(-1, MARKS)[: min(BLOCKS, shape.rows * one.plan.blocks)]
        if i:
            found.append(trace - trace[:, 16:17])
    times = torch.stack(found).double()
    live = [i for i in range(MARKS) if i != 16 and bool((times[:, :, i].abs() < 10**7).all()) and bool((times[:, :, i] > 0).all())]
    text = [f"{i}: {times[:, :, i].mean():.0f}/{times[:, :, i].amax(1).mean():.0f}" for i in sorted(live, key=lambda i: float(times[:, :, i].mean()))]
    left = int((times[:, :, 17] > 0).sum())
    return " ".join(text) + (f" | {left} blocks of {times.shape[0] * times.shape[1]} left it to the counts" if left else "")


class Filled(Layers):
    """Layers whose buffers hold random numbers: times do not depend on what is stored."""

    def _fill(self) -> None:
        for name, tensors in self.session.buffers.items():
            for tensor in tensors:
                if tensor is not None and tensor.is_floating_point():
                    tensor.normal_()
                    if name == "page_bounds":
                        tensor[..., 1, :] += 4


@contextmanager
def overlapping(append: bool, select: bool, attend: bool, blocks: int = 0) -> Iterator[None]:
    """Let launches of a step overlap, each as asked for."""
    with (
        mock.patch.object(append_cuda, "overlaps", lambda *given: append),
        mock.patch.object(select_cuda, "overlaps", lambda *given: select),
        mock.patch.object(attend_cuda, "overlaps", lambda *given: attend),
        mock.patch.object(launch_fused, "FEW_BLOCKS", blocks or launch_fused.FEW_BLOCKS),
        mock.patch.object(launch_fused, "LEAST_PAGES", 32 if blocks else launch_fused.LEAST_PAGES),
    ):
        yield


@contextmanager
def carved(percent: int, more: tuple[str, ...]) -> Iterator[None]:
    """Build the launch with definitions, and with so much of a multiprocessor's memory as shared memory."""
    made = launch_fused.page_kernel

    def kernel(*given: object, **named: object) -> nvrtc.Kernel:
        one = made(*given, **named)
        one.prefer_shared(percent)
        return one

    defines = launch_fused._defines
    with (
        mock.patch.object(launch_fused, "page_kernel", kernel),
        mock.patch.object(launch_fused, "_defines", lambda *given: (*defines(*given), *more)),
    ):
        yield


def time_whole(layers: Layers, forms: Sequence[tuple[bool, bool, bool, int]]) -> None:
    name = f"{layers.case.geometry} {layers.case.batch} x {layers.case.context} {layers.case.policy.name}"
    for form in forms:

        def work(form: tuple[bool, bool, bool, int] = form) -> str:
            with overlapping(*form):
                layers.session._scratch.clear()
                return f"{measure(layers.step, layers.count, 15, DEVICE).median_us:7.2f} us"

        attempt(f"{name} overlap {''.join('-A'[f] for f in form[:3])} blocks {form[3]}", work)


def make_layers(geometry: str, batch: int, context: int, policy: str, *sets: str) -> Layers:
    case = Case("retrieve", geometry, find_geometry(geometry, "bfloat16"), find_policy(policy, context, None, None, sets), batch, context)
    count = rotation(case.rows * case.stored // 32 * 512, case.layer_bytes(), cache_bytes(DEVICE), 90 << 30)
    return Filled(case, min(count, 24), DEVICE)


@dataclass
class Plan:
    """What a run does."""

    alone: list[tuple[tuple[int, int, int, int, str], list[Variant]]] = field(default_factory=list)
    marks: list[tuple[tuple[int, int, int, int, str], list[Variant]]] = field(default_factory=list)
    whole: list[tuple[tuple[str, int, int, str], list[tuple[bool, bool, bool, int]]]] = field(default_factory=list)


SHAPES = [(4, 7, 1, 1024), (4, 7, 1, 4096), (8, 4, 1, 4096), (4, 7, 8, 1024), (4, 7, 8, 4096), (8, 4, 8, 4096)]
CLASSIC = ("-DCLASSIC",)


LATE = ("-DEARLY_ROUNDS=0",)


def variants(shape: tuple[int, int, int, int], pooling: str) -> list[Variant]:
    found = [Variant("classic late", (*CLASSIC, *LATE)), Variant("short")]
    rows = shape[0] * shape[2]
    if rows <= 8:
        found += [Variant(f"short {n} blocks", blocks=n) for n in (8, 16, 32) if n * rows <= 132 and shape[3] // n >= 32]
        found += [Variant("short early 2, 16 blocks", ("-DEARLY_ROUNDS=2",), blocks=16)]
    if rows >= 32:
        found += [Variant(f"{one.name} alone", one.defines, overlap=False) for one in found[:2]]
    return found


def run(parts: Sequence[str]) -> None:
    for shape, pooling in itertools.product(SHAPES, ("max", "softmax-mean")):
        if not {"alone", "marks"} & set(parts):
            break
        made = Shape(*shape, pooling)
        for variant in variants(shape, pooling):
            if "alone" in parts:
                attempt(f"{made.name}: {variant.name}", lambda: time_alone(made, variant))
            if "marks" in parts:
                if variant.name in ("classic late", "short"):
                    attempt(f"{made.name}: {variant.name} marks", lambda: mark(made, variant))
    if "whole" in parts:
        apart, together = (False, False, False, 0), (True, True, True, 0)
        few = [(True, True, True, n) for n in (8, 16, 32)]
        classic = (*CLASSIC, *LATE)
        every = (
            (("qwen2.5-7b", 8, 131072, "quest"), [(40, classic, apart), (40, (), apart), (10, (), together), (20, (), together), (40, (), together)]),
            (
                ("llama-3.1-8b", 8, 131072, "quest"),
                [(40, classic, apart), (40, (), apart), (10, (), together), (20, (), together), (40, (), together)],
            ),
            (("qwen2.5-7b", 8, 131072, "freekv"), [(40, classic, apart), (40, classic, together), (40, (), together)]),
            (("qwen2.5-7b", 1, 32768, "freekv"), [(40, classic, together), (40, (), together)]),
            (("qwen2.5-7b", 1, 32768, "quest"), [(10, (), together), *((40, (), one) for one in few)]),
            (("qwen2.5-7b", 1, 131072, "quest"), [(10, (), together), *((40, (), one) for one in few)]),
            (("qwen2.5-7b", 8, 32768, "quest"), [(-1, classic, together), (10, (), together), (40, (), together)]),
        )
        for given, forms in every:
            layers = make_layers(*given, "retrieve.page=32")
            for percent, more, form in forms:
                with carved(percent, more):
                    print(percent, *more, end=" ")
                    time_whole(layers, [form])
            del layers
            torch.cuda.empty_cache()


def run_fier() -> None:
    """Overlap of scorer and selector of one-bit keys, with a carve-out of their own."""
    for given in (("llama-3.1-8b", 8, 131072), ("qwen2.5-7b", 8, 131072)):
        layers = make_layers(*given, "fier")
        for percent in (-1, 20, 40, 60):

            def wrap(made: Callable[..., nvrtc.Kernel], percent: int = percent) -> Callable[..., nvrtc.Kernel]:
                def kernel(*given: object, **named: object) -> nvrtc.Kernel:
                    one = made(*given, **named)
                    one.prefer_shared(percent)
                    return one

                return kernel

            with mock.patch.object(launch, "score_kernel", wrap(launch.score_kernel)):
                print("fier carve-out of the scorer", percent)
                time_whole(layers, [(False, False, False, 0), (False, True, True, 0), (True, True, True, 0)])
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        run(sys.argv[1:] or ["alone", "marks", "whole"])
        if "fier" in sys.argv:
            run_fier()

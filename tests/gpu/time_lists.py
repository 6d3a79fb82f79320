"""Times of decode attention over lists in several forms, checked first: python -m tests.gpu.time_lists [--compile FOLDER] [--trace] [--only TEXT]."""

from __future__ import annotations

import argparse
import ctypes
import math
import re
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import trtkv.plugins
from trtkv.plugins._device import nvrtc, store
from trtkv.plugins.kv_attend import launch
from trtkv.plugins._device.nvrtc import CudaSpec, Float, Int, Pointer

PLUGINS = Path(trtkv.plugins.__file__).parent
TRACED = ("qwen 8x128k", "qwen 1x32k", "qwen 1x32k tokens")
TYPES = (Pointer,) * 7 + (Int,) * 6 + (Float,)
TRACE = (
    'extern "C" __device__ long long trace[512 * 16];\n'
    "#define MARK(i) if (threadIdx.x == 0) { long long* to = trace + (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) * 16; "
    'to[i] = clock64(); asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(to[(i) ? 15 : 14])); '
    'if ((i) == 0) asm volatile("{.reg .u32 x; mov.u32 x,%%smid; cvt.u64.u32 %0,x;}" : "=l"(to[13])); }\n'
)


@dataclass(frozen=True)
class Geometry:
    name: str
    heads: int
    group: int
    batch: int
    context: int
    budget: int
    unit: int
    page: int = 32
    dim: int = 128

    @property
    def rows(self) -> int:
        return self.heads * self.batch

    @property
    def overlaps(self) -> bool:
        return self.rows * self.context <= 1 << 21

    @property
    def bound_us(self) -> float:
        return self.rows * self.budget * 4 * self.dim / 4.3e6


@dataclass(frozen=True)
class Variant:
    name: str
    source: str
    cluster: int
    warps: int
    more: tuple[tuple[str, int], ...]
    shared: int

    def spec(self, g: Geometry, folder: Path) -> CudaSpec:
        shape = {"D": g.dim, "GROUP_HEADS": g.group, "CLUSTER": self.cluster, "UNIT": g.unit, "WARPS": self.warps, **dict(self.more)}
        return CudaSpec(folder / self.source, "attend_list", TYPES, "90", self.shared, (*(f"-D{k}={v}" for k, v in shape.items()), "-DBF16"))


def old(g: Geometry, cluster: int = 0, warps: int = 0, stages: int = 2) -> Variant:
    form = launch.attend_form(g.rows, g.dim)
    cluster, warps = cluster or form[0], warps or form[1]
    return Variant(f"before c{cluster} w{warps} s{stages}", "before.cu", cluster, warps, (("STAGES", stages),), warps * stages * 64 * g.dim)


def rings(g: Geometry, cluster: int, warps: int, stages: int, **flags: int) -> Variant:
    name = f"now c{cluster} w{warps} s{stages}" + "".join(f" {k}={v}" for k, v in flags.items())
    return Variant(name, "attend.cu", cluster, warps, (("STAGES", stages), *flags.items()), warps * stages * 64 * g.dim)


def geometries() -> list[Geometry]:
    return [
        Geometry("qwen 8x128k", 4, 7, 8, 131072, 2048, 32),
        Geometry("llama3 8x128k", 8, 4, 8, 131072, 2048, 32),
        Geometry("qwen 8x32k", 4, 7, 8, 32768, 1024, 32),
        Geometry("qwen 1x128k", 4, 7, 1, 131072, 2048, 32),
        Geometry("qwen 1x32k", 4, 7, 1, 32768, 1024, 32),
        Geometry("llama3 1x128k", 8, 4, 1, 131072, 2048, 32),
        Geometry("llama3 2x32k", 8, 4, 2, 32768, 1024, 32),
        Geometry("qwen 6x128k", 4, 7, 6, 131072, 2048, 32),
        Geometry("llama3 5x32k", 8, 4, 5, 32768, 1024, 32),
        Geometry("llama3 6x128k", 8, 4, 6, 131072, 2048, 32),
        Geometry("llama3 12x32k", 8, 4, 12, 32768, 1024, 32),
        Geometry("llama3 16x32k", 8, 4, 16, 32768, 1024, 32),
        Geometry("llama2 1x32k", 32, 1, 1, 32768, 1024, 32),
        Geometry("qwen 8x128k tokens", 4, 7, 8, 131072, 2048, 1),
        Geometry("qwen 1x128k tokens", 4, 7, 1, 131072, 2048, 1),
        Geometry("qwen 1x32k tokens", 4, 7, 1, 32768, 1024, 1),
    ]


def variants(g: Geometry) -> list[Variant]:
    form = launch.attend_form(g.rows, g.dim)
    one = [old(g), rings(g, *form, 2), rings(g, *form, 2, WARM=1)]
    if g.unit == 1:
        one += [rings(g, form[0], 2 * form[1], 1)]
    if g.rows in (24, 40):
        one += [rings(g, 3, 8, 2), rings(g, 2, 8, 2), rings(g, 8, 4, 2), rings(g, 5, 8, 2), rings(g, 4, 4, 2)]
    if g.rows in (48, 96, 128):
        one += [rings(g, 2, 4, 3), rings(g, 2, 8, 2), rings(g, 4, 4, 2), rings(g, 1, 8, 3), rings(g, 1, 8, 2)]
    if g.rows == 8:
        one += [rings(g, 8, 8, 2), rings(g, 12, 4, 2)]
    return one


class Data:
    def __init__(self, g: Geometry) -> None:
        self.g = g
        torch.manual_seed(1)
        pages = g.batch * g.context // g.page
        shape = (pages, g.heads, g.page, g.dim)
        count = max(3, min(40, int(160e6 / (g.rows * g.budget * 4 * g.dim)) + 2))
        fill = lambda: torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()  # noqa: E731
        self.pools = [(fill(), fill()) for _ in range(count)]
        self.keys, self.values = self.pools[0]
        self.table = torch.randperm(pages, device="cuda").view(g.batch, -1).int()
        self.lens = torch.full((g.batch,), g.context - 16, dtype=torch.int32, device="cuda")
        self.q = torch.randn(g.batch, g.heads * g.group * g.dim, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        most, count = g.budget // g.unit, -(-g.context // g.unit) - (0 if g.unit > 1 else 16)
        own = torch.rand(g.batch, g.heads, count - 1, device="cuda").topk(most - 1).indices.sort(-1).values.int()
        tail = torch.tensor([count - 1, most], dtype=torch.int32, device="cuda").expand(g.batch, g.heads, 2)
        self.chosen = torch.cat([own, tail], -1).contiguous()

    def args(self, i: int) -> tuple:
        (keys, values), chosen, table, q = self.pools[i % len(self.pools)], self.chosen, self.table, self.q
        pointers = [x.data_ptr() for x in (q, keys, values, table, self.lens, chosen, self.out)]
        return (*pointers, q.stride(0), q.stride(0), table.stride(0), self.g.page, chosen.shape[2], 1, self.g.dim**-0.5 * 1.4426950408889634)

    def launch(self, kernel, v: Variant, i: int, overlap: bool) -> None:
        grid = (v.cluster, self.g.heads, self.g.batch)
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(grid, v.warps * 32, v.shared, stream, self.args(i), cluster=v.cluster, overlap=overlap)

    def truth(self) -> tuple[torch.Tensor, float]:
        """The answer in fp32, and the relative error of torch in bf16."""
        g, chosen = self.g, self.chosen.long()
        tokens = (chosen[..., :-1, None] * g.unit + torch.arange(g.unit, device="cuda")).flatten(2)
        there = tokens < self.lens[:, None, None]
        tokens = tokens.clamp(max=int(self.lens.max()) - 1)
        pages = self.table.long().gather(1, (tokens // g.page).flatten(1)).view_as(tokens)
        head = torch.arange(g.heads, device="cuda")[None, :, None]
        keys, values = (x[pages, head, tokens % g.page] for x in (self.keys, self.values))
        q = self.q.view(g.batch, g.heads, g.group, g.dim)
        run = lambda t: torch.nn.functional.scaled_dot_product_attention(q.to(t), keys.to(t), values.to(t), attn_mask=there[:, :, None])  # noqa: E731
        exact = run(torch.float32)
        return exact, float((run(torch.bfloat16) - exact).norm() / exact.norm())

    def error(self, kernel, v: Variant, exact: torch.Tensor) -> float:
        self.out.fill_(float("nan"))
        self.launch(kernel, v, 0, False)
        torch.cuda.synchronize()
        return float((self.out.view_as(exact) - exact).norm() / exact.norm())

    def time(self, kernel, v: Variant, overlap: bool, runs: int = 9, launches: int = 0) -> float:
        launches = launches or max(12, len(self.pools))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.launch(kernel, v, 0, overlap)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                self.launch(kernel, v, i, overlap)
        samples = []
        for _ in range(runs + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / launches)
        return statistics.median(samples[2:])


def traced_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    for file in [*PLUGINS.glob("_device/*.cuh"), *PLUGINS.glob("kv_attend/*.cu*")]:
        shutil.copy(file, folder)
    common = folder / "common.cuh"
    common.write_text(re.sub(r"#ifdef TRACE.*?#endif\n", lambda _: TRACE, common.read_text(), flags=re.DOTALL))
    return folder


def show_trace(data: Data, kernel, v: Variant) -> None:
    from cuda.bindings import driver

    for i in range(len(data.pools)):
        data.launch(kernel, v, i, False)
    torch.cuda.synchronize()
    _, address, size = driver.cuModuleGetGlobal(kernel._module, b"trace")
    host = (ctypes.c_longlong * (size // 8))()
    driver.cuMemcpyDtoH(host, address, size)
    t = torch.tensor(list(host)).view(-1, 16)[: v.cluster * data.g.rows]
    first = t[:, 14].min()
    marks = [m for m in range(1, 10) if (t[:, m] > 0).all()]
    print(f"    start us mean {float((t[:, 14] - first).float().mean()) / 1e3:.2f} max {float((t[:, 14] - first).max()) / 1e3:.2f}; "
          f"end mean {float((t[:, 15] - first).float().mean()) / 1e3:.2f} min {float((t[:, 15] - first).min()) / 1e3:.2f} "
          f"max {float((t[:, 15] - first).max()) / 1e3:.2f}; SMs {len(t[:, 13].unique())} most blocks {int(t[:, 13].bincount().max())}")  # fmt: skip
    since = lambda m: (t[:, m] - t[:, 0]).float()  # noqa: E731
    print("    cycles since the start (mean/max): " + ", ".join(f"{m}: {since(m).mean():.0f}/{since(m).max():.0f}" for m in marks), flush=True)


def attribute(kernel) -> str:
    from cuda.bindings import driver

    names = ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES")
    found = [driver.cuFuncGetAttribute(getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{n}"), kernel._function)[1] for n in names]
    return f"r{found[0]} l{found[1]} s{found[2]}"


WHOLE = [("qwen2.5-7b", 8, 131072, "quest"), ("llama-3.1-8b", 8, 131072, "quest"), ("qwen2.5-7b", 1, 32768, "quest")]
KERNELS: list = []


def remember_kernels() -> None:
    from trtkv.plugins._device import driver

    first = driver.Kernel.__init__

    def init(self, spec, binary) -> None:
        first(self, spec, binary)
        self.entry = spec.entry
        KERNELS.append(self)

    driver.Kernel.__init__ = init


def corners() -> int:
    """Compare short lists, fewer entries than places, units that overhang the stored tokens, and everything stored, over NaN."""
    bad = 0
    for g in corner_geometries():
        bad += corner(g)
    print(f"corners: {bad} wrong", flush=True)
    return bad


def corner_geometries() -> list[Geometry]:
    shapes = [(2, 7, 128, 32, 32, 512), (1, 4, 128, 32, 32, 256), (3, 4, 128, 32, 1, 256), (2, 1, 96, 32, 1, 256), (2, 16, 64, 16, 8, 128), (1, 12, 128, 48, 3, 60)]
    shapes += [(1, 16, 256, 16, 4, 128), (2, 8, 128, 32, 16, 512), (4, 5, 64, 64, 64, 1024)]
    batches = (1, 3, 5, 9, 30)
    return [Geometry("corner", *shape[:2], batch, 0, shape[5], shape[4], shape[3], shape[2]) for shape in shapes for batch in batches]


def corner_variants(g: Geometry) -> list[Variant]:
    form = launch.attend_form(g.rows, g.dim)
    return [rings(g, *form, 2), rings(g, *form, 2, WARM=1)]


def corner(g: Geometry) -> int:
    heads, group, dim, page, unit, budget, batch, bad = g.heads, g.group, g.dim, g.page, g.unit, g.budget, g.batch, 0
    lens = [(1500, 300, 10, 3001, 77)[b % 5] + b for b in range(batch)]
    most, count = -(-max(lens) // page) + 1, budget // unit
    table = torch.randperm(batch * most, device="cuda").view(batch, most).int()
    hidden = torch.arange(most * page, device="cuda").view(1, most, 1, page, 1) >= torch.tensor(lens, device="cuda").view(-1, 1, 1, 1, 1)
    pools = []
    for _ in range(2):
        pool = torch.empty(batch * most, heads, page, dim, dtype=torch.bfloat16, device="cuda")
        pool[table.long()] = torch.randn(batch, most, heads, page, dim, device="cuda").masked_fill_(hidden, float("nan")).bfloat16()
        pools.append(pool)
    lists = torch.full((batch, heads, count + 1), -1, dtype=torch.int32)
    for b, n in enumerate(lens):
        units = -(-n // unit)
        for h in range(heads):
            own = min(units, count - h % 2 * 2)
            if units > count or b % 2:
                lists[b, h, : own - 1] = torch.randperm(units - 1)[: own - 1].sort().values.int()
                lists[b, h, own - 1], lists[b, h, -1] = units - 1, own
    q = torch.randn(batch, heads * group * dim, device="cuda").bfloat16()
    chosen, stored = lists.cuda(), torch.tensor(lens, dtype=torch.int32, device="cuda")
    for v in corner_variants(g):
        kernel = store.load(v.spec(g, PLUGINS / "kv_attend"))
        for settled in (0, 1):
            out = torch.full_like(q, float("nan"))
            pointers = [x.data_ptr() for x in (q, *pools, table, stored, chosen, out)]
            sizes = (q.stride(0), q.stride(0), most, page, count + 1, settled, dim**-0.5 * 1.4426950408889634)
            stream = torch.cuda.current_stream().cuda_stream
            kernel.launch((v.cluster, heads, batch), v.warps * 32, v.shared, stream, (*pointers, *sizes), cluster=v.cluster)
            worst = torch.zeros((), device="cuda")
            for b in range(min(batch, 6)):
                for h in range(heads):
                    own = int(lists[b, h, -1])
                    chunks = lists[b, h, :own].long().cuda()[:, None] * unit + torch.arange(unit, device="cuda")
                    t = torch.arange(lens[b], device="cuda") if own < 0 else chunks.flatten()
                    t = t[t < lens[b]]
                    keys, values = (x[table[b].long()[t // page], h, t % page].float() for x in pools)
                    exact = torch.softmax(q[b].view(heads, group, dim)[h].float() @ keys.T * dim**-0.5, -1) @ values
                    found = out[b].view(heads, group, dim)[h].float()
                    worst = torch.maximum(worst, (found - exact).norm() / exact.norm())
                    worst = torch.where(found.isnan().any(), torch.inf, worst)
            if not float(worst) < 0.005:
                bad += 1
                print(f"  WRONG {float(worst)}: {v.name} heads {heads} group {group} dim {dim} page {page} unit {unit} batch {batch} settled {settled}")
    return bad


@torch.inference_mode()
def whole() -> int:
    """Time a layer's step over pages with every form of its attention."""
    from trtkv.bench.cases import Case, find_geometry, find_policy
    from trtkv.bench.layer import Layers
    from trtkv.bench.timing import measure
    from trtkv.plugins.kv_attend import launch

    original, bad = launch.attend_list, 0
    for name, batch, context, policy_name in WHOLE:
        model, policy = find_geometry(name, "bfloat16"), find_policy(policy_name, context, None, None, ["retrieve.page=32"] * (policy_name == "quest"))
        case = Case("retrieve", name, model, policy, batch, context)
        layers = Layers(case, 4, torch.device("cuda"))
        select = case.plan().select[0]
        g = Geometry(name, model.num_kv_heads, model.num_q_heads // model.num_kv_heads, batch, context, select.budget, select.unit, case.plan().page_size)
        print(f"{name} {batch} x {context}: {g.budget} tokens in units of {g.unit}, pages of {g.page}", flush=True)
        known = None
        for v, early, percent in [(None, False, -1), (None, True, -1), (None, True, 60), (None, True, 75), (None, True, 100), (None, True, -1), (old(g), True, -1)]:
            for kernel in KERNELS:
                if kernel.entry in ("page_select", "select_units"):
                    kernel.prefer_shared(percent)
            if True:

                def attend(q, keys, values, table, lens, chosen, out, *, unit, scale, overlap=False, settled=False, v=v, early=early, g=g, **_) -> None:
                    overlap = early
                    if v is None:
                        original(q, keys, values, table, lens, chosen, out, unit=unit, scale=scale, overlap=overlap, settled=settled)
                        return
                    kernel = store.load(v.spec(g, PLUGINS / "kv_attend"))
                    pointers = [x.data_ptr() for x in (q, keys, values, table, lens, chosen, out)]
                    sizes = (q.stride(0), out.stride(0), table.stride(0), keys.shape[2], chosen.shape[2], int(settled), scale * 1.4426950408889634)
                    stream = torch.cuda.current_stream().cuda_stream
                    kernel.launch((v.cluster, g.heads, g.batch), v.warps * 32, v.shared, stream, (*pointers, *sizes), cluster=v.cluster, overlap=overlap)

                launch.attend_list = attend
                try:
                    layers.poison("append", "select", "attend")
                    layers.step(0)
                    torch.cuda.synchronize()
                    out = layers.out.float()
                    known = out if known is None else known
                    error = float((out - known).norm() / known.norm())
                    bad += not error < 0.01
                    times = [measure(call, 4, 12, torch.device("cuda")).median_us for call in (layers.attend, layers.step, layers.step)]
                    label = ("today" if v is None else v.name) + " early" * early + f" {percent} %" * (percent >= 0)
                    print(f"  {label:34s} attend {times[0]:7.2f} whole {times[1]:7.2f} {times[2]:7.2f} differs {error:.5f}", flush=True)
                except Exception as error:  # noqa: BLE001
                    bad += 1
                    print(f"  {v}: {str(error)[:200]}", flush=True)
        launch.attend_list = original
        del layers
        torch.cuda.empty_cache()
    return bad


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", type=Path)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--corners", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    folder = traced_folder() if given.trace else PLUGINS / "kv_attend"
    if given.compile:
        more = [] if given.trace else [v.spec(g, folder) for g in corner_geometries() for v in corner_variants(g)]
        for spec in dict.fromkeys(more + [v.spec(g, folder) for g in geometries() if not given.trace or g.name in TRACED for v in variants(g)]):
            file = given.compile / "sm_90" / spec.name
            if not file.exists():
                store.write(given.compile, spec, spec.compile())
        return 0
    remember_kernels()
    if given.corners:
        return int(corners() > 0)
    if given.whole:
        return int(whole() > 0)
    bad = 0
    for g in geometries():
        if given.only not in g.name or (given.trace and g.name not in TRACED):
            continue
        data = Data(g)
        exact, allowed = data.truth()
        print(f"{g.name}: bound {g.bound_us:.1f} us, torch's error {allowed:.5f}, {len(data.pools)} pools", flush=True)
        for v in variants(g):
            try:
                kernel = store.load(v.spec(g, folder))
                error = data.error(kernel, v, exact)
                good = error <= 2 * allowed and math.isfinite(error)
                bad += not good
                if given.trace:
                    print(f"  {v.name}")
                    show_trace(data, kernel, v)
                    continue
                times = [data.time(kernel, v, overlap) for overlap in (False, True)]
                print(f"  {v.name:34s} {times[0]:7.2f} early {times[1]:7.2f}  error {error:.5f}{'' if good else ' WRONG'} {attribute(kernel)}", flush=True)
            except Exception as error:  # noqa: BLE001
                bad += 1
                print(f"  {v.name}: {str(error)[:200]}", flush=True)
        del data
        torch.cuda.empty_cache()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

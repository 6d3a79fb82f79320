"""Dense decode attention: variants beside the library and the form of the last round, correctness first; clock marks of some."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path

START = time.time()

import torch
from cuda.bindings import driver

from trtkv.bench import check
from trtkv.bench.cases import Case, find_geometry, find_policy, rotation
from trtkv.bench.dense import dense_sets, torch_calls
from trtkv.bench.layer import Layers
from trtkv.bench.timing import cache_bytes, capture, measure
from trtkv.plugins.kv_attend import cuda as attend_cuda
from trtkv.plugins.kv_attend import launch_dense as new
from trtkv.plugins.linear import launch as linear

DEV = torch.device("cuda")
HERE = Path(__file__).parent
NOW = HERE.parent.parent / "plugins"
LIMIT_S = float(sys.argv[1]) if len(sys.argv) > 1 else 50
RUNS = 9


def module(folder: Path):
    spec = importlib.util.spec_from_file_location(f"launch_{folder.name}", folder / "launch_dense.py")
    one = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = one
    spec.loader.exec_module(one)
    return one


today = module(HERE / "today")
old_plan = today.DenseScratch.plan
today.DenseScratch.plan = staticmethod(lambda group, dim, sms: old_plan(64, 32, group, dim, sms))


class Variant:
    def __init__(self, name, base, shape=None, **settings):
        self.name, self.base, self.shape, self.settings = name, base, shape, settings

    def apply(self, layers):
        attend_cuda.launch_dense = self.base
        layers.session._scratch.clear()
        plain = PLAIN[self.base.__name__]
        self.base.dense_shape = (lambda *a: self.shape) if self.shape else plain
        for name, value in self.settings.items():
            setattr(self.base, name, value)


PLAIN = {today.__name__: today.dense_shape, new.__name__: new.dense_shape}


def case_of(name, batch, context):
    return Case("attend", name, find_geometry(name, "bfloat16"), find_policy("full", context, None, None, []), batch, context)


def make(case):
    own = 2 * case.rows * case.stored * case.model.head_dim * 2
    count = rotation(own, case.layer_bytes(), cache_bytes(DEV), 40 << 30)
    layers = Layers(case, count, DEV)
    for i in range(count):
        layers.append(i)
    return layers


def gemvs(layers):
    model = layers.case.model
    qkv = [torch.randn(model.qkv_size, model.hidden_size, dtype=torch.bfloat16, device=DEV) * 0.02 for _ in range(4)]
    back = [torch.randn(model.hidden_size, model.num_q_heads * model.head_dim, dtype=torch.bfloat16, device=DEV) * 0.02 for _ in range(4)]
    x = torch.randn(1, model.hidden_size, dtype=torch.bfloat16, device=DEV)
    y = torch.empty_like(x)

    def call(i):
        linear.gemv(x, qkv[i % 4], None, layers.qkv)
        layers.step(i)
        linear.gemv(layers.out, back[i % 4], None, y)

    def without(i):
        linear.gemv(x, qkv[i % 4], None, layers.qkv)
        layers.append(i)
        linear.gemv(layers.out, back[i % 4], None, y)

    return call, without


@torch.inference_mode()
def run(case, variants, twice=False):
    label = f"{case.geometry} {case.batch}x{case.context}"
    sets = dense_sets(case, cache_bytes(DEV), 20 << 30)
    lib = {n: round(measure(c, sets, RUNS, DEV).median_us, 1) for n, c in torch_calls(case, sets, DEV).items()}
    print(f"== {label} lib {lib} bound {2 * case.rows * case.stored * case.model.head_dim * 2 / 4.3e6:.1f}", flush=True)
    layers = make(case)
    chain = gemvs(layers) if case.batch == 1 else None
    if chain:
        print(f"   append alone {measure(layers.append, layers.count, RUNS, DEV).median_us:.1f}, gemvs+append {measure(chain[1], layers.count, RUNS, DEV).median_us:.1f}")
    for v in variants:
        if time.time() - START > LIMIT_S:
            print("out of time")
            return
        try:
            v.apply(layers)
            findings = check.Findings()
            layers.poison("append", "attend")
            layers.step(1), layers.step(0)
            torch.cuda.synchronize()
            check.check_layer(layers, 0, findings, frozenset({"attend"}))
            times = [measure(f, layers.count, RUNS, DEV) for f in (layers.attend, layers.step, *(chain[:1] if chain else ()))]
            layers.poison("attend")
            layers.attend(0)
            check.check_layer(layers, 0, findings, frozenset({"attend"}))
            text = " ".join(f"{n} {t.median_us:6.1f} ({t.least_us:.1f})" for n, t in zip(("attend", "step", "gemvs"), times))
            print(f"  {v.name:26s} {text}  ok {findings.passed} {findings.attend_error:.1e} of {findings.attend_tolerance:.1e}", flush=True)
        except Exception as error:
            print(f"  {v.name:26s} failed: {type(error).__name__} {str(error)[:200]}", flush=True)
            torch.cuda.synchronize()
    del layers


MARKS = """
extern "C" __device__ long long trace[256 * 16];
__device__ __forceinline__ void note(int i) {
  long long t, c = clock64();
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  if (threadIdx.x == 0 && blockIdx.x < 256 && i == 0) {
    int sm;
    asm volatile("mov.u32 %0,%smid;" : "=r"(sm));
    trace[blockIdx.x * 16 + 15] = sm;
  }
  if (threadIdx.x == 0 && blockIdx.x < 256) trace[blockIdx.x * 16 + i] = t, trace[blockIdx.x * 16 + 8 + i] = c;
}
#define MARK(i) note(i);
"""


def traced(base, folder):
    """A copy of a form whose marks note the time."""
    to = Path(tempfile.mkdtemp())
    for name in ("dense.cu", "tile.cuh", "mixed.cuh"):
        shutil.copy(folder / name, to / name)
    for name in ("common.cuh", "matrix.cuh"):
        text = (NOW / "_device" / name).read_text()
        if name == "common.cuh":
            a, b = text.index("#ifdef TRACE"), text.index("#ifdef BF16")
            text = text[:a] + MARKS + text[b:]
        (to / name).write_text(text)
    base._HERE = to


@torch.inference_mode()
def trace(case, variant, folder):
    layers = make(case)
    before = variant.base._HERE
    try:
        variant.apply(layers)
        traced(variant.base, folder)
        for what, call in (("attend chain", layers.attend), ("append+attend", layers.step)):
            call(0)
            graph = capture(call, 8)
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            dim, group = case.model.head_dim, case.model.num_q_heads // case.model.num_kv_heads
            kernel = variant.base.dense_kernel(dim, group, True, "90")
            code, at, size = driver.cuModuleGetGlobal(kernel._module, b"trace")
            host = torch.empty(256 * 16, dtype=torch.int64)
            driver.cuMemcpyDtoH(host.data_ptr(), at, host.nbytes)
            t = host.view(256, 16)
            t = t[t[:, 0] >= t[:, 0].max() - 200_000]
            origin = t[:, 0].min()
            print(f"  trace {case.geometry} {case.batch}x{case.context} {variant.name} {what}: {len(t)} blocks; ns least/median/most, cycles since the last mark")
            for i in range(6):
                own = t[t[:, i] >= origin]
                if len(own):
                    ns = (own[:, i] - origin).sort().values
                    cycles = (own[:, 8 + i] - own[:, 8 + max(0, i - 1)]).sort().values
                    print(f"    mark {i}: {len(own):4d} ns {ns[0]} {ns[len(ns) // 2]} {ns[-1]}; cycles {cycles[0]} {cycles[len(cycles) // 2]} {cycles[-1]}")
            sys.stdout.flush()
    except Exception as error:
        print(f"  trace {variant.name} failed: {type(error).__name__} {str(error)[:200]}", flush=True)
    finally:
        variant.base._HERE = before


NC = {"COOPERATIVE": False}
TS = ("-DTWO_SUMS",)
VARIANTS = [Variant("today", today), Variant("package", new), Variant("today again", today), Variant("package again", new)]


@torch.inference_mode()
def streams(case, count):
    """Launches of several streams at once: none waits for ever, all are right."""
    attend_cuda.launch_dense = new
    new.dense_shape = PLAIN[new.__name__]
    layers = make(case)
    layers.session._scratch.clear()
    layers.attend(0)
    torch.cuda.synchronize()
    want = layers.out.clone()
    scratches = [new.DenseScratch.plan(case.model.num_q_heads // case.model.num_kv_heads, 128, 132).allocate(DEV) for _ in range(count)]
    outs = [torch.full_like(want, float("nan")) for _ in range(count)]
    several = [torch.cuda.Stream(priority=-(i % 2)) for i in range(count)]
    keys, values = layers.session.buffer("keys", 0), layers.session.buffer("values", 0)
    begin = time.time()
    for _ in range(200):
        for stream, scratch, out in zip(several, scratches, outs):
            with torch.cuda.stream(stream):
                new.attend_dense(layers.query, keys, values, layers.places[-1][0], layers.places[-3][0], out, *scratch, scale=128**-0.5)
    torch.cuda.synchronize()
    print(f"  {count} streams: {(time.time() - begin) * 1e6 / 200 / count:.1f} us a launch, equal {[bool(torch.equal(o, want)) for o in outs]}, owed {[int(x[1].sum()) for x in scratches]}", flush=True)


def checks():
    sys.path.insert(0, str(HERE.parent.parent))
    from tests.gpu import check_retrieval as c

    new.dense_shape = PLAIN[new.__name__]
    torch.manual_seed(5)
    for _ in range(1):
        for shape in ((4, 7, 128, 32, [8001, 300, 1, 2500, 129]), (8, 4, 128, 64, [5000, 17]), (1, 12, 64, 16, [9000]), (32, 1, 128, 32, [700] * 5), (2, 2, 256, 16, [3000, 40]), (4, 7, 128, 32, [999] * 40)):
            c.check_dense(*shape, torch.bfloat16)
        c.check_dense_growth(20)
    print("  checks failed:", c.failures, flush=True)


@torch.inference_mode()
def by_place(case, variant, call_of):
    """Where blocks read how fast: cycles from the wait to the last key, by multiprocessor."""
    layers = make(case)
    before = variant.base._HERE
    try:
        variant.apply(layers)
        traced(variant.base, NOW / "kv_attend")
        call = call_of(layers)
        call(0)
        graph = capture(call, 8)
        dim, group = case.model.head_dim, case.model.num_q_heads // case.model.num_kv_heads
        kernel = variant.base.dense_kernel(dim, group, True, "90")
        code, at, size = driver.cuModuleGetGlobal(kernel._module, b"trace")
        host = torch.empty(256 * 16, dtype=torch.int64)
        took = torch.zeros(12, 132)
        two = 0
        for k in range(12):
            graph.replay()
            torch.cuda.synchronize()
            driver.cuMemcpyDtoH(host.data_ptr(), at, host.nbytes)
            t = host.view(256, 16)[:132]
            t = t[t[:, 0] >= t[:, 0].max() - 200_000]
            sm = t[:, 15]
            two += len(sm) - len(sm.unique())
            took[k, sm] = (t[:, 2] - t[:, 1]).float() / 1000
        busy = took > 0
        mean = took.sum(0) / busy.sum(0).clamp(min=1)
        spread = ((took - mean) * busy).square().sum() / busy.sum()
        print(f"  by place {case.geometry} {case.batch}x{case.context} {variant.name}: spread of means {mean[mean > 0].std():.2f}, within {spread.sqrt():.2f} us, doubled {two}")
        print("    ", " ".join(f"{x:.1f}" for x in mean.tolist()), flush=True)
    except Exception as error:
        print(f"  by place {variant.name} failed: {type(error).__name__} {str(error)[:200]}", flush=True)
    finally:
        variant.base._HERE = before


if __name__ == "__main__":
    print("start", round(time.time() - START, 1))
    qwen, llama = "qwen2.5-7b", "llama-3.1-8b"
    for one in (case_of(qwen, 1, 2048), case_of(qwen, 1, 8192), case_of(qwen, 1, 32768), case_of(qwen, 8, 8192), case_of(llama, 1, 8192), case_of(qwen, 1, 131072), case_of("llama-2-7b", 1, 2048), case_of(qwen, 8, 32768), case_of(llama, 8, 2048)):
        run(one, VARIANTS)
    print("at", round(time.time() - START, 1))
    streams(case_of(qwen, 1, 8192), 3)
    if time.time() - START < 14:
        checks()
    print("end", round(time.time() - START, 1))

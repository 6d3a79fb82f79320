"""Times forms of the selector for many rows behind the one-bit scorer on this machine's GPU: python build_scripts/tune_units.py [--seconds N]

Every form's choice is compared with the package's selector without a sieve, bit for bit, before it is timed; clock marks show where its cycles go.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from trtkv.bench.timing import measure
from trtkv.plugins._device import nvrtc
from trtkv.plugins.kv_select import launch as select

DEV = torch.device("cuda")
GEOMETRIES = {"llama3 8x128k": (8, 8, 4), "qwen 8x128k": (8, 4, 7)}  # batch, KV heads, query heads each
DIM, TOKENS, BUDGET, SINK, WINDOW = 128, 131056, 2048, 4, 64
# Name: cluster (0: the rule's), whether it sieves, definitions, definitions of the scorer, in how many launches.
FORMS: dict[str, tuple[int, bool, tuple[str, ...], tuple[str, ...], int]] = {
    "plain": (0, False, (), (), 1),
    "sieve": (0, True, (), (), 1),
    "sieve, contiguous": (0, True, ("-DCONTIGUOUS",), (), 1),
    "sieve, 150 %": (0, True, ("-DREACH=150",), (), 1),
    "sieve, 4 blocks": (4, True, (), (), 1),
    "sieve, 2 blocks": (2, True, (), (), 1),
    "sieve, one packet": (0, True, ("-DLOAD_WARPS=32", "-DDEPTH=1"), (), 1),
}


TRACED = ("sieve", "sieve, one packet", "sieve, 4 blocks")


def skipped(name: str, heads: int) -> bool:
    """Say whether a form is not worth a look for so many scored heads."""
    return heads != 7 and ("block" in name or "packet" in name)



def load(cluster: int, heads: int, sieves: bool, more: tuple[str, ...], trace: bool) -> nvrtc.Kernel:
    """Load a form."""
    shape = {"CLUSTER": cluster, "HEADS": heads, "MAXIMUM": 0, "UNIT": 1, "GROUP": 32}
    defines = (*(f"-D{k}={v}" for k, v in shape.items()), *(("-DSIEVE",) if sieves else ()), *more, *(("-DTRACE",) if trace else ()))
    return nvrtc.load(select._HERE / "select.cu", "select_units", select._SELECT, defines, "90", 200 * 1024)


def score_kernel(group: int, pooling: str, more: tuple[str, ...]) -> nvrtc.Kernel:
    """Load a scorer."""
    shape = {"D": DIM, "GROUP_HEADS": group, "POOL": select.POOLS[pooling], "STAGES": 8}
    defines = (*(f"-D{name}={value}" for name, value in shape.items()), "-DBF16", *more)
    return nvrtc.load(select._HERE / "fier.cu", "fier_score", select._SCORE, defines, "90", 64 * 8 * DIM)


class Set:
    """The index of one layer of random keys, its scores and its lists."""

    def __init__(self, batch: int, heads: int, group: int, pooling: str, sms: int, like: Set | None = None) -> None:
        pages, rows = -(-TOKENS // 32), batch * heads
        self.pooling, self.heads, self.group = pooling, heads, group
        self.q = torch.randn(batch, heads * group * DIM, device=DEV).bfloat16()
        self.bits = torch.randint(-(2**31), 2**31 - 1, (batch * pages, heads, 1, DIM), dtype=torch.int32, device=DEV)
        low = -2 + 0.4 * torch.randn(batch * pages, heads, 1, 1, DIM, device=DEV)
        self.meta = torch.cat([low, 4 + 0.5 * torch.randn_like(low)], 3).half().contiguous()
        self.table = torch.randperm(batch * pages, device=DEV).view(batch, pages).int()
        self.lens = torch.full((batch,), TOKENS, dtype=torch.int32, device=DEV)
        plan = select.Scratch.plan(rows, group, pooling, TOKENS, sms)
        self.scores, self.parts = (like.scores, like.parts) if like else plan.allocate(rows, DEV)
        self.out = torch.empty(batch, heads, BUDGET + 1, dtype=torch.int32, device=DEV)

    def score(self, more: tuple[str, ...] = (), of: slice = slice(None)) -> None:
        """Score sequences of a slice into the first places of the scratch."""
        q, table, lens = self.q[of], self.table[of], self.lens[of]
        rows = len(lens) * self.heads
        scores, parts = self.scores[:rows], self.parts[:rows]
        kernel = score_kernel(self.group, self.pooling, more)
        values = (q.data_ptr(), self.bits.data_ptr(), self.meta.data_ptr(), table.data_ptr(), lens.data_ptr(), scores.data_ptr(), parts.data_ptr(),
                  q.stride(0), table.stride(0), 1, scores.shape[2], BUDGET, DIM**-0.5 * 1.4426950408889634)  # fmt: skip
        kernel.launch((parts.shape[1], self.heads, len(lens)), 256, 64 * 8 * DIM, select.stream(), values)


@contextmanager
def form_of(sieves: bool) -> Iterator[None]:
    """Let the selector sieve, or not."""
    with patch.object(select, "select_sieves", (lambda *shape: sieves)):
        yield


class Form:
    """A selector with definitions of its own."""

    def __init__(self, one: Set, cluster: int, sieves: bool, more: tuple[str, ...], trace: bool = False, launches: int = 1) -> None:
        rows, heads, stride = one.scores.shape
        rows //= launches
        self.cluster = cluster or select.select_cluster(rows, stride, "90")
        with form_of(sieves):
            self.shared = select.select_shared(stride, self.cluster, heads, one.parts.shape[1], "90")
        assert self.shared.sieves == sieves
        self.kernel = load(self.cluster, heads, sieves, more, trace)

    def __call__(self, one: Set, overlap: bool = False, of: slice = slice(None)) -> None:
        lens, out = one.lens[of], one.out[of]
        rows, stride = len(lens) * one.heads, one.scores.shape[2]
        values = (one.scores.data_ptr(), one.parts.data_ptr(), lens.data_ptr(), out.data_ptr(), 0, 0, stride, one.parts.shape[1],
                  one.heads, BUDGET, 0, BUDGET, SINK, WINDOW, self.shared.kept)  # fmt: skip
        self.kernel.launch((rows * self.cluster, 1, 1), 1024, self.shared.bytes, select.stream(), values, cluster=self.cluster, overlap=overlap)

    def marks(self, one: Set) -> list[list[int]]:
        """Clocks of 64 blocks after one launch."""
        from cuda.bindings import driver

        torch.cuda.synchronize()
        _, at, size = driver.cuModuleGetGlobal(self.kernel._module, b"trace")
        driver.cuMemsetD8(at, 0, size)
        one.score()
        self(one)
        torch.cuda.synchronize()
        host = torch.empty(64, 32, dtype=torch.int64)
        driver.cuMemcpyDtoH(host.data_ptr(), at, size)
        return host.tolist()


def shown(marks: list[list[int]]) -> str:
    blocks = [row for row in marks if row[10]]
    used = [i for i in range(30) if all(row[i] for row in blocks)]
    parts = []
    for i in used[1:]:
        own = [row[i] - row[0] for row in blocks]
        parts.append(f"{i}: {statistics.mean(own):.0f} ({max(own)})")
    return ", ".join(parts) + f"; fell back: {sum(1 for row in marks if row[30])} of {len(blocks)} blocks"


def measure_forms(sets: list[Set], label: str, runs: int) -> Iterator[str]:
    time_of = lambda call: measure(call, len(sets), runs, DEV).median_us  # noqa: E731
    scoring = time_of(lambda i: sets[i % len(sets)].score())
    yield f"{label}: score {scoring:.1f}"
    plain = Form(sets[0], 0, False, ())
    wanted = []
    for one in sets:
        one.score()
        plain(one)
        wanted.append(one.out.clone())
    for name, (cluster, sieves, more, score_more, launches) in FORMS.items():
        if skipped(name, sets[0].scores.shape[1]):
            continue
        try:
            form = Form(sets[0], cluster, sieves, more, launches=launches)
            batch = len(sets[0].lens)
            slices = [slice(i * batch // launches, (i + 1) * batch // launches) for i in range(launches)]

            def both(i: int, overlap: bool = False, form: Form = form, more: tuple[str, ...] = score_more, slices: list[slice] = slices) -> None:
                one = sets[i % len(sets)]
                for of in slices:
                    one.score(more, of)
                    form(one, overlap, of)

            wrong = 0
            for i, (one, lists) in enumerate(zip(sets, wanted, strict=True)):
                one.out.fill_(-7)
                both(i)
                wrong += int((one.out != lists).any(-1).sum())
            whole, early = time_of(both), time_of(lambda i, both=both: both(i, overlap=True))
            own = time_of(lambda i, more=score_more: sets[i % len(sets)].score(more))
            yield (f"{label}: {name} (cluster {form.cluster}, {form.shared.bytes} B): score {own:.1f}, with selector {whole:.1f} (+{whole - own:.1f}), "
                   f"early {early:.1f}; rows that differ {wrong}")  # fmt: skip
        except Exception as error:
            yield f"{label}: {name}: {error!r}"


def compile_all(folder: str) -> None:
    """Compile what this script loads, on a machine without a GPU."""
    from pathlib import Path

    from trtkv.plugins._device import store

    stride = -(-TOKENS // 32) * 32
    with store.listing() as asked:
        for batch, heads, group in GEOMETRIES.values():
            for pooling in ("softmax-mean", "mean"):
                if pooling == "mean" and heads == 4:
                    continue
                scored = group if pooling == "softmax-mean" else 1
                for form, (cluster, sieves, more, score_more, launches) in FORMS.items():
                    if skipped(form, scored):
                        continue
                    score_kernel(group, pooling, score_more)
                    blocks = cluster or select.select_cluster(batch * heads // launches, stride, "90")
                    load(blocks, scored, sieves, more, False)
                    if form in TRACED:
                        load(blocks, scored, sieves, more, True)
        for rows, scored in ((64, 4), (32, 7), (64, 1)):
            cluster = select.select_cluster(rows, 131072, "90")
            select.select_kernel(cluster, scored, False, 1, 1, "90", sieves=True)
            for sieves in (True, False):
                select.select_kernel(cluster, scored, scored == 7, 1, 32, "90", sieves=sieves)
    print(len(asked), "kernels")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda spec: store._read(store._place(Path(folder), spec)) or store.write(Path(folder), spec, spec.compile()), asked))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile")
    if parser.parse_known_args()[0].compile:
        compile_all(parser.parse_known_args()[0].compile)
        return 0
    check()
    parser.add_argument("--seconds", type=float, default=50)
    options = parser.parse_args()
    until = time.time() + options.seconds
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for name, (batch, heads, group) in reversed(GEOMETRIES.items()):
        for pooling in ("softmax-mean", "mean"):
            if pooling == "mean" and heads == 4:
                continue
            sets = [Set(batch, heads, group, pooling, sms)]
            sets += [Set(batch, heads, group, pooling, sms, sets[0]) for _ in range(2)]
            for line in measure_forms(sets, f"{name} {pooling}", 9):
                print(f"[{until - time.time():.0f}]", line, flush=True)
                if time.time() > until:
                    return 0
            for form in TRACED:
                if skipped(form, sets[0].scores.shape[1]):
                    continue
                try:
                    print(f"{name} {pooling}: {form} clocks", shown(Form(sets[0], *FORMS[form][:3], trace=True).marks(sets[0])), flush=True)
                except Exception as error:
                    print(form, repr(error), flush=True)
            del sets
            torch.cuda.empty_cache()
    return 0


def check() -> None:
    """Rows that sieve, by the checks of tests/gpu/check_retrieval.py."""
    from tests.gpu import check_retrieval as checks

    torch.manual_seed(5)
    for heads, rows in ((4, 64), (7, 32), (1, 64)):
        for kind in ("normal", "levels", "equal", "outlier"):
            checks.check_ties(rows, 131072, 2048, heads, 9, kind)
    checks.check_ties(64, 131072, 2048, 1, 3000, "levels")
    checks.check_chain(checks.Case(4, 4, 128, 32, [33000] * 16, torch.bfloat16), 1024, 0, 0, "softmax-mean", "64 rows")
    for heads, rows, pooling in ((4, 64, "softmax-mean"), (7, 32, "softmax-max"), (1, 64, "mean")):
        checks.check_sieved(rows, 131056, 2048, heads, pooling, 4, 64)
    print("failures", checks.failures, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, ".")
    sys.exit(main())

"""Times of the append kernel's forms and of what may overlap in a decode step; a tuning script."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch

from trtkv.bench.cases import Case, find_geometry, find_policy
from trtkv.config import Limits
from trtkv.plugins._device import store
from trtkv.plugins.kv_append import launch as append_launch
from trtkv.plugins.kv_append import launch_token
from trtkv.plugins.kv_append.launch import KINDS, NO_GROUP
from trtkv.plugins.kv_append import specs as append_specs
from trtkv.plugins.kv_attend import launch as attend_launch
from trtkv.plugins.kv_attend import launch_dense
from trtkv.plugins.kv_select import specs as select_specs
from trtkv.plugins.support import summary_of

DEVICE = torch.device(os.environ.get("DEVICE", "cuda"))
STARTED = time.time()
LIMIT_S = float(os.environ.get("LIMIT_S", "52"))
FORMS = [  # heads_q, heads_kv, dim, group, summary, norm, dtype
    (28, 4, 128, 16, 0, False, "bf16"),
    (28, 4, 128, 32, 1, False, "bf16"),
    (28, 4, 128, 32, 2, False, "bf16"),
    (32, 8, 128, 32, 1, True, "bf16"),
    (16, 8, 128, 16, 0, True, "fp16"),
    (8, 2, 64, 32, 1, False, "fp16"),
    (8, 2, 64, 8, 2, True, "bf16"),
    (8, 2, 96, 32, 1, True, "fp16"),
    (8, 2, 256, 64, 2, False, "bf16"),
    (8, 2, 256, 32, 1, True, "bf16"),
]
SMALL = [("qwen2.5-7b", 1, 32768, "fier", 20), ("qwen2.5-7b", 1, 8192, "full", 20), ("qwen2.5-7b", 8, 8192, "full", 6), ("qwen2.5-7b", 8, 8192, "fier", 6),
         ("qwen2.5-7b", 1, 32768, "quest", 20), ("qwen2.5-7b", 1, 131072, "quest", 10), ("llama-3.1-8b", 1, 131072, "fier", 6)]  # fmt: skip
EARLY = [(g, b, c, p, n) for g, b, c, n in (("qwen2.5-7b", 1, 8192, 24), ("qwen2.5-7b", 1, 32768, 20), ("qwen2.5-7b", 1, 131072, 10), ("qwen2.5-7b", 2, 131072, 6),
         ("qwen2.5-7b", 8, 8192, 8), ("qwen2.5-7b", 8, 32768, 6), ("llama-3.1-8b", 1, 32768, 12), ("llama-3.1-8b", 1, 131072, 6), ("llama-3.1-8b", 8, 8192, 6),
         ("llama-3.1-8b", 8, 32768, 4), ("llama-2-7b", 1, 32768, 6), ("qwen2.5-7b", 8, 131072, 4), ("llama-3.1-8b", 8, 131072, 4), ("llama-3.1-8b", 32, 32768, 4)) for p in ("quest", "fier")]
EARLY = [one for one in EARLY if one[3] == "fier"] + [one for one in EARLY if one[3] == "quest"]
EARLY += [("qwen2.5-7b", 1, 8192, "full", 20), ("qwen2.5-7b", 1, 32768, "full", 12), ("qwen2.5-7b", 8, 8192, "full", 6)]
CLOSING = [("qwen2.5-7b", 1, 32768, "fier", 20), ("qwen2.5-7b", 8, 32768, "fier", 6), ("qwen2.5-7b", 8, 32768, "quest", 6), ("qwen2.5-7b", 32, 32768, "fier", 4)]
LARGE = [("qwen2.5-7b", 8, 131072, "quest", 4), ("llama-3.1-8b", 8, 131072, "quest", 4), ("qwen2.5-7b", 8, 131072, "fier", 4),
         ("llama-3.1-8b", 8, 131072, "fier", 4), ("qwen2.5-7b", 32, 32768, "quest", 4), ("qwen2.5-7b", 32, 32768, "fier", 4)]  # fmt: skip


def case_of(geometry: str, batch: int, context: int, policy: str) -> Case:
    found = find_policy(policy, context, None, None, ["retrieve.page=32"])
    return Case("retrieve", geometry, find_geometry(geometry, "bfloat16"), found, batch, context)


def compile_here(folder: Path) -> None:
    with store.listing() as asked:
        for heads_q, heads_kv, dim, group, summary, norm, dtype in FORMS:
            append_launch.append_kernel(heads_q, heads_kv, dim, group, summary, norm, dtype, "90")
            launch_token.token_kernel(heads_q, heads_kv, dim, group, summary, norm, dtype == "bf16", "90")
        for geometry, batch, context, policy, _ in SMALL + LARGE + EARLY:
            case = case_of(geometry, batch, context, policy)
            plan, model, limits = case.plan(1), case.model, Limits(max_seq_len=context, max_batch_size=batch)
            group, select, summary = model.num_q_heads // model.num_kv_heads, plan.select[0], summary_of(plan, 0)
            append_specs.request(plan, model, limits, "90")
            kind = KINDS[summary.kept] if summary else 0
            for threads in (64, 128, 256):
                launch_token.THREADS = threads
                own = NO_GROUP if select is None else select.group
                launch_token.token_kernel(model.num_q_heads, model.num_kv_heads, model.head_dim, own, kind, False, True, "90")
                if threads == 128:
                    for unroll in UNROLLS:
                        with_unroll(unroll)(model.num_q_heads, model.num_kv_heads, model.head_dim, own, kind, False, True, "90")
            launch_token.THREADS = 128
            launch_dense.dense_kernel(plan.head_dim, group, True, "90", False, False)
            if select is not None:
                select_specs._scorer(plan, select, summary, "90")
                select_specs._selector(plan, select, summary, batch, limits, "90")
                select_specs._together(plan, select, summary, batch, limits, "90")
                attend_launch.attend_kernel(plan.head_dim, group, attend_launch.attend_cluster(batch * plan.num_kv_heads, "90"), select.unit, True, "90")
    todo = [spec for spec in asked if not store._place(folder, spec).exists()]
    print(len(asked), "kernels,", len(todo), "to compile")
    for spec in todo:
        store.write(folder, spec, spec.compile())


UNROLLS = ()
TOKEN_KERNEL = launch_token.token_kernel


def with_unroll(unroll):
    """Load the CUDA form with another UNROLL."""
    from trtkv.plugins._device import nvrtc

    def load(path, name, types, defines, arch, shared, **more):
        return OWN_LOAD(path, name, types, (*defines, f"-DUNROLL={unroll}"), arch, shared, **more)

    OWN_LOAD = nvrtc.load

    def kernel(*args):
        nvrtc.load = load
        try:
            return TOKEN_KERNEL(*args)
        finally:
            nvrtc.load = OWN_LOAD

    return kernel


@contextmanager
def forms(summaries=(), threads=128, settled=True):
    """Which summaries the CUDA form takes, and whether it reads early."""
    before = launch_token.SUMMARIES, launch_token.THREADS, launch_token.launch

    def launch(*args, **kwargs):
        return before[2](*args, **{**kwargs, "settled": kwargs["settled"] and settled})

    launch_token.SUMMARIES, launch_token.THREADS, launch_token.launch = summaries, threads, launch
    try:
        yield
    finally:
        launch_token.SUMMARIES, launch_token.THREADS, launch_token.launch = before


def say(*words):
    print(f"[{time.time() - STARTED:5.1f}]", *words, flush=True)


def check_forms():
    from math import inf  # noqa: F401

    torch.manual_seed(1)
    for heads_q, heads_kv, dim, group, summary, norm, dtype in FORMS:
        real = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        page, batch, most = 64, 7, 5
        lens = torch.tensor([group, 2 * group, group + 1, 5, 4 * group - 1, 3 * group, 1], dtype=torch.int32, device=DEVICE)
        most = max(most, (4 * group + page - 1) // page)
        pool = batch * most + 1
        table = torch.randperm(pool, dtype=torch.int32)[: batch * most].view(batch, most).cuda()
        keys = torch.randn(pool, heads_kv, page, dim, device=DEVICE).to(real)
        values = torch.randn_like(keys)
        starts = torch.tensor([0, 1, 2, 3, 4, 4, 5, 6], dtype=torch.int32, device=DEVICE)  # the fifth has none
        qkv = torch.randn(6, (heads_q + 2 * heads_kv) * dim, device=DEVICE).to(real)
        positions = torch.randint(0, 1000, (6,), dtype=torch.int32, device=DEVICE)
        angles = torch.rand(1000, dim // 2, device=DEVICE) * 6
        rope = torch.cat([angles.cos(), angles.sin()], 1)
        norms = (torch.rand(dim, device=DEVICE).to(real), torch.rand(dim, device=DEVICE).to(real)) if norm else None
        results = []
        for summaries, settled in (((), False), ((0, 1, 2), False), ((0, 1, 2), True)):
            own_keys, own_values = keys.clone(), values.clone()
            bits = torch.full((pool, heads_kv, page // group, dim), 77, dtype=torch.int32, device=DEVICE)
            meta = torch.full((pool, heads_kv, page // group, 2, dim), 3.0, dtype=torch.float16 if summary == 1 else real, device=DEVICE)
            out = torch.full((6, heads_q * dim), 5.0, dtype=real, device=DEVICE)
            with forms(summaries, settled=settled):
                append_launch.launch(
                    qkv, positions, starts, lens, table, rope, norms, out, own_keys, own_values, bits if summary == 1 else None,
                    meta if summary else None, eps=1e-6, group=group, summary=summary, longest=1, overlap=settled, settled=settled)  # fmt: skip
            torch.cuda.synchronize()
            results.append((out, own_keys, own_values, bits, meta))
        for index, name in ((1, "waits"), (2, "early")):
            same = [bool(torch.equal(a, b)) for a, b in zip(results[0], results[index], strict=True)]
            off = [(a.float() - b.float()).abs().max().item() for a, b in zip(results[0], results[index], strict=True)]
            touched = bool((results[0][4] != 3.0).any()) == (summary > 0)
            say("forms", (heads_q, heads_kv, dim, group, summary, norm, dtype), name, "EQUAL" if all(same) and touched else f"DIFFERS {same} {off} {touched}")


OVERLAP = {"append": True, "score": True, "choose": True, "attend": True}


def patch_overlaps():
    import trtkv.plugins.kv_append.cuda as a
    import trtkv.plugins.kv_attend.cuda as t
    import trtkv.plugins.kv_select.cuda as s
    from trtkv.plugins.kv_select import launch

    a.overlaps = lambda *x, **y: OVERLAP["append"]
    s.overlaps = lambda *x, **y: OVERLAP["score"]
    t.overlaps = lambda *x, **y: OVERLAP["attend"]
    own = launch.select_units
    launch.select_units = lambda *args, **kw: own(*args, **{**kw, "overlap": OVERLAP["choose"]})
    early = append_launch.launch

    def with_early(*args, **kw):
        if OVERLAP.get("early") is not None:
            kw["early"] = OVERLAP["early"] and kw["overlap"]
        return early(*args, **kw)

    a.launch.launch = with_early


def median(call, launches, runs=15):
    from trtkv.bench.timing import measure

    return measure(call, launches, runs, DEVICE).median_us


def check(layers):
    """Compare what a captured chain of steps leaves with torch."""
    from trtkv.bench.check import Findings, check_layer

    ops = frozenset(("append", "select", "attend") if layers.selects else ("append", "attend"))
    findings = Findings()
    with forms(launch_token.SUMMARIES):
        layers.poison(*ops)
        from trtkv.bench.timing import measure

        check_layer(layers, measure(layers.step, layers.count, 3, DEVICE).last, findings, ops)
    say("   CHECK", findings.passed, findings.to_json())


def variants(layers, policy):
    names = [("triton", (), 128, False), ("cuda waits", (0, 1, 2), 128, False), ("cuda early", (0, 1, 2), 128, True),
             ("cuda early 64", (0, 1, 2), 64, True), ("cuda early 256", (0, 1, 2), 256, True), ("cuda early starts", (0, 1, 2), 128, True)]  # fmt: skip
    return names


def small(geometry, batch, context, policy, count):
    from trtkv.bench.layer import Layers

    case = case_of(geometry, batch, context, policy)
    for key in ("append", "score", "choose", "attend"):
        OVERLAP[key] = True
    OVERLAP["early"] = None
    layers = Layers(case, count, DEVICE)
    width, inner = case.model.qkv_size, case.model.hidden_size
    matrices = [torch.randn(width, inner, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    x = torch.randn(batch, inner, device=DEVICE, dtype=torch.bfloat16)
    from trtkv.plugins.linear import launch as linear

    def project(i):
        if batch <= 2:
            linear.gemv(x, matrices[i % 4], None, layers.qkv)
        else:
            torch.mm(x, matrices[i % 4].t(), out=layers.qkv)

    def with_product(call):
        def both(i):
            project(i)
            call(i)
        return both

    check(layers)
    say("small", geometry, batch, context, policy, "layers", count, f"product {median(project, count):.2f}")
    for _ in range(2):
        for name, summaries, threads, settled in variants(layers, policy):
            OVERLAP["early"] = True if name.endswith("starts") else None
            with forms(summaries, threads, settled):
                alone, after = median(layers.append, count), median(with_product(layers.append), count)
                whole, behind = median(layers.step, count), median(with_product(layers.step), count)
                line = f"{name:16} append {alone:.2f} product+append {after:.2f} whole {whole:.2f} product+whole {behind:.2f}"
                if layers.selects and policy == "fier" and context <= 8192:
                    layers.session.dense_below = context + 1
                    layers.append(0)
                    line += f" reads_all {layers.session.reads_all} whole {median(layers.step, count):.2f} product+whole {median(with_product(layers.step), count):.2f}"
                    layers.session.dense_below = 0
                say("  ", line)


def early(geometry, batch, context, policy, count):
    """The step alone and behind a product, where append lets the choice begin early and where not."""
    from trtkv.bench.layer import Layers
    from trtkv.plugins.linear import launch as linear

    case = case_of(geometry, batch, context, policy)
    for key in ("append", "score", "choose", "attend"):
        OVERLAP[key] = True
    OVERLAP["early"] = None
    layers = Layers(case, count, DEVICE)
    matrices = [torch.randn(case.model.qkv_size, case.model.hidden_size, device=DEVICE, dtype=torch.bfloat16) / case.model.hidden_size**0.5 for _ in range(4)]
    x = torch.randn(batch, case.model.hidden_size, device=DEVICE, dtype=torch.bfloat16)

    def behind(i):
        if batch <= 2:
            linear.gemv(x, matrices[i % 4], None, layers.qkv)
        else:
            torch.mm(x, matrices[i % 4].t(), out=layers.qkv)
        layers.step(i)

    combos = [(1, 0), (1, 1)]
    if policy == "fier" and batch * context * case.model.num_kv_heads > 1 << 21:
        combos = [(1, 0), (1, 1), (0, 0), (0, 1)]
    cells: dict = {}
    for again in range(2):
        for combo in combos if again == 0 else combos[::-1]:
            OVERLAP["choose"], OVERLAP["early"] = bool(combo[0]), bool(combo[1])
            with forms((0, 1, 2)):
                cells.setdefault(combo, []).append((median(layers.step, count, 15), median(behind, count, 15)))
    OVERLAP["early"] = None
    words = [f"choose {c} early {e}: whole {a[0]:.2f} {b[0]:.2f} behind a product {a[1]:.2f} {b[1]:.2f}" for (c, e), (a, b) in cells.items()]
    say(f"{geometry} {batch} x {context} {policy}:", " | ".join(words))


def closing(geometry, batch, context, policy, count):
    """Append where every sequence completes a group, and where none does."""
    from trtkv.bench.layer import Layers

    for key in ("append", "score", "choose", "attend"):
        OVERLAP[key] = True
    OVERLAP["early"] = None
    layers = Layers(case_of(geometry, batch, context, policy), count, DEVICE)
    for what in ("open", "closes"):
        cells = []
        with forms(()):
            cells.append(f"triton {median(layers.append, count):.2f} {median(layers.append, count):.2f} whole {median(layers.step, count):.2f} {median(layers.step, count):.2f}")
        for unroll in UNROLLS:
            launch_token.token_kernel = with_unroll(unroll)
            with forms((0, 1, 2)):
                cells.append(f"cuda {unroll}: {median(layers.append, count):.2f} {median(layers.append, count):.2f} whole {median(layers.step, count):.2f} {median(layers.step, count):.2f}")
        launch_token.token_kernel = TOKEN_KERNEL
        cells.append(f"as it is {median(layers.append, count):.2f} {median(layers.append, count):.2f} whole {median(layers.step, count):.2f} {median(layers.step, count):.2f}")
        say(f"{geometry} {batch} x {context} {policy} {what}:", " | ".join(cells))
        for one in layers.places[1:3]:
            one += 16
        layers.positions += 16 - 1


def final(geometry, batch, context, policy, count):
    """The package as it is."""
    from trtkv.bench.layer import Layers

    layers = Layers(case_of(geometry, batch, context, policy), count, DEVICE)
    cells = [median(layers.step, count, 15) for _ in range(3)]
    say(f"final {geometry} {batch} x {context} {policy}: append {median(layers.append, count):.2f} whole", " ".join(f"{one:.2f}" for one in cells))
    check(layers)


def large(geometry, batch, context, policy, count):
    from trtkv.bench.layer import Layers

    case = case_of(geometry, batch, context, policy)
    layers = Layers(case, count, DEVICE)
    fused = policy == "quest"

    def setting(a, s, c, t, early=None):
        OVERLAP.update(append=bool(a), score=bool(s), choose=bool(c), attend=bool(t), early=early)

    setting(0, 0, 0, 0)
    say("large", geometry, batch, context, policy)
    for name, summaries, threads, settled in variants(layers, policy)[:3]:
        with forms(summaries, threads, settled):
            setting(0, 0, 0, 0)
            plain = median(layers.append, count)
            setting(1, 1, 1, 1)
            say(f"   append alone, {name}: {plain:.2f}, overlapped {median(layers.append, count):.2f}")
    setting(1, 1, 1, 1)
    check(layers)
    setting(0, 0, 0, 0)
    say(f"   alone: select {median(layers.select, count):.2f} attend {median(layers.attend, count):.2f}")
    combos = [(a, s, c, t, None) for a, s, c, t in product((0, 1), repeat=4) if not fused or c == 0]
    combos += [(1, 1, 0, 1, True), (1, 1, 1, 1, True), (1, 0, 0, 1, True)]
    times: dict = {}
    for again in range(2):
        for form, summaries in (("triton", ()), ("cuda", (0, 1, 2))):
            for combo in combos if again == 0 else combos[::-1]:
                with forms(summaries):
                    setting(*combo)
                    times.setdefault((form, combo), []).append(median(layers.step, count, 9))
    for combo in combos:
        a, s, c, t, early = combo
        cells = "  ".join(f"{form} {min(times[form, combo]):.2f} {max(times[form, combo]):.2f}" for form in ("triton", "cuda"))
        say(f"   append {a} score {s} choose {c} attend {t} early {early}: {cells}")


def main():
    if sys.argv[1:2] == ["compile"]:
        compile_here(Path(sys.argv[2]))
        return
    with torch.inference_mode():
        torch.zeros(1, device=DEVICE)
        say("ready")
        many = [("qwen2.5-7b", 32, 32768, "quest", 4), ("llama-3.1-8b", 32, 32768, "quest", 4), ("qwen2.5-7b", 8, 131072, "quest", 4)]
        works = [(check_forms, ()), *[(final, one) for one in many], *[(closing, one) for one in CLOSING]]
        for work, args in works:
            if time.time() - STARTED > LIMIT_S:
                say("no time for", work.__name__, args)
                continue
            try:
                work(*args)
            except Exception as error:  # noqa: BLE001
                say("FAILED", work.__name__, args, type(error).__name__, str(error)[:300])
            torch.cuda.empty_cache()


main()

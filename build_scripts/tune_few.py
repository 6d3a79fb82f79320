"""Times forms of the products of some tokens on this machine's GPU, one by one and in a chain of layers, beside the library's and beside `linear.cu`.

python build_scripts/tune_few.py [--compile SM FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).parent))
from tune_linear import Chain, make_chain  # noqa: E402

from trtkv.bench.timing import copy_bandwidth, measure  # noqa: E402
from trtkv.checkpoint.find import resolve_model  # noqa: E402
from trtkv.plugins._device import nvrtc, store  # noqa: E402
from trtkv.plugins.linear import launch  # noqa: E402
from trtkv.plugins.linear.launch import Norm  # noqa: E402
from trtkv.plugins.linear.launch_few import Few, few, few_kernel, form_of  # noqa: E402
from trtkv.plugins.linear.specs import products  # noqa: E402
from trtkv.runtime.fused import silu_product  # noqa: E402

CUTS = [  # rows, pieces, ahead, warps, resident, kept, fill
    (1, 4, 2, 16, 1, 1, 1), (2, 2, 2, 16, 1, 1, 1), (1, 4, 1, 8, 2, 1, 2), (1, 4, 2, 16, 1, 0, 1), (2, 2, 2, 16, 1, 0, 1), (1, 4, 1, 8, 2, 0, 2), (2, 4, 1, 16, 1, 0, 1),
    (2, 2, 2, 8, 2, 1, 1), (3, 1, 2, 16, 1, 0, 1), (1, 2, 3, 16, 1, 1, 1), (2, 2, 2, 12, 1, 0, 1), (1, 4, 2, 14, 1, 1, 1), (2, 2, 2, 14, 1, 0, 1),
    (1, 4, 2, 14, 1, 0, 1), (3, 2, 2, 8, 1, 0, 1), (2, 4, 1, 8, 2, 0, 2), (1, 4, 1, 16, 1, 1, 1),
]  # fmt: skip
T0 = time.perf_counter()


def forms(name: str, shape, tokens: int):
    _, inner, _, normed = shape
    tiles = -(-tokens // 8)
    single = name in ("o", "qkv", "down")
    out = []
    for cut in CUTS:
        form = Few(*cut[:5], bool(cut[5]), *cut[6:])
        size = form.shared_bytes(tiles, inner)
        if size * min(form.resident, form.fill) > 225_000 or form.kept == (name in ("o", "qkv", "down")):
            continue
        out.append(form)
    return out


def say(*args):
    print(f"[{time.perf_counter() - T0:5.1f}]", *args, flush=True)


def exact(x, matrix, gated, norm):
    given = x
    if norm is not None:
        wide = x.float()
        given = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(x.dtype) * norm.weight
    out = torch.cat([given.double() @ part.double().t() for part in matrix.split(1 << 14)], 1)
    lib = linear(given, matrix)
    if gated:
        (a, b), (c, d) = out.chunk(2, -1), lib.chunk(2, -1)
        out, lib = torch.nn.functional.silu(a) * b, torch.nn.functional.silu(c) * d
    return out, float((lib.double() - out).norm() / out.norm())


def one_by_one(chain: Chain, tokens: int, until: float, names=("o", "qkv", "gate_up", "down", "head")):
    best = {}
    for name in names:
        width, inner, gated, normed = shape = chain.shapes[name]
        matrices = [chain.head] if name == "head" else [w[name] for w in chain.weights]
        x = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16)
        more = torch.randn_like(x)
        total = torch.empty_like(x)
        norm, given = None, Norm(chain.scale, 1e-6) if normed else None
        timed = Norm(chain.scale, 1e-6, more, total) if normed else None
        out = torch.zeros(tokens, width, device="cuda", dtype=torch.bfloat16)
        true, lib_error = exact(x, matrices[0], gated, norm)
        size = matrices[0].nbytes
        dev = torch.device("cuda")
        us = measure(lambda i: linear(x, matrices[i % len(matrices)]), len(matrices), 9, dev).median_us
        say(f"T={tokens} {name} library {us:.2f} us {size / us / 1e6:.3f} TB/s, error {lib_error:.2e}")
        rows = []
        if tokens <= 2:
            us = measure(lambda i: launch.gemv(x, matrices[i % len(matrices)], None, out, gated=gated, norm=timed), len(matrices), 9, dev).median_us
            say(f"T={tokens} {name} gemv {us:.2f} us {size / us / 1e6:.3f} TB/s")
        for form in forms(name, shape, tokens):
            if time.perf_counter() - T0 > until:
                say("no time left")
                break
            try:
                out.fill_(float("nan"))
                few(x, matrices[0], None, out, form=form, gated=gated)
                off = float((out.double() - true).norm() / true.norm())
                us = measure(lambda i: few(x, matrices[i % len(matrices)], None, out, form=form, gated=gated), len(matrices), 9, dev).median_us
            except Exception as error:  # noqa: BLE001
                say(f"   {form} failed: {str(error)[:150]}")
                continue
            rows.append((us, off, form))
        rows.sort(key=lambda row: row[0])
        for us, off, form in rows:
            good = off <= 2 * lib_error
            if us > 1.08 * rows[0][0] and good:
                continue
            say(f"   {us:8.2f} us {size / us / 1e6:.3f} TB/s {'' if good else f'WRONG {off:.2e}'} {tuple(getattr(form, a) for a in form.__slots__)}")
        good = [row for row in rows if row[1] <= 2 * lib_error]
        best[name] = good[0][2] if good else None
    return best


def chain_own(chain: Chain, best, fused: bool, gemv: bool = False):
    here, there = chain.sums
    outs = chain.outs
    tmp = torch.empty_like(here)

    def product(name, x, matrix, norm=None):
        gated = chain.shapes[name][2]
        form = best.get(name)
        if gemv or form == "gemv":
            launch.gemv(x, matrix, None, outs[name], gated=gated, norm=norm)
            return outs[name]
        if norm is not None:
            launch.norm(x, norm.more, norm.weight, norm.eps, tmp, norm.total)
            x = tmp
        if form is not None:
            few(x, matrix, None, outs[name], form=form, gated=gated)
        elif gated:
            launch.silu_gate(linear(x, matrix), outs[name])
        else:
            torch.mm(x, matrix.t(), out=outs[name])
        return outs[name]

    for index, weights in enumerate(chain.weights):
        norm = Norm(chain.scale, 1e-6, outs["down"], there) if index else Norm(chain.scale, 1e-6)
        product("qkv", here, weights["qkv"], norm)
        here, there = (there, here) if index else (here, there)
        product("o", outs["queries"], weights["o"])
        product("gate_up", here, weights["gate_up"], Norm(chain.scale, 1e-6, outs["o"], there))
        here, there = there, here
        product("down", outs["gate_up"], weights["down"])
    product("head", here, chain.head, Norm(chain.scale, 1e-6, outs["down"], there))


def chains(chain: Chain, best, tokens: int, bandwidth: float):
    dev = torch.device("cuda")
    chain.outs["queries"] = torch.randn(tokens, chain.shapes["o"][1], device="cuda", dtype=torch.bfloat16)
    moved = chain.head.nbytes + sum(one.nbytes for weights in chain.weights for one in weights.values())
    names = list(chain.shapes)
    own = {name: best[name] for name in names}
    ways = {"library": {}, "own": own}
    ways["chosen"] = {name: form_of(*chain.shapes[name][:3], -(-tokens // 8), "90") for name in names}
    for a, b in ((Few(1, 4, 2, 16, 1), Few(1, 4, 2, 16, 1, True)), (Few(2, 2, 2, 16, 1), Few(2, 2, 2, 16, 1, True)), (Few(2, 2, 2, 16, 1), Few(1, 4, 2, 16, 1, True))):
        ways[f"{a} {b}"] = {name: b if name in ("gate_up", "head") else a for name in names}
    ways |= {f"own but {name}": {**own, name: None} for name in names}
    if tokens <= 2:
        ways |= {f"own but gemv {name}": {**own, **{one: "gemv" for one in name.split()}} for name in (*names, "o qkv", "o qkv gate_up")}
    ways["own again"] = own
    for name, forms_ in ways.items():
        us = measure(lambda i: chain_own(chain, forms_, True), 1, 9, dev).median_us
        say(f"T={tokens} chain of {len(chain.weights)} layers, {name}: {us:.1f} us, least {moved / bandwidth * 1e6:.1f}")
    if tokens <= 2:
        us = measure(lambda i: chain_own(chain, {}, True, True), 1, 9, dev).median_us
        say(f"T={tokens} chain gemv: {us:.1f} us")


class Order:
    """Stands for the module `nvrtc`, with a definition more."""

    def __init__(self, order: int) -> None:
        self.order = order

    def load(self, path, name, types, defines, arch, shared, **more):
        return nvrtc.load(path, name, types, (*defines, f"-DORDER={self.order}"), arch, shared, **more)


GEMVS = {
    "chosen": {},
    "qkv 2 2": {"qkv": (2, 8, 2)}, "qkv 4 7": {"qkv": (4, 7, 2, 7)}, "o 4 7": {"o": (4, 7, 2, 7)}, "o 2 8 2": {"o": (2, 8, 2)}, "o 2": {"o": (2, 8, 1)},
    "gate 2 2": {"gate_up": (2, 8, 2)}, "gate 2 7": {"gate_up": (2, 7, 2, 7)}, "gate 1 2": {"gate_up": (1, 8, 2)},  "gate 2 7 1": {"gate_up": (2, 7, 1, 7)},
    "down 2 2": {"down": (2, 8, 2)}, "down 4 1": {"down": (4, 8, 1)}, "down 4 10": {"down": (4, 10, 1, 10)}, "down 3 8": {"down": (3, 8, 1)},
    "down 2 15": {"down": (2, 15, 1, 15)}, "head 4 1": {"head": (4, 8, 1)}, "head 2 2": {"head": (2, 8, 2)},
}  # fmt: skip


def gemvs(chain: Chain, bandwidth: float) -> None:
    dev = torch.device("cuda")
    chain.outs["queries"] = torch.randn(1, chain.shapes["o"][1], device="cuda", dtype=torch.bfloat16)
    moved = chain.head.nbytes + sum(one.nbytes for weights in chain.weights for one in weights.values())
    say(f"T=1 least {moved / bandwidth * 1e6:.1f} us")
    kept, source = launch.form_of, launch._SOURCE
    for old in (True, False, True, False):
        launch._SOURCE = source.with_name("old.cu") if old else source
        for name, cuts in GEMVS.items():
            if old and name != "chosen":
                continue
            own = {chain.shapes[key][:3]: launch.Form(*cut) for key, cut in cuts.items()}
            launch.form_of = lambda *shape: own.get(shape) or kept(*shape)
            try:
                us = measure(lambda i: chain_own(chain, {}, True, True), 1, 9, dev).median_us
                say(f"T=1 {'old' if old else 'new'} chain gemv {name}: {us:.1f} us")
                if name == "chosen":
                    for key, (width, inner, gated, normed) in chain.shapes.items():
                        matrices = [chain.head] if key == "head" else [w[key] for w in chain.weights]
                        x = torch.randn(1, inner, device="cuda", dtype=torch.bfloat16)
                        out, total = torch.zeros(1, width, device="cuda", dtype=torch.bfloat16), torch.zeros_like(x)
                        norm = Norm(chain.scale, 1e-6, torch.randn_like(x), total) if normed else None
                        call = lambda i: launch.gemv(x, matrices[i % len(matrices)], None, out, gated=gated, norm=norm)  # noqa: B023, E731
                        us = measure(call, len(matrices), 9, dev).median_us
                        true, off = exact(x if norm is None else x + norm.more, matrices[(8 if len(matrices) == 1 else 8) % len(matrices) - 1], gated, norm)
                        call(7 % len(matrices))
                        found = float((out.double() - exact(x if norm is None else x + norm.more, matrices[7 % len(matrices)], gated, norm)[0]).norm() / true.norm())
                        say(f"    {key} {us:.2f} us {matrices[0].nbytes / us / 1e6:.3f} TB/s, error {found:.2e}, library's {off:.2e}")
            except Exception as error:  # noqa: BLE001
                say(f"T=1 {name} failed {str(error)[:200]}")
    launch._SOURCE, launch.form_of = source, kept


def with_tokens(chain: Chain, model, tokens: int) -> Chain:
    outs = {name: torch.zeros(tokens, shape[0], device="cuda", dtype=torch.bfloat16) for name, shape in chain.shapes.items()}
    sums = [torch.randn(tokens, model.hidden_size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return Chain(chain.shapes, chain.weights, chain.head, chain.scale, sums, outs)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--tokens", default="8,16,1,32")
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--compile", nargs=2)
    parser.add_argument("--gemvs", action="store_true")
    own = parser.parse_args()
    model = resolve_model(own.model).config
    tokens = [int(one) for one in own.tokens.split(",")]
    if own.compile:
        with store.listing() as asked:
            for count in tokens:
                for name, shape in products(model).items():
                    for form in forms(name, shape, count):
                        few_kernel(form, shape[1], -(-count // 8), shape[2], False, own.compile[0])
                    if count <= 2:
                        launch.gemv_kernel(launch.form_of(*shape[:3]), count, shape[2], shape[3], False, own.compile[0])
            for old in (True, False) if own.gemvs else ():
                source = launch._SOURCE
                launch._SOURCE = source.with_name("old.cu") if old else source
                for cuts in GEMVS.values():
                    for name, shape in products(model).items():
                        form = launch.Form(*cuts[name]) if name in cuts and not old else launch.form_of(*shape[:3])
                        launch.gemv_kernel(form, 1, shape[2], shape[3], False, own.compile[0])
                launch._SOURCE = source
            launch.norm_kernel(False, own.compile[0])
            launch.silu_kernel(False, own.compile[0])
        from trtkv.builder.kernels import write_kernels

        write_kernels(list(asked), Path(own.compile[1]), lambda stage, done: None)
        print(len(asked), "kernels")
        return
    bandwidth = copy_bandwidth(torch.device("cuda"))
    say(f"copy {bandwidth / 1e12:.2f} TB/s")
    chain = make_chain(model, 8, 6, torch.device("cuda"))
    say("weights")
    if own.gemvs:
        gemvs(with_tokens(chain, model, 1), bandwidth)
    for index, count in enumerate(tokens):
        here = with_tokens(chain, model, count)
        until = own.seconds * (index + 1) / len(tokens)
        best = one_by_one(here, count, until - 3)
        try:
            chains(here, best, count, bandwidth)
        except Exception as error:  # noqa: BLE001
            say("chains failed", error)


if __name__ == "__main__":
    main()

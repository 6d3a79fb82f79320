"""Policies that evict once and encode what stays, on a GPU: verdicts against exact sums, codes against the roles bit for bit, captured steps.

Run it on a machine with a GPU: python -m tests.gpu.check_kept; prints one line a check and ends with the number of failures.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.runtime.test_policies import generate, prompts
from tests.tiny import Rig, make_rig, make_tiny
from trtkv.checkpoint.find import resolve_model
from trtkv.plugins.encoded import reference
from trtkv.plugins.encoded.keep import Keeper
from trtkv.plugins.kv_sums import launch as sums
from trtkv.plugins.rows import Row
from trtkv.plugins.session import Session
from trtkv.policies.packing import unpack
from trtkv.policies.registry import parse_policy
from trtkv.policies.schedule import trajectory
from trtkv.ranking import attention, group_mean

MINI = ("evict.heavy=0.3", "evict.recent=0.2", "quantize.residual=32")
POLICIES = {
    "minikv": MINI,
    "minikv-pyramid": MINI,
    "snapkv+kivi": ("evict.budget=48", "evict.window=8", "quantize.residual=32"),
    "pyramidkv+fp8": ("evict.budget=48", "evict.window=8"),
}
FAILED: list[str] = []


def report(what: str, good: bool, more: str = "") -> None:
    print(("ok    " if good else "WRONG ") + what, more, flush=True)
    if not good:
        FAILED.append(what)


@dataclass
class Seen:
    """What a session's keeper saw of each layer's prompts and what it let stay, by slot and layer."""

    queries: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    prompts: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def watch(self, keeper: Keeper) -> None:
        observe, keep = keeper.observe, keeper.keep

        def observing(layer: int, row: Row, query: Tensor, keys: Tensor, lse: Tensor) -> None:
            if row.new == row.stored:
                self.queries[row.slot, layer] = []
            self.queries[row.slot, layer].append(query.clone())
            observe(layer, row, query, keys, lse)

        def keeping(layer: int, row: Row, keys: Tensor, values: Tensor) -> Tensor:
            kept = keep(layer, row, keys, values)
            self.prompts[row.slot, layer] = (keys.clone(), values.clone(), kept)
            return kept

        keeper.observe, keeper.keep = observing, keeping  # type: ignore[method-assign]


def check_verdict(name: str, rig: Rig, seen: Seen) -> None:
    """Let heavy hitters be the best by sums in double precision, but for those that rounding may exchange."""
    worst = 0.0
    for (_, _), (place, (keys, _, kept)) in zip(seen.queries.items(), seen.prompts.items(), strict=True):
        query, tokens = torch.cat(seen.queries[place]), keys.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).tril()
        exact = group_mean(attention(query.double(), keys.double(), rig.plan.head_dim**-0.5, causal).double().sum(1), len(keys))
        recent = int(tokens * 0.2 + 1e-6)
        past, heavy = tokens - recent, kept.shape[1] - recent
        own = exact[:, :past].gather(1, kept[:, :heavy].long()).amin(1) if heavy else exact.new_ones(len(keys))
        best = exact[:, :past].topk(heavy, 1).values[:, -1] if heavy else own
        worst = max(worst, float(((best - own) / best).max()))
        assert bool((kept.diff(dim=1) > 0).all()) and bool((kept[:, heavy:] >= past).all())
    report(f"{name} keeps the heaviest", worst <= 2.0**-10, f"worst below the cut by {worst:.2g} of it")


def check_codes(name: str, rig: Rig, seen: Seen, steps: int) -> None:
    """Let the codes of what stayed be the role's, bit for bit."""
    store, role, good, compared = rig.session.encoded, parse_policy(name, sets=POLICIES[name]).quantize, True, 0
    assert store is not None and role is not None
    for (slot, layer), (keys, values, kept) in seen.prompts.items():
        row = next(one for one in rig.session.step(layer).rows if one.slot == slot)
        end = store.form.encoded(kept.shape[1], store.form.origin(kept.shape[1]))
        index = kept.long()[..., None].expand(-1, -1, keys.shape[2])
        for part, x, count in zip(("keys", "values"), (keys, values), end, strict=True):
            if not count:
                continue
            got = reference.stored_numbers(store.pages[layer], row.pages, part)
            want: dict[str, Any] = role.encode(x.gather(1, index)[:, :count].cpu(), part)
            codes = want["codes"] if store.form.bits == 8 else unpack(want["codes"], store.form.bits)
            codes = codes.transpose(2, 3).flatten(1, 2) if part == "keys" and store.form.bits < 8 else codes
            good = good and torch.equal(got["codes"][:, :count].cpu(), codes)
            compared += codes.numel()
    report(f"{name} encodes what stays", good, f"{compared} codes, {steps} steps later")


@torch.inference_mode()
def engines(directory: Path) -> None:
    """Read prompts in chunks, decode in captured steps, and use the slots again."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 128}
    tiny = make_tiny("llama", directory / "tiny", dtype=torch.bfloat16, **shape)
    texts, steps = prompts(150, 61, 90), 50
    for name, sets in POLICIES.items():
        rig, seen = make_rig(tiny, name, directory, sets=sets, slots=3, dtype="bfloat16", device="cuda"), Seen()
        store = rig.session.encoded
        assert store is not None and store.keeper is not None
        seen.watch(store.keeper)
        logits = generate(rig, texts, steps, chunk=70)
        if name.startswith("minikv"):
            check_verdict(name, rig, seen)
        check_codes(name, rig, seen, steps)
        graphs = rig.stepper._graphs
        report(f"{name} is captured", graphs is not None and len(graphs._captured) > 0)
        report(f"{name} is finite", bool(torch.isfinite(logits).all()))
        policy, layers = parse_policy(name, sets=sets), rig.plan.num_layers
        lengths = [
            [trajectory(policy, len(text), steps, num_kv_heads=1, layer=layer, num_layers=layers)[-1] for layer in range(layers)] for text in texts
        ]
        stored = [[store.keeper.ledger.stored(slot)[rig.plan.page_groups[layer]] for layer in range(layers)] for slot in range(3)]
        report(f"{name} stores what was planned", stored == [[one.lengths[0] for one in own] for own in lengths])
        ends = [
            [store.form.encoded(stored[slot][layer], store._runs[slot][rig.plan.page_groups[layer]]) for layer in range(layers)] for slot in range(3)
        ]
        report(f"{name} has encoded what was planned", ends == [[one.encoded for one in own] for own in lengths])
        again = generate(rig, texts[::-1], steps, chunk=70)  # other prompts in every slot
        fresh = generate(make_rig(tiny, name, directory, sets=sets, slots=3, dtype="bfloat16", device="cuda"), texts[::-1], steps, chunk=70)
        report(f"{name} answers in used slots as in fresh ones", torch.equal(again, fresh))
        report(f"{name} answers twice alike", torch.equal(generate(rig, texts, steps, chunk=70), logits))


@torch.inference_mode()
def at_full_size() -> None:
    """Keep and encode a long prompt of a real model's layer; print what that takes beside its attention."""
    from trtkv.plugins.kv_attend.prefill import attend_with_lse

    tokens, model = 32768, resolve_model("llama-3.1-8b").config.model_copy(update={"num_layers": 1})
    plan = parse_policy("minikv").plan(model)
    session = Session(plan, [plan.pages(tokens)], 1, "cuda")
    store = session.encoded
    assert store is not None and store.keeper is not None
    for attempt in range(2):
        session.begin_step([tokens], [[tokens]], [0], [[list(range(plan.pages(tokens)))]], [tokens])
        row = session.step(0).rows[0]
        keys, values = store.prompt(0, row)
        keys.normal_(), values.normal_()
        query = torch.randn(tokens, model.num_q_heads, model.head_dim, device="cuda", dtype=keys.dtype)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        _, lse = attend_with_lse(query, keys[0], values[0], model.head_dim**-0.5)
        marks[1].record()
        store.keeper.observe(0, row, query, keys[0], lse)
        marks[2].record()
        if attempt:
            mass = store.keeper._mass[0, 0].clone()
        store.keep_prompts = True
        store.encode_prompt(0, row, torch.arange(plan.pages(tokens), dtype=torch.int32, device="cuda"))
        marks[3].record()
        torch.cuda.synchronize()
        took = [a.elapsed_time(b) for a, b in pairwise(marks)]
    print(f"      32k of one layer: attention {took[0]:.2f} ms, sums {took[1]:.2f} ms, keep and encode {took[2]:.2f} ms")
    last = sums.column_sums(query[-8:], keys[0], lse[:, -8:].contiguous(), model.head_dim**-0.5).double()
    exact = attention(query[-8:].double(), keys[0].double(), model.head_dim**-0.5, torch.ones(8, tokens, device="cuda").bool().tril(tokens - 8)).sum(
        1
    )
    report("sums of the last queries", float((last - exact).abs().max()) <= 2.0**-8 * float(exact.max()))
    report("every query pays one", abs(float(mass.sum()) / (model.num_q_heads * tokens) - 1) <= 2.0**-8, f"{float(mass.sum()):.6g}")
    stored = session.stored_bytes()  # behind the step it is what stays
    session.end_step()
    kept = 2 * int(tokens * 0.25)
    element = 2 / 8 + 2 * 2 / 16
    want = round(2 * model.num_kv_heads * model.head_dim * kept * element)
    report("stored bytes are appendix I's with metadata", session.stored_bytes() == want < stored, f"{session.stored_bytes()} of {want}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for check in (lambda: engines(Path(folder)), at_full_size):
            try:
                check()
            except Exception as error:  # noqa: BLE001
                import traceback

                traceback.print_exc()
                report(f"{type(error).__name__}: {error}", False)
    print(f"{len(FAILED)} failures")
    sys.exit(bool(FAILED))

"""Time one layer's decode step of the retrieval policies beside dense attention; one JSON line a row, a table at the end.

python build_scripts/bench_retrieval.py [--rows qwen-1x32k,...] [--policies fier,page] [--out results.jsonl] [--poolings softmax-mean,...]
Microseconds are medians of CUDA-graph replays; every launch reads another layer's buffers, so the caches are cold as in a model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtkv.plugins.kv_append import kernel as append
from trtkv.plugins.kv_attend import launch as attend
from trtkv.plugins.kv_select import fier_layout
from trtkv.plugins.kv_select import launch as select

DEV, DIM = "cuda", 128
BANDWIDTH = 4.3e12  # bytes a second that a copy reaches on an H200; --bandwidth for another device
COLD = 200 << 20  # rotate through more bytes than any second-level cache
ROWS = {  # name: query heads, key-value heads, batch, context, budget, least ratios of the issue
    "qwen-1x32k": (28, 4, 1, 32768, 1024, 2.0, 2.5),
    "qwen-1x128k": (28, 4, 1, 131072, 2048, 4, 5),
    "qwen-8x128k": (28, 4, 8, 131072, 2048, 8, 12),
    "llama3-1x128k": (32, 8, 1, 131072, 2048, 5, 7),
    "llama3-8x128k": (32, 8, 8, 131072, 2048, 9, 14),
    "llama2-1x32k": (32, 32, 1, 32768, 1024, 5, 6),
    "qwen-1x2k": (28, 4, 1, 2048, 1024, 0, 0),
    "qwen-1x8k": (28, 4, 1, 8192, 1024, 0, 0),
    "llama3-8x2k": (32, 8, 8, 2048, 1024, 0, 0),
    "llama3-8x8k": (32, 8, 8, 8192, 1024, 0, 0),
}


def time_graph(step: Callable[[int], None], launches: int, replays: int = 9) -> float:
    """Return the median microseconds of one of `launches` calls step(i), replayed as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(launches, 3)):
            step(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            step(i)
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / launches * 1e3)
    return sorted(times[2:])[replays // 2]


def time_dense(heads_q: int, heads: int, batch: int, context: int) -> tuple[float, str]:
    """Time the library's attention, grouped queries as one block of rows, over contiguous keys and values."""
    size = 2 * batch * heads * context * DIM * 2
    sets = max(1, min(24, COLD // size + 1))
    keys, values = (torch.randn(sets, batch, heads, context, DIM, dtype=torch.bfloat16, device=DEV) for _ in range(2))
    q = torch.randn(batch, heads, heads_q // heads, DIM, dtype=torch.bfloat16, device=DEV)
    best = (1e9, "")
    for name, step in {
        "sdpa": lambda i: scaled_dot_product_attention(q, keys[i % sets], values[i % sets]),
        "sdpa gqa": lambda i: scaled_dot_product_attention(q.view(batch, heads_q, 1, DIM), keys[i % sets], values[i % sets], enable_gqa=True),
    }.items():
        best = min(best, (time_graph(step, max(8, sets)), name))
    return best


class Layer:
    """One layer's cache with random keys, values and index; permuted pages."""

    def __init__(self, heads: int, batch: int, context: int, page: int, bounds: bool) -> None:
        most = context // page
        pool = batch * most
        self.table = torch.randperm(pool, device=DEV).view(batch, most).int()
        self.keys, self.values = (torch.randn(pool, heads, page, DIM, dtype=torch.bfloat16, device=DEV) for _ in range(2))
        if bounds:
            self.meta = torch.empty(pool, heads, 2, DIM, dtype=torch.bfloat16, device=DEV)
            self.meta[:, :, 0], self.meta[:, :, 1] = self.keys.amin(2), self.keys.amax(2)
            self.bits = None
        else:
            self.bits = torch.randint(-(2**31), 2**31 - 1, (pool, heads, page // 32, DIM), dtype=torch.int32, device=DEV)
            self.meta = torch.randn(pool, heads, page // 32, 2, DIM, dtype=torch.float16, device=DEV)
            self.meta[..., 0, :] -= 2
            self.meta[..., 1, :].mul_(0.5).add_(4).clamp_(min=0)


def bench(name: str, policy: str, pooling: str, dense: tuple[float, str], bandwidth: float, quick: bool) -> dict[str, object]:
    """Time every stage and the whole step of one row and check the result of one layer."""
    heads_q, heads, batch, context, budget, *goals = ROWS[name]
    group, rows, page = heads_q // heads, batch * heads, 32
    paged = policy == "page"
    unit = page if paged else 1
    stored = context - 7  # an open group, as in 31 of 32 steps
    index = rows * context * (16 if paged else 32)
    sets = max(2, min(24, COLD // index + 1))
    layers = [Layer(heads, batch, context, page, paged) for _ in range(sets)]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = select.Scratch.plan(rows, group, pooling, context // unit, sms)
    scores, parts = plan.allocate(rows, DEV)
    chosen = torch.full((batch, heads, -(-budget // unit) + 1), -7, dtype=torch.int32, device=DEV)
    lens = torch.full((batch,), stored, dtype=torch.int32, device=DEV)
    starts, positions = torch.arange(batch + 1, dtype=torch.int32, device=DEV), lens - 1
    rope = torch.randn(context, DIM, device=DEV)
    qkv = torch.randn(batch, (heads_q + 2 * heads) * DIM, dtype=torch.bfloat16, device=DEV)
    q, out = (torch.full((batch, heads_q * DIM), float("nan"), dtype=torch.bfloat16, device=DEV) for _ in range(2))
    scale = DIM**-0.5
    common = {"page_size": page, "budget": budget, "scale": scale, "pooling": pooling}

    def do_append(i: int, overlap: bool = False) -> None:
        at = layers[i % sets]
        append.launch(
            qkv, positions, starts, lens, at.table, rope, None, q, at.keys, at.values, at.bits, at.meta,
            eps=0.0, group=32, summary=append.MINMAX if paged else append.FIER, longest=1, overlap=overlap,
        )  # fmt: skip

    def do_score(i: int, overlap: bool = False) -> None:
        at = layers[i % sets]
        if paged:
            select.page_score(q, at.meta, at.table, lens, scores, parts, **common, overlap=overlap)
        else:
            select.fier_score(q, at.bits, at.meta, at.table, lens, scores, parts, **common, overlap=overlap)

    def do_select(i: int, overlap: bool = False) -> None:
        select.select_units(
            scores, parts, lens, chosen, budget=budget, sink=0, window=0, unit=unit, group=page if paged else 32, pooling=pooling, overlap=overlap
        )

    def do_attend(i: int, overlap: bool = False) -> None:
        at = layers[i % sets]
        attend.attend_list(q, at.keys, at.values, at.table, lens, chosen, out, unit=unit, scale=scale, overlap=overlap)

    stages = {"append": do_append, "score": do_score, "select": do_select, "attend": do_attend}
    for step in stages.values():
        step(0)
    torch.cuda.synchronize()
    correct = check(layers[0], q, scores, parts, plan, chosen, out, stored, unit, scale, pooling)
    launches = max(12, sets)
    times = {stage: time_graph(step, launches) for stage, step in stages.items()}
    overlap = select.overlaps(rows, context)
    whole = time_graph(lambda i: [step(i, overlap) for step in stages.values()], launches)
    apart = whole if quick or not overlap else time_graph(lambda i: [step(i) for step in stages.values()], launches)
    times["attend dense kernel"] = 0.0
    if context <= 8192:
        times["attend dense kernel"] = time_graph(
            lambda i: attend.attend_list(
                q, layers[i % sets].keys, layers[i % sets].values, layers[i % sets].table, lens, None, out, unit=1, scale=scale
            ),
            launches,
        )
    moved = index + rows * (context // unit) * plan.heads * 4 + rows * budget * DIM * 4
    least = index + rows * budget * DIM * 4
    goal = goals[1 if paged else 0]
    return {
        "row": name, "policy": policy, "pooling": pooling, "query_heads": heads_q, "kv_heads": heads, "batch": batch, "context": context,
        "budget": budget, "dense_us": round(dense[0], 1), "dense": dense[1],
        **{f"{key.replace(' ', '_')}_us": round(us, 2) for key, us in times.items()},
        "whole_us": round(whole, 2), "whole_without_overlap_us": round(apart, 2), "ratio": round(dense[0] / whole, 2), "goal": goal,
        "bytes_moved": moved, "bound_us": round(least / bandwidth * 1e6, 2), "score_GBps": round(index / times["score"] / 1e3),
        "achieved_GBps": round(moved / whole / 1e3), "parts": plan.parts, "correct": correct,
    }  # fmt: skip


def check(
    layer: Layer, q: Tensor, scores: Tensor, parts: Tensor, plan, chosen: Tensor, out: Tensor, stored: int, unit: int, scale: float, pooling: str
) -> bool:
    """Compare sequence 0 with torch: raw scores, the selected set against the kernel's own scores, attention over the selected set."""
    heads, page = layer.keys.shape[1:3]
    group = q.shape[1] // DIM // heads
    pages = layer.table[0].long()
    grouped = q[0].view(heads, group, DIM).float()
    if unit > 1:
        low, high = (layer.meta[pages, :, i].transpose(0, 1)[:, : stored // unit].float() for i in (0, 1))
        want = grouped.clamp(min=0) @ high.transpose(1, 2) + grouped.clamp(max=0) @ low.transpose(1, 2)
    else:
        groups = stored // 32
        want = torch.cat(
            [
                grouped
                @ fier_layout.unpack(*(x[pages[at : at + 512]].transpose(0, 1).flatten(1, 2) for x in (layer.bits, layer.meta))).flatten(1, 2).mT
                for at in range(0, len(pages), 512)
            ],
            2,
        )[:, :, : groups * 32]
    count = want.shape[2]
    want = want * scale * 1.4426950408889634
    if plan.heads == 1 and group > 1:
        want = (want.amax(1) if pooling == "max" else want.mean(1)).unsqueeze(1)
    blocks = -(-count // 32)
    per = -(-blocks // plan.parts) * 32
    ref = parts[:heads, torch.arange(count, device=DEV) // per, :, 0].transpose(1, 2)
    got = scores[:heads, :, :count].float() + ref
    good = bool((got - want).norm() <= 2e-3 * want.norm())
    pooled = got[:, 0]
    if plan.heads > 1:
        lse = torch.logsumexp(want.double() * 0.6931471805599453, 2) / 0.6931471805599453
        probability = torch.exp2(got.double() - lse[:, :, None])
        pooled = probability.amax(1) if pooling == "softmax-max" else probability.mean(1)
    for h in range(heads):
        own = chosen[0, h, : chosen[0, h, -1]].long()
        good &= bool((own[1:] > own[:-1]).all()) and len(own) == chosen.shape[2] - 1
        taken = torch.zeros(count, dtype=torch.bool, device=DEV)
        taken[own[own < count]] = True
        least, best = pooled[h][taken].min(), pooled[h][~taken].max()
        good &= bool(least >= best - abs(best) * 2e-3)
        tokens = (own[:, None] * unit + torch.arange(unit, device=DEV)).flatten()
        tokens = tokens[tokens < stored]
        k, v = (x[pages[tokens // page], h, tokens % page].double() for x in (layer.keys, layer.values))
        exact = torch.softmax(grouped[h].double() @ k.T * scale, 1) @ v
        good &= bool((out[0].view(heads, group, DIM)[h].double() - exact).norm() <= 1e-2 * exact.norm())
    return good


def main() -> int:
    """Bench the rows asked for; 0 when every result is right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--policies", default="fier,page")
    parser.add_argument("--poolings", default="softmax-mean")
    parser.add_argument("--out", default="")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH)
    parser.add_argument("--quick", action="store_true", help="leave out the step without overlapped launches")
    options = parser.parse_args()
    torch.manual_seed(1)
    records = []
    for name in options.rows.split(","):
        dense = time_dense(*ROWS[name][:4])
        torch.cuda.empty_cache()
        for policy in options.policies.split(","):
            for pooling in options.poolings.split(","):
                record = bench(name, policy, pooling, dense, options.bandwidth, options.quick)
                torch.cuda.empty_cache()
                records.append(record)
                print(json.dumps(record), file=sys.stderr, flush=True)
    if options.out:
        Path(options.out).write_text("".join(json.dumps(record) + "\n" for record in records))
    columns = ("row", "policy", "pooling", "dense_us", "append_us", "score_us", "score_GBps", "select_us", "attend_us", "attend_dense_kernel_us",
               "whole_us", "whole_without_overlap_us", "ratio", "goal", "bound_us", "correct")  # fmt: skip
    print(" | ".join(columns))
    for record in records:
        print(" | ".join(str(record[column]) for column in columns))
    return 0 if all(record["correct"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())

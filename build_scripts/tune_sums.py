"""Tries tiles of the column sums on this machine's GPU, beside the library's attention of the same prompt.

python build_scripts/tune_sums.py [--geometry M] [--context N]     prints a table
python build_scripts/tune_sums.py --compile 90 ...                 only compiles the kernels that it would try, into the user's folder
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from plugins.attend.prefill import attend_with_lse
from plugins.cache.eviction.attention_sums import launch
from plugins.cache.eviction.attention_sums.launch import Tile
from trtkv.bench.cases import find_geometry
from trtkv.bench.compress import libraries, measure_long
from trtkv.engine.compile_kernels import write_kernels

RUNS = 5
TILES = [Tile(*form) for form in ((64, 128, 4), (64, 64, 4), (128, 64, 4), (64, 128, 8), (64, 256, 8), (128, 128, 8))]


def main() -> None:
    """Time every tile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--compile", default="")
    words = parser.parse_args()
    model = find_geometry(words.geometry, "bfloat16")
    heads, group, dim = model.num_kv_heads, model.num_q_heads // model.num_kv_heads, model.head_dim
    if words.compile:
        specs = [launch.sums_kernel(group, dim, "bf16", words.compile, tile) for tile in TILES]
        with tempfile.TemporaryDirectory() as folder:
            write_kernels(specs, Path(folder), lambda stage, fraction: None)
        return
    made = torch.Generator("cuda").manual_seed(1)
    query = torch.randn(words.context, heads * group, dim, device="cuda", generator=made).bfloat16()
    keys, values = (torch.randn(heads, words.context, dim, device="cuda", generator=made).bfloat16() for _ in range(2))
    device, scale = query.device, dim**-0.5
    _, lse = attend_with_lse(query, keys, values, scale)
    least = min(measure_long(call, RUNS, device).median_us for call in libraries(query, keys, values, scale).values())
    print(f"library {least:.1f} us")
    first = launch.column_sums(query, keys, lse, scale)
    work = query.shape[1] * dim * words.context * (words.context + 1)
    for tile in TILES:
        off = float((launch.column_sums(query, keys, lse, scale, tile=tile) - first).norm() / first.norm())
        took = measure_long(lambda i, tile=tile: launch.column_sums(query, keys, lse, scale, tile=tile), RUNS, device).median_us
        share = f"with sums {1 + took / least:.3f} of attention"
        print(f"{tile}: {took:.1f} us, {work / took / 1e6:.0f} TFLOP/s, {share}, {'WRONG' if off > 1e-5 else 'ok'}")


if __name__ == "__main__":
    main()

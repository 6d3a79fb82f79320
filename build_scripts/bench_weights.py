"""Times decode steps and first tokens of one model's shape with weights in 16 bits, fp8 and int4, under several policies, in one run.

    python build_scripts/bench_weights.py records.jsonl                   # qwen2.5-7b, 1 and 8 sequences of 32,768 tokens, full and fier
    python build_scripts/bench_weights.py records.jsonl --table           # what it measured, as a table

Weights are random, in the formats of published checkpoints: fp8 with a scale for each row, int4 with one for each 128 weights; the head stays in 16
bits. First tokens are of one sequence. Rows are those of `trtkv bench step`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trtkv.presets import model_presets

FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FORMATS: dict[str, tuple[str, dict[str, Any]] | None] = {"16 bits": None, "fp8": ("float-quantized", FP8), "int4": ("pack-quantized", INT4)}


def main() -> None:
    """Measure every format in turn, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--model", default="qwen2.5-7b", choices=sorted(model_presets()))
    parser.add_argument("--policy", default="full,fier")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.records.read_text().splitlines()]))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, form in FORMATS.items():
            model = options.model if form is None else write_config(options.model, *form, Path(folder) / name)
            for batch, fill in ((1, "prefill"), (8, "direct")):
                given = [
                    "--model",
                    model,
                    "--policy",
                    options.policy,
                    "--context",
                    options.context,
                    "--batch",
                    batch,
                    "--fill",
                    fill,
                    "--chunk",
                    8192,
                ]
                command = [sys.executable, "-m", "trtkv", "bench", "step", *map(str, given), "--weights", "random", "--json"]
                text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                with options.records.open("a") as file:
                    for row in map(json.loads, text.splitlines()):
                        command = row["command"].replace(model, f"<{name} of {options.model}>" if form else model)
                        file.write(json.dumps({**row, "command": command, "model": options.model, "weights": name}) + "\n")


def write_config(model: str, form: str, weights: dict[str, Any], folder: Path) -> str:
    """Write the configuration of a quantized checkpoint of a preset's shape, without weights; returns its directory."""
    folder.mkdir()
    group = {"targets": ["Linear"], "weights": weights}
    quantization = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"group_0": group}}
    raw = {name: value for name, value in model_presets()[model].items() if name != "hub"}
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    return str(folder)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the median step and the first token, a line for each format, policy and number of sequences, beside 16 bits under the same policy."""
    base = {(row["policy"], row["batch"]): row["itl_p50_ms"] for row in rows if row["weights"] == "16 bits"}
    lines = ["| weights | policy | sequences | step ms | speedup | of its bytes' bound | first token s |", "|---|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        step, first = row["itl_p50_ms"], row.get("ttft_ms")
        share = row["least_us"] / step / 1e3
        lines.append(
            f"| {row['weights']} | {row['policy']} | {row['batch']} | {step:.2f} | {base[row['policy'], row['batch']] / step:.2f} | {share:.0%} | "
            f"{'' if first is None else f'{first / 1e3:.2f}'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

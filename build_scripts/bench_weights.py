"""Times decode steps and first tokens of one model's shape with weights in 16 bits, fp8 and int4, under several policies, in one run.

    python build_scripts/bench_weights.py records.jsonl                   # qwen2.5-7b, 1 and 8 sequences of 32,768 tokens, full and fier
    python build_scripts/bench_weights.py records.jsonl --peer-python P   # and vLLM with weights of the same format, as bench_peer.py has it
    python build_scripts/bench_weights.py records.jsonl --table           # what it measured, as a table

Weights are random, in the formats of published checkpoints: fp8 with a scale for each row, int4 with one for each 128 weights; the head stays in 16
bits. First tokens are of one sequence. Rows are those of `trtkv bench step`, a peer's those of bench_peer.py.
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

PEER = Path(__file__).resolve().parent / "bench_peer.py"

FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}  # as servers encode them beside fp8
FORMATS: dict[str, tuple[str, dict[str, Any]] | None] = {"16 bits": None, "fp8": ("float-quantized", FP8), "int4": ("pack-quantized", INT4)}


def main() -> None:
    """Measure every format in turn, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--model", default="qwen2.5-7b", choices=sorted(model_presets()))
    parser.add_argument("--policy", default="full,fier")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--formats", default=",".join(FORMATS), help="joined by commas")
    parser.add_argument("--peer-python", help="interpreter of vLLM's environment; see bench_peer.py")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.records.read_text().splitlines()]))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in options.formats.split(","):
            form = FORMATS[name]
            model = options.model if form is None else write_config(options.model, *form, Path(folder) / name)
            rows = [row for batch, fill in ((1, "prefill"), (8, "direct")) for row in own_rows(options, model, batch, fill)]
            if options.peer_python:
                rows += peer_rows(options, model, Path(folder) / f"{name}.jsonl")
            with options.records.open("a") as file:
                for row in rows:
                    command = row["command"].replace(model, f"<{name} of {options.model}>" if form else model)
                    file.write(json.dumps({**row, "command": command, "model": options.model, "weights": name}) + "\n")


def own_rows(options: argparse.Namespace, model: str, batch: int, fill: str) -> list[dict[str, Any]]:
    """Time steps of so many sequences."""
    given = {"--model": model, "--policy": options.policy, "--context": options.context, "--batch": batch, "--fill": fill, "--chunk": 8192}
    words = [str(word) for pair in given.items() for word in pair]
    command = [sys.executable, "-m", "trtkv", "bench", "step", *words, "--weights", "random", "--json"]
    return [json.loads(line) for line in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()]


def peer_rows(options: argparse.Namespace, model: str, records: Path) -> list[dict[str, Any]]:
    """Time vLLM's first token and steps, as rows whose policy is its name."""
    asked = [f"ttft:{options.context}", *(f"decode:{batch}x{options.context}" for batch in (1, 8))]
    command = [sys.executable, str(PEER), "--side", "peer", "--peer-python", options.peer_python, "--model", model, "--rows", ",".join(asked)]
    subprocess.run([*command, "--results", str(records)], check=True)
    found = {row["row"]: row for row in map(json.loads, records.read_text().splitlines())}
    first, *steps = (found[one] for one in asked)
    timed = {1: {"ttft_ms": first["ttft_ms"]}, 8: {}}
    return [{**row, "policy": "vllm", "itl_p50_ms": row["itl_ms"], **timed[row["batch"]]} for row in steps]


def write_config(model: str, form: str, weights: dict[str, Any], folder: Path) -> str:
    """Write the configuration of a quantized checkpoint of a preset's shape, without weights; returns its directory."""
    folder.mkdir()
    group = {"targets": ["Linear"], "weights": weights} | ({"input_activations": TOKENS} if weights is FP8 else {})
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
        share = f"{row['least_us'] / step / 1e3:.0%}" if "least_us" in row else ""
        lines.append(
            f"| {row['weights']} | {row['policy']} | {row['batch']} | {step:.2f} | {base[row['policy'], row['batch']] / step:.2f} | {share} | "
            f"{'' if first is None else f'{first / 1e3:.2f}'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

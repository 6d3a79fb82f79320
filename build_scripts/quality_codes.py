"""Measures what encodings cost in answers: a prompt is computed once, and every encoding's question is asked over its codes.

    python build_scripts/quality_codes.py engines/quality-codes.jsonl --commit $(git rev-parse --short HEAD)

An encoding that follows a prompt's attention leaves the prompt's computation as it is, so all of them share it: a sample costs one prompt and a
short chunk for each. The prompt's keys and values are encoded by the role as a 16-bit model stores them, decoded in their pages, and question and
answer attend to them in float32, all at once. What a run of the engine does beside (values that leave the residual while the question is read) is
a few tokens. A sample is a line of the file once all encodings have answered it; a second call goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from quality_cells import Cell, Model, samples_of
from torch import Tensor

from plugins.cache.bytes import ByteCount
from trtkv import LLM
from trtkv.bench.records import read_records
from trtkv.eval.teacher_forcing import Target, tokens_of
from trtkv.plan import Occupancy
from trtkv.policies.base import Part, Quantize
from trtkv.policies.policy import Policy
from trtkv.policies.registry import parse_policy
from trtkv.runtime.rows import StepRow

PARTS: tuple[Part, ...] = ("keys", "values")


def main() -> None:
    """Ask all samples that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--policies", default="full,kivi,kivi4", help="presets, with changed fields after a blank")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default="passkey,needle")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    model = Model(options.model, "cpu", "float32", options.length, 1)
    policies = {name: parse_policy(name.split()[0], sets=name.split()[1:]).check() for name in options.policies.split(",")}
    done = {(row["task"], row["sample"]) for row in (read_records(options.records) if options.records.is_file() else [])}
    for task, index in order(options.tasks.split(","), options.samples):
        if (task, index) in done:
            continue
        cell = Cell(task, "full", (), 0, options.length, options.samples, seed=options.seed)
        target = tokens_of(model.full, samples_of(cell, model.full)[index], blind=True)
        row = {"task": task, "sample": index, "model": options.model, "length": options.length, "samples": options.samples, "seed": options.seed}
        with options.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "answers": ask(model.full, target, policies), "commit": options.commit}) + "\n")


def order(tasks: list[str], samples: int) -> Iterator[tuple[str, int]]:
    """List samples so that a part of them covers all depths."""
    for first in (1, 0, 2):
        for index in range(first, samples, 3):
            yield from ((task, index) for task in tasks)


@torch.inference_mode()
def ask(llm: LLM, target: Target, policies: dict[str, Policy]) -> dict[str, dict[str, Any]]:
    """Answer one sample over every policy's codes: whether all tokens were the likeliest, their mean loss in nats, the prompt's bytes in 16 bits."""
    engine, tokens, prompt = llm.engine, target.text.tokens, target.text.prompt
    reserved, slot = engine.reserve(prompt, len(tokens)), engine.slots.pop()
    try:
        engine.stepper.run([StepRow(tokens[:prompt], 0, slot, reserved.pages)])
        pages = torch.tensor(engine.cache.page_lists([reserved.pages])[0][0])
        layers = [[engine.cache.buffers[part][layer] for part in PARTS] for layer in range(engine.cache.plan.num_layers)]
        exact = [[x[pages].clone() for x in layer] for layer in layers]
        found, asked = {}, tokens[prompt:-1]
        for name, policy in policies.items():
            ends = encoded(policy.quantize, prompt)
            for layer, own in zip(layers, exact, strict=True):
                for x, pure, part, end in zip(layer, own, PARTS, ends, strict=True):
                    x[pages] = pure if policy.quantize is None else coded(policy.quantize, pure, part, end)
            rows = tuple(range(target.answer - prompt - 1, len(asked)))
            logits = engine.stepper.run([StepRow(asked, prompt, slot, reserved.pages, rows)])
            right = torch.tensor(tokens[target.answer :])
            loss = torch.nn.functional.cross_entropy(logits.float(), right).item()
            found[name] = {"exact": int((logits.argmax(-1) == right).all()), "nll": round(loss, 5), "bytes": stored(llm, policy, prompt, ends)}
        return found
    finally:
        engine.cache.release(slot)
        reserved.release()
        engine.slots.append(slot)


def encoded(role: Quantize | None, prompt: int) -> tuple[int, int]:
    """Return how many of a prompt's keys and values are encoded at its end."""
    at = Occupancy(seen=prompt, lengths=(prompt,), settled=prompt, phase="prefill", complete=True, prompt=prompt)
    return (0, 0) if role is None else role.flush(at, (0, 0))


def coded(role: Quantize, pure: Tensor, part: Part, end: int) -> Tensor:
    """Return pages [M, Hk, N, D] whose first tokens are what their codes represent."""
    flat = pure.transpose(0, 1).flatten(1, 2).clone()
    flat[:, :end] = role.decode(role.encode(flat[:, :end].half(), part), part)
    return flat.unflatten(1, pure.shape[::2][:2]).transpose(0, 1)


def stored(llm: LLM, policy: Policy, prompt: int, ends: tuple[int, int]) -> int:
    """Count the bytes of a prompt in a 16-bit model."""
    count = ByteCount(policy.plan(llm.engine.manifest.model.model_copy(update={"dtype": "float16"})))
    return count.stored([prompt] * count.num_rows, [ends] * count.num_rows)


if __name__ == "__main__":
    main()

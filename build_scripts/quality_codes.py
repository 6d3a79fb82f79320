"""Measures what encodings cost in answers: a prompt is computed once, and every encoding's question is asked over its codes.

    python build_scripts/quality_codes.py engines/quality-codes.jsonl --commit $(git rev-parse --short HEAD)
    python build_scripts/quality_codes.py records.jsonl --model gemma3-270m --device cuda --part 0/8 &    # one of eight processes, and so on

An encoding that follows a prompt's attention leaves the prompt's computation as it is, so all of them share it: a sample costs one prompt and a
short chunk for each. The prompt's keys and values are encoded by the role as a 16-bit model stores them, decoded in their pages, and question and
answer attend to them in float32, all at once. What a run of the engine does beside (values that leave the residual while the question is read) is
a few tokens. A sample is a line of the file once all encodings have answered it; a second call goes on. The task "prose" has no question: it compares
the last tokens of windows of text.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from quality_cells import Model
from torch import Tensor

from plugins.cache.bytes import ByteCount
from trtkv import LLM
from trtkv.bench.records import read_records
from trtkv.eval.decoding import Given
from trtkv.eval.haystack import passage
from trtkv.eval.ruler import Needles
from trtkv.eval.task import AnswerTask, TaskOptions
from trtkv.eval.tasks import make_task
from trtkv.eval.teacher_forcing import Target, tokens_of
from trtkv.plan import Occupancy
from trtkv.policies.base import Part, Quantize
from trtkv.policies.policy import Policy
from trtkv.policies.registry import parse_policy
from trtkv.runtime.rows import StepRow

PARTS: tuple[Part, ...] = ("keys", "values")
KEYS = {"two-keys": 2, "four-keys": 4}  # RULER's needles in a text, of which one is requested
PROSE = 256  # last tokens of a window, which are compared


def main() -> None:
    """Ask all samples that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--policies", default="full,kivi,kivi4", help="presets, with changed fields after a blank")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", default="passkey,needle")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="0/1", help="which of how many parts of the samples are asked")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(options.model, options.device, "float32", options.length + PROSE, 1)
    policies = {name: parse_policy(name.split()[0], sets=name.split()[1:]).check() for name in options.policies.split(",")}
    done = {(row["task"], row["sample"]) for row in (read_records(options.records) if options.records.is_file() else [])}
    part, parts = map(int, options.part.split("/"))
    made: dict[str, list[Target]] = {}
    for task, index in list(order(options.tasks.split(","), options.samples))[part::parts]:
        if (task, index) in done:
            continue
        if task not in made:
            made[task] = list(targets(task, model.full, options))
        row = {"task": task, "sample": index, "model": options.model, "length": options.length, "samples": options.samples, "seed": options.seed}
        row["device"] = torch.cuda.get_device_name() if options.device != "cpu" else "2-core x86-64"
        with options.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "answers": ask(model.full, made[task][index], policies), "commit": options.commit}) + "\n")


def order(tasks: list[str], samples: int) -> Iterator[tuple[str, int]]:
    """List samples so that a part of them covers all depths."""
    for first in (1, 0, 2):
        for index in range(first, samples, 3):
            yield from ((task, index) for task in tasks)


def targets(name: str, llm: LLM, options: argparse.Namespace) -> Iterator[Target]:
    """Yield a task's samples in tokens."""
    count = lambda text: len(llm.encode(text))  # noqa: E731
    if name == "prose":
        for index in range(options.samples):
            text = passage(options.length + options.length // 2, count, random.Random(f"prose {options.seed} {index}"))
            tokens = llm.encode(" ".join(text))[: options.length]
            yield Target(Given(tokens, options.length - PROSE), options.length - PROSE + 1, ())
        return
    task = Needles(name, num_keys=KEYS[name]) if name in KEYS else make_task(name, TaskOptions())
    assert isinstance(task, AnswerTask)
    yield from (tokens_of(llm, sample, blind=True) for sample in task.samples(options.length, options.samples, options.seed, count))


@torch.inference_mode()
def ask(llm: LLM, target: Target, policies: dict[str, Policy]) -> dict[str, dict[str, Any]]:
    """Answer one sample over every policy's codes, the first of which is `full`.

    exact: whether all tokens were the likeliest; nll: their mean loss in nats; kl and same: the mean divergence from full's predictions in nats, and
    the share of them whose likeliest token is full's; bytes of the prompt in 16 bits.
    """
    engine, tokens, prompt = llm.engine, target.text.tokens, target.text.prompt
    reserved, slot = engine.reserve(prompt, len(tokens)), engine.slots.pop()
    try:
        engine.stepper.run([StepRow(tokens[:prompt], 0, slot, reserved.pages)])
        pages = torch.tensor(engine.cache.page_lists([reserved.pages])[0][0], device=engine.cache.device)
        layers = [[engine.cache.buffers[part][layer] for part in PARTS] for layer in range(engine.cache.plan.num_layers)]
        exact = [[x[pages].clone() for x in layer] for layer in layers]
        rings = [(ring, ring.clone()) for ring in (engine.cache.windows.buffers if engine.cache.windows else ())]
        found, asked, full = {}, tokens[prompt:-1], None
        right = torch.tensor(tokens[target.answer :], device=engine.cache.device)
        for name, policy in policies.items():
            ends = encoded(policy.quantize, prompt)
            for layer, own in zip(layers, exact, strict=True):
                for x, pure, part, end in zip(layer, own, PARTS, ends, strict=True):
                    x[pages] = pure if policy.quantize is None else coded(policy.quantize, pure, part, end)
            for ring, before in rings:
                ring.copy_(before)
            rows = tuple(range(target.answer - prompt - 1, len(asked)))
            logs = engine.stepper.run([StepRow(asked, prompt, slot, reserved.pages, rows)]).float().log_softmax(-1)
            full = logs.clone() if full is None else full
            found[name] = {**compared(logs, full, right), "bytes": stored(llm, policy, prompt, ends)}
        return found
    finally:
        engine.cache.release(slot)
        reserved.release()
        engine.slots.append(slot)


def compared(logs: Tensor, full: Tensor, right: Tensor) -> dict[str, float]:
    """Compare log probabilities [R, V] with full's and with the right tokens [R]."""
    return {
        "exact": int((logs.argmax(-1) == right).all()),
        "nll": round(torch.nn.functional.nll_loss(logs, right).item(), 5),
        "kl": round((full.exp() * (full - logs)).sum(-1).mean().item(), 6),
        "same": round((logs.argmax(-1) == full.argmax(-1)).float().mean().item(), 4),
    }


def encoded(role: Quantize | None, prompt: int) -> tuple[int, int]:
    """Return how many of a prompt's keys and values are encoded at its end."""
    at = Occupancy(seen=prompt, lengths=(prompt,), settled=prompt, phase="prefill", complete=True, prompt=prompt)
    return (0, 0) if role is None else role.flush(at, (0, 0))


def coded(role: Quantize, pure: Tensor, part: Part, count: int) -> Tensor:
    """Return pages [M, Hk, N, D] of which so many tokens are what their codes represent."""
    flat = pure.transpose(0, 1).flatten(1, 2).clone()
    own = flat[:, role.exact_first : role.exact_first + count]
    own[:] = role.decode(role.encode(own.half(), part), part)
    return flat.unflatten(1, pure.shape[::2][:2]).transpose(0, 1)


def stored(llm: LLM, policy: Policy, prompt: int, ends: tuple[int, int]) -> int:
    """Count the bytes of a prompt in a 16-bit model, on the layers that a policy acts on."""
    count = ByteCount(policy.plan(llm.engine.manifest.model.model_copy(update={"dtype": "float16"})))
    return count.stored([prompt] * count.num_rows, [ends] * count.num_rows)


if __name__ == "__main__":
    main()

"""Measures what compressing a prompt costs in answers: a prompt is computed once, and every policy is asked about what it leaves of it.

    python build_scripts/quality_compress.py engines/quality-recommended.jsonl --seen --commit $(git rev-parse --short HEAD)
    python build_scripts/quality_compress.py records.jsonl --model gemma3-270m --length 4096 --device cuda --part 0/8 &    # of eight processes

Evictions and codes follow a prompt's attention, so a prompt in one chunk is the same for all policies: what every layer attended to is recorded once,
and given to each policy's reference cache, which evicts, encodes and then reads question and answer, all at once. The question follows the prompt, or
is its end (`--seen`; then nothing is compressed before the answer's first token). A sample is a line of the file once all policies have answered it;
a second call goes on, and adds a line where it has other policies. The task "prose" has no question: it compares the last tokens of a text.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from quality_cells import Model
from torch import Tensor

from plugins.cache.reference.cache import ReferenceCache
from trtkv import LLM
from trtkv.bench.records import append_records, read_records
from trtkv.eval.attention import Recorded, record
from trtkv.eval.budgets import apply_budget
from trtkv.eval.decoding import Given
from trtkv.eval.haystack import CountTokens, passage
from trtkv.eval.ruler import Needles
from trtkv.eval.task import AnswerTask, Sample, TaskOptions
from trtkv.eval.tasks import make_task
from trtkv.eval.teacher_forcing import Target, tokens_of
from trtkv.graph.decoder import build_decoder
from trtkv.policies.policy import Policy
from trtkv.policies.registry import parse_policy
from trtkv.runtime.executor import TorchExecutor
from trtkv.runtime.rope import rope_tables
from trtkv.runtime.rows import StepRow
from trtkv.runtime.step import Stepper

TASKS = "passkey,needle,two-keys,four-keys"
KEYS = {"two-keys": 2, "four-keys": 4}  # RULER's needles in a text, of which one is requested
PROSE, COMPARED = "prose", 256  # a text, of which so many last tokens are compared
Counted = dict[int, list[tuple[Tensor, Tensor]]]  # what the tokens of each layer and head received of the prompt's attention


def main() -> None:
    """Ask all samples that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--policies", default="kivi4,rotated", help="presets, with changed fields and a budget such as 25%% after blanks")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--seen", action="store_true", help="the question is part of the prompt that is compressed")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="0/1", help="which of how many parts of the samples are asked")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(options.model, options.device, options.dtype, options.length + COMPARED, 1)
    runs = {name: Run(model, policy_of(name, options.length)) for name in ("full", *options.policies.split(","))}
    about = {name: getattr(options, name) for name in ("model", "length", "seen", "samples", "seed", "dtype")}
    about["device"] = torch.cuda.get_device_name() if model.full.engine.cache.device.type == "cuda" else "2-core x86-64"
    done: dict[tuple[str, int], set[str]] = {}
    for row in read_records(options.records) if options.records.is_file() else []:
        if all(row[name] == value for name, value in about.items() if name != "device"):
            done.setdefault((row["task"], row["sample"]), {"full"}).update(row["answers"])
    part, parts = map(int, options.part.split("/"))
    own = list(order(options.tasks.split(","), options.samples))[part::parts]
    count = cache(lambda text: len(model.full.encode(text)))  # sentences come again and again
    made: dict[str, list[Sample]] = {}
    for task, index in own:
        left = {name: run for name, run in runs.items() if name not in done.get((task, index), ())}
        if not left:
            continue
        made[task] = made.get(task) or samples_of(task, options, count)
        found = ask(model.full, target_of(model.full, made[task][index], options), {"full": runs["full"], **left})
        row = {"task": task, "sample": index, **about, "answers": found, "commit": options.commit}
        append_records(options.records, [row])


def policy_of(name: str, length: int) -> Policy:
    """Read a preset with changed fields and a budget after blanks."""
    preset, *fields = name.split()
    budgets = [int(fields.pop().rstrip("%"))] if fields and fields[-1].endswith("%") else []
    policy = parse_policy(preset, sets=fields)
    return apply_budget(policy, round(length * budgets[0] / 100), length) if budgets else policy.check()


def order(tasks: list[str], samples: int) -> Iterator[tuple[str, int]]:
    """List samples so that a part of them covers all depths."""
    for first in (1, 0, 2):
        for index in range(first, samples, 3):
            yield from ((task, index) for task in tasks)


def samples_of(name: str, options: argparse.Namespace, count: CountTokens) -> list[Sample]:
    """Make a task's samples."""
    if name == PROSE:
        texts = (passage(options.length * 3 // 2, count, random.Random(f"prose {options.seed} {index}")) for index in range(options.samples))
        return [Sample(" ".join(text), "", (), 0) for text in texts]
    task = Needles(name, num_keys=KEYS[name]) if name in KEYS else make_task(name, TaskOptions())
    assert isinstance(task, AnswerTask)
    return task.samples(options.length, options.samples, options.seed, count)


def target_of(llm: LLM, sample: Sample, options: argparse.Namespace) -> Target:
    """Put a sample into tokens; the answer of a text without question is its end."""
    if sample.target:
        return tokens_of(llm, sample, blind=not options.seen)
    prompt = options.length - COMPARED
    return Target(Given(llm.encode(sample.context)[: options.length], prompt), prompt, ())


class Run:
    """A policy's reference cache around a model's weights."""

    def __init__(self, model: Model, policy: Policy) -> None:
        """Make the graph and the cache for one sequence, whose sliding windows are those of the full cache."""
        full = model.full.engine
        shape, limits = full.manifest.model, full.manifest.limits
        plan = policy.plan(shape.model_copy(update={"dtype": "float16"}))  # keys, values and scales are rounded as a 16-bit model stores them
        graph = Path(model._folder.name) / f"{plan.hash}.onnx"
        graph.write_bytes(build_decoder(shape, plan, limits).model.SerializeToString())
        self.pages = list(range(plan.pages(limits.max_seq_len)))
        self.cache = ReferenceCache(plan, [len(self.pages)] * plan.num_page_groups, 1, full.cache.device)
        self.cache.windows = full.cache.windows
        self.stepper = Stepper(TorchExecutor(graph, model._weights, self.cache), self.cache, limits, rope_tables(shape, limits.max_seq_len))

    def read(self, seen: Recorded, counted: Counted) -> int:
        """Let the cache be as after a prompt, and return the bytes that it stores on the layers that the policy acts on."""
        prompt = seen.prompt
        self.cache.begin_step([prompt], [prompt], [0], self.cache.page_lists([self.pages]), [prompt])
        layers = [self.cache.find(number, 0) for number in range(len(seen.layers))]
        for number, (layer, (query, keys, values)) in enumerate(zip(layers, seen.layers, strict=True)):
            layer.append(keys.half(), values.half(), prompt)
            if not layer.roles.counts_attention:
                layer.queries = query[-layer.roles.observe_window :].float() if layer.roles.observe_window else None
                continue
            if number not in counted:
                layer.attend(query)
                counted[number] = [(store.mass, store.newest) for store in layer.heads]
            for store, known in zip(layer.heads, counted[number], strict=True):
                store.mass, store.newest = known
        self.cache.end_step()
        rows = [(length, layer.encoded) for layer in layers for length in layer.lengths]
        if not self.cache.count.by_head:
            groups = {group: (layer.lengths[0], layer.encoded) for group, layer in zip(self.cache.plan.page_groups, layers, strict=True)}
            rows = [groups[group] for group in range(len(groups))]
        lengths, ends = zip(*rows, strict=True)
        return self.cache.count.stored(lengths, ends)


@torch.inference_mode()
def ask(llm: LLM, target: Target, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Answer one sample over what every policy leaves of its prompt.

    exact: whether all tokens were the likeliest; nll: their mean loss in nats; kl and same: the mean divergence from full's predictions in nats, and
    the share of them whose likeliest token is full's; bytes of the prompt.
    """
    tokens, prompt, counted = target.text.tokens, target.text.prompt, Counted()
    seen = record(llm, Given(tokens[:prompt], prompt))
    rings = [(ring, ring.clone()) for ring in llm.engine.cache.window_buffers()]
    right = torch.tensor(tokens[target.answer :], device=seen.logits.device)
    found, asked, full = dict[str, dict[str, Any]](), tokens[prompt:-1], Tensor()
    for name, run in runs.items():
        for ring, before in rings:
            ring.copy_(before)
        size, logits = run.read(seen, counted), seen.logits[None]  # of the token after the prompt, before anything is compressed
        if asked:
            row = StepRow(asked, prompt, 0, run.pages, tuple(range(len(asked))), prompt)
            logits = torch.cat([logits, run.stepper.run([row])])
        logs = logits[target.answer - prompt :].float().log_softmax(-1)
        full = full if found else logs
        found[name] = {**compared(logs, full, right), "bytes": size}
        run.cache.release(0)
    return found


def compared(logs: Tensor, full: Tensor, right: Tensor) -> dict[str, float]:
    """Compare log probabilities [R, V] with full's and with the right tokens [R]."""
    return {
        "exact": int((logs.argmax(-1) == right).all()),
        "nll": round(torch.nn.functional.nll_loss(logs, right).item(), 5),
        "kl": round((full.exp() * (full - logs)).sum(-1).mean().item(), 6),
        "same": round((logs.argmax(-1) == full.argmax(-1)).float().mean().item(), 4),
    }


if __name__ == "__main__":
    main()

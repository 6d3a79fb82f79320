"""Measures what evictions at a prompt's end cost in answers: a prompt is computed once, and every policy's question is asked of what it keeps.

    python build_scripts/quality_evict.py engines/quality-evict.jsonl --commit $(git rev-parse --short HEAD)

An eviction follows a prompt's attention, so a prompt in one chunk is the same for all policies: what every layer attended to is recorded once, and
given to each policy's reference cache, which then answers. A sample is a line of the file once all policies have answered it; a second call goes on,
and adds a line where it has other policies.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from quality_cells import Cell, Model, samples_of
from quality_codes import order
from torch import Tensor

from plugins.cache.assemble import make_cache
from plugins.cache.reference.cache import ReferenceCache
from trtkv.bench.records import read_records
from trtkv.eval.attention import Recorded, record
from trtkv.eval.budgets import apply_budget
from trtkv.eval.decoding import Given
from trtkv.eval.teacher_forcing import Target, tokens_of
from trtkv.graph.decoder import build_decoder
from trtkv.policies.policy import Policy
from trtkv.policies.registry import parse_policy
from trtkv.runtime.executor import TorchExecutor
from trtkv.runtime.rope import rope_tables
from trtkv.runtime.rows import StepRow
from trtkv.runtime.step import Stepper

POLICIES = "snapkv,lagkv,h2o,keydiff,expected-attention,expected-attention evict.epsilon=0,expected-adakv,adakv,rkv,expected-attention+kivi4"


def main() -> None:
    """Ask all samples that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--policies", default=POLICIES, help="presets, with changed fields after a blank")
    parser.add_argument("--percents", default="25,50", help="budgets, as shares of the length")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default="passkey,needle")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    model = Model(options.model, options.device, options.dtype, options.length, 1)
    runs = {"full": Run(model, parse_policy("streaming", budget=options.length))}  # which evicts nothing then
    for name in options.policies.split(","):
        for percent in map(int, options.percents.split(",")):
            policy = parse_policy(name.split()[0], sets=name.split()[1:])
            runs[f"{name} {percent}%"] = Run(model, apply_budget(policy, round(options.length * percent / 100), options.length))
    done: dict[tuple[str, int], set[str]] = {}
    for row in read_records(options.records) if options.records.is_file() else []:
        done.setdefault((row["task"], row["sample"]), set()).update(row["answers"])
    for task, index in order(options.tasks.split(","), options.samples):
        left = {name: run for name, run in runs.items() if name not in done.get((task, index), ())}
        if not left:
            continue
        cell = Cell(task, "full", (), 0, options.length, options.samples, seed=options.seed)
        target = tokens_of(model.full, samples_of(cell, model.full)[index], blind=True)
        row = {"task": task, "sample": index, **{name: getattr(options, name) for name in ("model", "length", "samples", "seed", "dtype")}}
        row["device"] = torch.cuda.get_device_name() if model.full.engine.cache.device.type == "cuda" else "2-core x86-64"
        with options.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "answers": ask(model, target, left), "commit": options.commit}) + "\n")


class Run:
    """A policy's reference cache around a model's weights."""

    def __init__(self, model: Model, policy: Policy) -> None:
        """Make the graph and the cache for one sequence."""
        manifest = model.full.engine.manifest
        plan, limits = policy.plan(manifest.model), manifest.limits
        graph = Path(model._folder.name) / f"{plan.hash}.onnx"
        graph.write_bytes(build_decoder(manifest.model, plan, limits).model.SerializeToString())
        cache = make_cache(plan, [plan.pages(limits.max_seq_len)] * plan.num_page_groups, 1, model.full.engine.cache.device, by_definition=True)
        assert isinstance(cache, ReferenceCache)
        self.cache, self.pages = cache, list(range(plan.pages(limits.max_seq_len)))
        self.stepper = Stepper(TorchExecutor(graph, model._weights, cache), cache, limits, rope_tables(manifest.model, limits.max_seq_len))

    def read(self, seen: Recorded, counted: dict[int, list[tuple[Tensor, Tensor]]]) -> int:
        """Let the cache be as after a prompt, and return the bytes that it stores; counted collects what each layer's tokens received."""
        prompt = seen.prompt
        self.cache.begin_step([prompt], [prompt], [0], self.cache.page_lists([self.pages]), [prompt])
        for number, (query, keys, values) in enumerate(seen.layers):
            layer = self.cache.find(number, 0)
            layer.append(keys, values, prompt)
            if not layer.roles.counts_attention:
                layer.queries = query[-layer.roles.observe_window :].float() if layer.roles.observe_window else None
                continue
            if number not in counted:
                layer.attend(query)
                counted[number] = [(store.mass, store.newest) for store in layer.heads]
            for store, known in zip(layer.heads, counted[number], strict=True):
                store.mass, store.newest = known
        self.cache.end_step()
        return self.cache.bytes_of(0, prompt)


@torch.inference_mode()
def ask(model: Model, target: Target, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Answer one sample after every policy's eviction: whether all tokens were the likeliest, their mean loss in nats, the stored bytes."""
    tokens, prompt = target.text.tokens, target.text.prompt
    seen = record(model.full, Given(tokens[:prompt], prompt))
    found, asked, counted = {}, tokens[prompt:-1], dict[int, list[tuple[Tensor, Tensor]]]()
    rows, right = tuple(range(target.answer - prompt - 1, len(asked))), torch.tensor(tokens[target.answer :])
    for name, run in runs.items():
        size = run.read(seen, counted)
        logits = run.stepper.run([StepRow(asked, prompt, 0, run.pages, rows, prompt)])
        logits = logits.float().cpu()
        loss = torch.nn.functional.cross_entropy(logits, right).item()
        found[name] = {"exact": int((logits.argmax(-1) == right).all()), "nll": round(loss, 5), "bytes": size}
        run.cache.release(0)
    return found


if __name__ == "__main__":
    main()

"""Stamps of needed pages: kernels against RaaS's own words."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.policies.cases import small
from tests.tiny import TinyModel
from trtkv.plugins.compaction import newest, stamps
from trtkv.policies.evict.raas import Raas

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
LAYERS, PAGES, SIZE, STORED, SEEN = 2, 16, 16, (97, 61), (300, 61)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("unit", "stacked", "window"), [(16, True, 1), (8, False, 3)])
def test_the_query_stamps_what_it_needs(unit: int, stacked: bool, window: int, device: str) -> None:
    pytest.importorskip("triton")
    made, (heads, group, dim) = torch.Generator().manual_seed(unit), (2, 3, 16) if device == "cpu" else (4, 7, 64)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    draw = lambda *shape: (torch.randn(*shape, generator=made) * 0.5).to(dtype)  # noqa: E731
    keys, rings = draw(LAYERS, PAGES, heads, SIZE, dim), draw(LAYERS, 3, window, heads * group, dim)
    stamp = torch.randint(1, 60, (LAYERS, PAGES, heads, SIZE), generator=made).float()
    table = torch.stack([torch.randperm(PAGES // 2, generator=made) + b * (PAGES // 2) for b in range(2)]).int()
    slots, lens, seen = (torch.tensor(one, dtype=torch.int32) for one in ((2, 0), STORED, SEEN))
    flat = lambda x, b: x[:, table[b].long()].transpose(1, 2).flatten(2, 3)[:, :, : STORED[b]].flatten(0, 1)  # noqa: E731
    views: list[Any] = []
    for b in range(2):
        asked = rings[:, slots[b].long(), (SEEN[b] - 1) % window].flatten(0, 1)[None].float()
        at = SimpleNamespace(seen=SEEN[b], stored=STORED[b], new=1)
        views.append(SimpleNamespace(at=at, keys=flat(keys, b).float(), queries=asked, state={"stamp": flat(stamp, b)}))
    weights = torch.cat([Raas(page=unit).weights(one).flatten() for one in views]).sort().values
    least = int((weights[1:] / weights[:-1])[len(weights) // 3 : -len(weights) // 3].argmax()) + len(weights) // 3
    assert weights[least + 1] / weights[least] > 1.001, "rounding does not decide"
    role = Raas(budget=112, page=unit, alpha=float(weights[least : least + 2].mean()))
    wanted = [role.observe(one)["stamp"] for one in views]
    there = {"keys": keys.to(device), "last_queries": rings.to(device), "stamp": stamp.to(device)}
    stacks: Any = SimpleNamespace(groups={name: [one] for name, one in there.items()})
    rule = stamps.Rule(unit, role.alpha, 112 // unit + 1)
    scratch = stamps.Scratch.of(stacks, 0, rule, heads * group, 3)
    queries = [one.queries[0].to(dtype).unflatten(0, (LAYERS, -1)).flatten(1) for one in views]
    own = torch.stack(queries, 1).to(device) if stacked else None
    step = newest.Step(own, table.to(device), lens.to(device), seen.to(device), slots.to(device), heads * group, 1.0)
    stamps.run(stacks, 0, rule, scratch, step)
    for b, expected in enumerate(wanted):
        assert torch.equal(flat(there["stamp"].cpu(), b), expected)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("alpha", "0.25", stamps.Rule(8, 0.25, 13)),
        ("pin_prompt", "true", None),  # a prompt of any length stays
        ("page", "12", None),
        ("page", "256", None),
    ],
)
def test_whose_stamps_kernels_write(field: str, value: str, rule: stamps.Rule | None, tiny_llama: TinyModel) -> None:
    policy = small("raas", 800 if value == "256" else 96).with_field(f"evict.{field}", value)
    assert stamps.rule_of(policy.plan(tiny_llama.config)) == rule
    assert stamps.rule_of(small("h2o").plan(tiny_llama.config)) is None

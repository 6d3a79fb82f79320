"""Tokens in full precision and encoded ones in pages of one pool: against the definition, and the attention kernel against fp64."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from pathlib import Path

import pytest
import torch

from tests.policies.cases import small
from tests.runtime.test_executor import REORDERED, worst
from tests.runtime.test_policies import generate, prompts
from tests.tiny import Rig, TinyModel, make_rig
from trtkv.footprint import Footprint

POLICIES = {"arkv": small("arkv").with_field("evict.slack_ratio", "0.95"), "arkv-quant": small("arkv-quant"), "half": small("arkv-quant").with_field("evict.share", "0.5")}
STEPS = 60


def kept(rig: Rig, layer: int, slot: int) -> list[tuple[list[int], list[bool]]]:
    """Return the logical positions that each KV head of a layer stores, and which of them are encoded."""
    session = rig.session
    if session.held is not None:
        return [(one.positions.tolist(), one.parts["keys"].coded.tolist()) for one in session.held.find(layer, slot).heads]
    pool, compactor = session.ragged, session.compactor
    assert pool is not None and compactor is not None
    account, b = compactor.ledger.find(slot), next(b for b, row in enumerate(pool.rows) if row.slot == slot)
    pool.stored[:, b] = account.stored
    view = compactor.view(layer, b, account)
    return list(zip(view.positions.tolist(), view.was_coded.tolist(), strict=True))


@pytest.mark.parametrize("chunk", [512, 37])
@pytest.mark.parametrize("name", POLICIES)
def test_pages_keep_what_the_definition_keeps(name: str, chunk: int, tiny_llama: TinyModel, tmp_path: Path) -> None:
    texts, policy, config = prompts(150, 61), POLICIES[name], tiny_llama.config
    paged, held = (make_rig(tiny_llama, policy, tmp_path, slots=2, by_definition=one) for one in (False, True))
    session = paged.session
    assert session.ragged is not None and session.compactor is not None and held.session.held is not None
    coded = []

    def check(step: int) -> None:
        stored = session.compactor.ledger.stored(0)
        assert policy.evict is not None
        for layer in range(config.num_layers):
            precise = session.compactor.ledger.find(0).precise
            expected = policy.evict.expected_tokens(150, step, precise[layer][0] if precise and policy.allocate else None)
            assert (stored[layer], stored[config.num_layers + layer]) == expected
        full, low = int(stored[: config.num_layers].sum()), int(stored[config.num_layers :].sum())
        assert session.bytes_of(0, 150 + step) == policy.evict.expected_bytes(full, low, config.num_kv_heads, config.head_dim, 4)
        coded.append(low)

    ours = generate(paged, texts, STEPS, chunk=chunk, after=check)
    theirs = generate(held, texts, STEPS, chunk=chunk)
    assert worst(ours.flatten(0, 1), theirs.flatten(0, 1).double()) <= 2 * REORDERED
    assert max(coded) > 0
    for layer in range(config.num_layers):
        for slot in range(2):
            assert kept(paged, layer, slot) == kept(held, layer, slot)


def test_a_prompt_that_goes_on_after_eviction(tiny_llama: TinyModel, tmp_path: Path) -> None:
    (text,) = prompts(300)
    paged, held = (make_rig(tiny_llama, POLICIES["half"], tmp_path, slots=1, by_definition=one) for one in (False, True))
    ours, theirs = (rig.feed(torch.tensor(text), chunks=[150, 40, 1, 1, 33, 70, 5]) for rig in (paged, held))
    assert worst(ours, theirs.double()) <= 2 * REORDERED
    for layer in range(tiny_llama.config.num_layers):
        assert kept(paged, layer, 0) == kept(held, layer, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_planned_bytes_are_those_of_the_pages(name: str, tiny_llama: TinyModel, tmp_path: Path) -> None:
    policy = POLICIES[name]
    rig = make_rig(tiny_llama, policy, tmp_path, slots=1)
    generate(rig, prompts(150), 0)
    planned = Footprint(tiny_llama.config, policy)
    assert rig.session.bytes_of(0, 150) == planned.stored_bytes(150)
    assert rig.session.reserved_bytes() == planned.reserved_bytes(150)
    pool = rig.session.ragged
    assert pool is not None
    own = [x for part, x in pool.pools.items() if "codes" not in part]  # codes lie in the bytes of keys and values
    assert sum(x.nbytes for x in own) == pool.num_pages * rig.plan.group_page_bytes(0)

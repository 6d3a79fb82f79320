"""LagKV joined with KIVI by kernels: whole sessions against the definition, codes bit for bit, attention's source, engines, and bytes against the plan."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.plugins.test_encoded import Torch, model
from tests.tiny import Rig, TinyModel, make_rig, make_tiny
from trtkv.errors import EngineError
from trtkv.plugins.encoded import reference
from trtkv.plugins.held.layer import LayerCache
from trtkv.policies.packing import unpack
from trtkv.runtime.step import StepRow

KIVI = ("quantize.group=16", "quantize.residual=16")
SETTLED = {
    "lagkv+kivi": (*KIVI, "evict.lag=16", "evict.sink=4"),
    "localkv+kivi": ("quantize.group=16", "quantize.residual=32", "quantize.bits=4", "evict.lag=8", "evict.sink=20"),  # values wait for newer ones
    "knorm+kivi": (*KIVI, "evict.lag=16", "evict.sink=0", "evict.ratio=0.25", "evict.skip_layers=[0]"),  # the first layer keeps everything
}
PROMPTS = (70, 33, 2)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("llama", tmp_path_factory.mktemp("wide") / "model", head_dim=64, num_hidden_layers=2)


def steps_of(decoded: int) -> list[list[tuple[int, int, int]]]:
    """Return steps of (slot, seen, new): the first prompt in uneven chunks, the last while others decode, then all decode so many tokens."""
    found = [[(0, 0, 20)], [(0, 20, 41)], [(0, 61, 9), (1, 0, 33)], [(0, 70, 1), (1, 33, 1)], [(0, 71, 1), (2, 0, 2)]]
    return found + [[(0, 72 + i, 1), (1, 34 + i, 1), (2, 2 + i, 1)] for i in range(decoded)]


def run(rig: Rig, texts: Tensor, decoded: int, after: Any = None) -> tuple[Tensor, list[int]]:
    """Feed fixed tokens: logits, and the bytes stored behind each step."""
    logits, sizes = [], []
    for step in steps_of(decoded):
        rows = [
            StepRow(texts[slot, seen : seen + new].tolist(), seen, slot, rig.pages(slot), (new - 1,) if seen + new >= PROMPTS[slot] else (),
                    PROMPTS[slot])
            for slot, seen, new in step
        ]  # fmt: skip
        logits.append(rig.stepper.run(rows))
        sizes.append(rig.session.stored_bytes())
        if after is not None:
            after()
    return torch.cat([x for x in logits if len(x)]), sizes


def pair(wide: TinyModel, policy: str, folder: Path, patch: pytest.MonkeyPatch, dtype: str | None = None) -> tuple[Rig, Rig, Torch]:
    """Return the definition and a session by kernels, whose attention is torch's."""
    held = make_rig(wide, policy, folder, sets=SETTLED[policy], slots=3, dtype=dtype)
    fake = Torch(patch)
    paged = make_rig(wide, policy, folder, sets=SETTLED[policy], slots=3, dtype=dtype)
    assert held.session.held is not None and paged.session.encoded is not None and paged.session.held is None
    return held, paged, fake


@pytest.mark.parametrize("policy", SETTLED)
def test_a_session_stores_and_answers_like_the_definition(wide: TinyModel, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, paged, fake = pair(wide, policy, tmp_path, monkeypatch)
    texts = torch.randint(1, 250, (3, 150), generator=torch.Generator().manual_seed(0))
    answers = [run(rig, texts, 60) for rig in (held, paged)]
    assert fake.attended
    torch.testing.assert_close(answers[1][0], answers[0][0], rtol=1e-3, atol=1e-3 * float(answers[0][0].abs().max()))
    assert answers[1][1] == answers[0][1]
    store, session = paged.session.encoded, paged.session
    assert store is not None and store.settler is not None and not any(store._prompts.values())
    for slot in range(3):
        for layer in range(2):
            check_layer(paged, held.session.held.find(layer, slot), layer, slot)  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="token by token"):
        paged.stepper.run([StepRow([1, 2], 132, 0, paged.pages(0), (1,))])
    for slot in range(3):
        session.release(slot)
    assert not store._prompts and not store._runs and store.stored_bytes(0, 0) == 0


def check_layer(paged: Rig, cache: LayerCache, layer: int, slot: int) -> None:
    """Compare lengths, counts, codes and what is in full precision with the definition's, behind a step."""
    store, group = paged.session.encoded, paged.plan.page_groups[layer]
    assert store is not None and store.settler is not None
    account, pages = store.settler.ledger.find(slot), store.pages[layer]
    stored, ends = account.stored[group], account.encoded[group]
    assert cache.lengths == (stored,) * paged.plan.num_kv_heads and cache.encoded == ends and cache.settled == account.settled[group]
    assert store.ends[group, slot].tolist() == list(ends)
    table = torch.tensor(paged.pages(slot), dtype=torch.int32)
    for part, seen in zip(("keys", "values"), reference.visible(pages, table, slot, stored), strict=True):
        want = torch.stack([one.parts[part].decoded() for one in cache.heads])
        torch.testing.assert_close(seen, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))

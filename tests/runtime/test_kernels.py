"""Engines whose ops run as kernels, their decode steps captured: the same answers as the torch forms, within the dtype's own error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.test_policies import generate, prompts
from tests.tiny import Rig, TinyModel, make_rig, make_tiny
from trtkv.plugins import support
from trtkv.plugins.roles import load_role
from trtkv.plugins.selection import choose, pool
from trtkv.runtime.step import StepRow

pytestmark = pytest.mark.gpu
POLICIES = {
    "full": (),
    "fier": ("retrieve.budget=64",),
    "fier+mean": ("retrieve.budget=64", "retrieve.pooling=mean"),
    "quest": ("retrieve.budget=64",),
    "freekv": ("retrieve.budget=96", "retrieve.sink=16", "retrieve.window=16", "retrieve.page=16"),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model whose heads are as wide as the kernels take them, with grouped queries and QK-norm."""
    shape = {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 640}
    return make_tiny("qwen3", tmp_path_factory.mktemp("wide") / "model", **shape)


def rig(model: TinyModel, policy: str, directory: Path, dtype: str, slots: int = 3) -> Rig:
    return make_rig(model, policy.partition("+")[0], directory, sets=POLICIES[policy], slots=slots, dtype=dtype, device="cuda")


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_answer_as_well_as_the_torch_forms(policy: str, dtype: str, wide: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts(150, 61, 33)
    forced = [torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(slot)).tolist() for slot in range(3)]
    kernels = rig(wide, policy, tmp_path, dtype)
    assert kernels.executor.capturable
    found = feed(kernels, texts, forced)
    assert torch.equal(found, feed(rig(wide, policy, tmp_path, dtype), texts, forced))
    monkeypatch.setattr(support, "gpu_ready", lambda device: "switched off")
    torch_form = feed(rig(wide, policy, tmp_path, dtype), texts, forced)
    exact = feed(rig(wide, policy, tmp_path, "float32"), texts, forced)
    assert error(found, exact) <= 2 * error(torch_form, exact)


def feed(rig: Rig, texts: list[list[int]], forced: list[list[int]]) -> torch.Tensor:
    """Prefill in chunks of 50, then feed given tokens together: logits [steps, B, V]. Sequences join one after the other, so batch sizes vary."""
    out = []
    for slot, text in enumerate(texts):
        for start in range(0, len(text), 50):
            rig.stepper.run([StepRow(text[start : start + 50], start, slot, rig.pages(slot), (), len(text))])
    pages = [rig.pages(slot) for slot in range(len(texts))]
    for step in range(len(forced[0])):
        members = range(len(texts)) if step % 10 < 7 else range(1, len(texts))
        rows = [StepRow(forced[slot][step : step + 1], len(texts[slot]) + step, slot, pages[slot], (0,), len(texts[slot])) for slot in members]
        logits = torch.zeros(len(texts), 262, device="cuda")
        logits[list(members)] = rig.stepper.run(rows)
        if len(members) < len(texts):
            rig.stepper.run([StepRow(forced[0][step : step + 1], len(texts[0]) + step, 0, pages[0], (), len(texts[0]))])
        out.append(logits)
    return torch.stack(out)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slot_used_again_answers_as_a_fresh_one(policy: str, wide: TinyModel, tmp_path: Path) -> None:
    first, second = prompts(150, 61)
    used = rig(wide, policy, tmp_path, "bfloat16", slots=1)
    generate(used, [first], 12)
    assert torch.equal(generate(used, [second], 12), generate(rig(wide, policy, tmp_path, "bfloat16", slots=1), [second], 12))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_joins_a_step_in_which_others_decode(policy: str, wide: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, forced = prompts(150, 61), list(range(60, 90))

    def mixed(one: Rig) -> torch.Tensor:
        for start in range(0, 150, 50):
            one.stepper.run([StepRow(texts[0][start : start + 50], start, 0, one.pages(0), (), 150)])
        out = []
        for step, token in enumerate(forced):
            rows = [StepRow([token], 150 + step, 0, one.pages(0), (0,), 150)]
            if 3 <= step < 10:
                chunk = texts[1][(step - 3) * 9 : (step - 2) * 9]
                rows.append(StepRow(chunk, (step - 3) * 9, 1, one.pages(1), (), 61))
            out.append(one.stepper.run(rows)[0])
        return torch.stack(out)

    found = mixed(rig(wide, policy, tmp_path, "bfloat16"))
    monkeypatch.setattr(support, "gpu_ready", lambda device: "switched off")
    torch_form, exact = (mixed(rig(wide, policy, tmp_path, dtype)) for dtype in ("bfloat16", "float32"))
    assert error(found, exact) <= 2 * error(torch_form, exact)


def test_a_short_sequence_is_read_whole_where_that_is_faster(wide: TinyModel, tmp_path: Path) -> None:
    texts = prompts(150)
    full, fier = rig(wide, "full", tmp_path, "bfloat16"), rig(wide, "fier", tmp_path, "bfloat16")
    fier.session.dense_below = 200
    assert torch.equal(generate(full, texts, 12), generate(fier, texts, 12))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "full"])
def test_kernels_choose_the_best_of_their_own_cache(policy: str, dtype: str, wide: TinyModel, tmp_path: Path) -> None:
    (text,) = prompts(400)
    one = rig(wide, policy, tmp_path, dtype, slots=1)
    one.stepper.run([StepRow(text[:256], 0, 0, one.pages(0), (), 399)])
    one.stepper.run([StepRow(text[256:399], 256, 0, one.pages(0), (), 399)])
    one.executor.taps = taps = {}
    one.stepper.run([StepRow(text[399:], 399, 0, one.pages(0), (0,), 399)])
    calls = [node for node in one.executor._nodes if node.kind == "KvSelect"]
    assert calls
    for node in calls:
        layer, config = node.attributes["call"].layer, node.attributes["call"].config
        plan, keys = one.session.plan.select[layer], one.session.buffer("keys", layer)
        role, chosen = load_role(plan.meaning), taps[node.output][0]
        stored = keys[one.pages(0)].transpose(0, 1).flatten(1, 2)[:, : 400 // plan.group * plan.group]
        scores = role.score(taps[node.inputs[0]][0].double().unflatten(0, (config.num_q_heads, -1)), role.summarize(stored.double())).double()
        pooled = pool(scores, config.num_kv_heads, config.scale, plan.pooling)
        # A score between a kernel and the next is as wide as the model: what that alone moves, twice, may change places.
        slack = 2 * (pool(scores.to(keys.dtype).double(), config.num_kv_heads, config.scale, plan.pooling) - pooled).abs().amax(1)
        exact = choose(plan, pooled, 400)
        assert chosen[:, -1].tolist() == [exact.shape[1]] * len(exact)
        for head, units in enumerate(chosen[:, : exact.shape[1]].long()):
            assert bool((units[1:] > units[:-1]).all())
            taken, lacking = _without(units, exact[head]), _without(exact[head], units)
            assert bool((taken < pooled.shape[1]).all()) and len(taken) == len(lacking)
            assert bool((pooled[head, taken] >= pooled[head, lacking].max() - slack[head]).all()) if len(taken) else True


def _without(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[~torch.isin(a, b)]

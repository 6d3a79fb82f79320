"""From a request to cells: budgets, settings, keys, and what is refused before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import TinyModel
from trtkv.errors import ConfigError, TrtkvError
from trtkv.eval.budgets import apply_budget, budget_tokens, has_budget
from trtkv.eval.grid import Request, expand
from trtkv.eval.subjects import weights_identity
from trtkv.policies.evict.lagkv import LagKV
from trtkv.policies.registry import parse_policy
from trtkv.presets import policy_presets


@pytest.fixture
def request_for(tiny_llama: TinyModel) -> Request:
    return Request(model=str(tiny_llama.path), policies=("fier", "streaming"), budgets=("64", "25%"), lengths=(400, 512), samples=2)


def test_every_policy_at_every_budget_and_full_once(request_for: Request) -> None:
    grid = expand(replace(request_for, tasks=("passkey", "needle")))
    rows = [(cell.subject.policy.name, cell.subject.budget, cell.length, cell.task.name) for cell in grid.cells]
    expected = [
        (policy, budget, length, task)
        for length in (400, 512)
        for policy, budget in [("full", None), ("fier", 64), ("fier", length // 4), ("streaming", 64), ("streaming", length // 4)]
        for task in ("passkey", "needle")
    ]
    assert rows == expected
    assert len({cell.key for cell in grid.cells}) == len(rows)


def test_what_is_requested_twice_runs_once(request_for: Request) -> None:
    once = expand(request_for).cells
    doubled = replace(request_for, policies=("fier", "streaming", "full", "fier"), budgets=("64", "64", "25%"), lengths=(400, 512, 400))
    assert {cell.key for cell in expand(doubled).cells} == {cell.key for cell in once}
    # Half of 128 and 64 are one cell, whatever was typed.
    assert len(expand(replace(request_for, lengths=(256,), budgets=("64", "25%"))).cells) == 3
    assert all(cell.subject.policy.roles for cell in expand(replace(request_for, reference=False)).cells)


def test_everything_that_matters_is_in_the_key(request_for: Request, tmp_path: Path) -> None:
    base = replace(request_for, policies=("fier",), budgets=("64",), lengths=(400,), reference=False)
    changes = {
        "samples": 3,
        "seed": 1,
        "lengths": (401,),
        "budgets": ("65",),
        "policies": ("quest",),
        "tasks": ("needle",),
        "sets": ("retrieve.sink=4",),
        "dtype": "float16",
        "scoring": "blind",
    }
    keys = [expand(base).cells[0].key] + [expand(replace(base, **{name: value})).cells[0].key for name, value in changes.items()]
    assert len(set(keys)) == len(keys)
    assert expand(base).cells[0].key == keys[0]
    whole = expand(base).cells[0]
    assert len({one.key for one in (whole, replace(whole, pick=(0,)), replace(whole, pick=(1,)))}) == 3 and "pick" not in whole.about


def test_weights_are_distinguished(tmp_path: Path) -> None:
    for name, content in (("a", b"x" * 5000), ("b", b"x" * 2500 + b"y" + b"x" * 2499), ("c", b"x" * 5001), ("d", b"x" * 5000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    identities = [weights_identity(tmp_path / name) for name in "abcd"]
    assert len(set(identities)) == 3 and identities[0] == identities[3]


def test_settings_go_to_the_policies_that_have_the_role(request_for: Request) -> None:
    both = expand(replace(request_for, policies=("fier", "quest", "streaming"), sets=("retrieve.sink=4", "quest:retrieve.window=8"))).cells
    sets = {cell.subject.policy.name: cell.subject.sets for cell in both}
    assert sets == {"full": (), "fier": ("retrieve.sink=4",), "quest": ("retrieve.sink=4", "retrieve.window=8"), "streaming": ()}
    fier = next(cell.subject.policy for cell in both if cell.subject.policy.name == "fier")
    assert fier.retrieve is not None and fier.retrieve.sink == 4


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sets": ("quantize.bits=2",)}, "none has the role quantize"),
        ({"sets": ("retreive.sink=2",)}, "unknown policy field 'retreive.sink'.*retrieve.sink"),
        ({"sets": ("retrieve.snk=2",)}, "unknown policy field 'retrieve.snk'.*retrieve.sink"),
        ({"sets": ("retrieve.sink",)}, "has no value"),
        ({"sets": ("quest:retrieve.sink=2",)}, "unknown policy in --set 'quest'"),
        ({"budgets": ("11x",)}, "budget '11x' is not understood"),
        ({"budgets": ("0",)}, "budget '0'"),
        ({"budgets": ("120%",)}, "budget '120%'"),
        ({"budgets": ("1.5",)}, "budget '1.5'"),
        ({"budgets": ("20",)}, "budget 20 of 'fier' is below.*--budget"),
        ({"policies": ("fire",)}, "unknown policy 'fire'.*fier"),
        ({"policies": ("full",)}, "a budget means nothing to full"),
        ({"tasks": ("pass key",)}, "unknown task 'pass key'.*passkey"),
        ({"lengths": (513,)}, "length 513 is beyond the model's 512 positions"),
        ({"lengths": (0,)}, "length 0 is not above 0"),
        ({"samples": 0}, "samples 0 is not above 0"),
        ({"model": None}, "engine directories or --model"),
        ({"engines": (Path("x"),)}, "engine directories or --model"),
        ({"engines": (Path("x"),), "model": None}, "--policy means nothing to an engine"),
        ({"model": "smollm9"}, "unknown model 'smollm9'"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"weights": "nowhere"}, "'nowhere' holds no safetensors"),
        ({"data": ("needle=x",)}, "--data names the task 'needle'"),
        ({"data": ("x.jsonl",)}, "the task 'passkey' reads no file"),
        ({"tasks": ("perplexity", "needle"), "data": ("needle=x",)}, "the task 'needle' reads no file"),
        ({"tasks": ("ruler-qa-1",)}, "--data ruler-qa-1=FILE"),
        ({"tasks": ("ruler-qa-1",), "data": ("nowhere.json",)}, "'nowhere.json' of task 'ruler-qa-1' does not exist"),
    ],
    ids=str,
)
def test_wrong_requests(change: dict[str, object], expected: str, request_for: Request) -> None:
    with pytest.raises(TrtkvError, match=expected):
        expand(replace(request_for, **change))


def test_misfits_can_be_left_out(request_for: Request) -> None:
    grid = expand(replace(request_for, budgets=("20", "64")), keep_going=True)
    assert [str(one)[:24] for one in grid.misfits] == ["budget 20 of 'fier' is b"] * 2
    assert {cell.subject.budget for cell in grid.cells if cell.subject.policy.name == "streaming"} == {20, 64}
    assert {cell.subject.budget for cell in grid.cells if cell.subject.policy.name == "fier"} == {64}


@pytest.mark.parametrize(
    ("text", "length", "expected"), [("256", 1000, 256), ("11%", 2048, 225), ("0.01%", 100, 1), (" 50 % ", 9, 4), ("2.5%", 1000, 25)]
)
def test_budgets_in_tokens_and_shares(text: str, length: int, expected: int) -> None:
    assert budget_tokens(text, length) == expected


@pytest.mark.parametrize("name", list(policy_presets()))
def test_every_preset_with_a_budget_takes_one(name: str) -> None:
    """A quarter of 2,048 tokens: every policy takes it, or says what it lacks."""
    policy = parse_policy(name)
    if not has_budget(policy):
        assert policy.roles.keys() <= {"quantize", "prefill"}
        return
    fitted = apply_budget(policy, 512, 2048)
    if isinstance(fitted.evict, LagKV):
        assert 512 - 30 < fitted.evict.expected_length(2048) <= 512
    else:
        assert 512 in [getattr(role, "budget", None) for role in fitted.roles.values()]


@given(st.integers(40, 2000), st.integers(256, 4096))
def test_lagkv_keeps_what_the_budget_holds(budget: int, length: int) -> None:
    try:
        role = apply_budget(parse_policy("lagkv"), budget, length).evict
    except ConfigError as error:
        assert f"cannot keep {budget} of {length}" in str(error)
        return
    assert isinstance(role, LagKV)
    stored = role.expected_length(length)
    if budget >= length:
        assert stored == length
    else:
        partitions = (length - role.sink) // role.lag - 1
        # One more token of each scored partition would be too many, unless all but one already stay.
        assert stored <= budget and (stored + partitions > budget or role.kept_per_lag == role.lag - 1)

"""The race between candidates: what few samples may claim, and whether a search finds what measuring everything would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trtkv.checkpoint.find import Source
from trtkv.config import ModelConfig
from trtkv.engine.predict import predict
from trtkv.eval.subjects import Subject
from trtkv.policies.policy import Policy
from trtkv.policies.registry import parse_policy
from trtkv.presets import model_presets
from trtkv.tune.candidates import Candidate, Cost, cost_of
from trtkv.tune.estimate import Estimate, Losses, estimate, worst
from trtkv.tune.race import Goal, choose, frontier, race, rounds, survivors

MODEL = ModelConfig.from_hf(model_presets()["qwen2.5-7b"])
TOKENS = 128  # that a window of a text scores


def made(name: str, cache: int, read: int = 0, memory: int = 0) -> Candidate:
    """A candidate of a name and a cost alone."""
    subject = Subject(Source(name, Path(name), MODEL, None), Policy(name=name), None, (), {"weights": name, "plan": "", "engine": ""})
    return Candidate(subject, Cost(cache, memory or cache, read or cache, 0.0))


def drawn(quality: float, samples: int, rng: random.Random) -> Losses:
    """The losses of windows of a text whose tokens differ with a probability, which differs from window to window."""
    found = Losses(trials=TOKENS)
    for _ in range(samples):
        wrong = min(1.0, max(0.0, rng.gauss(1 - quality, 0.15 * (1 - quality))))
        loss = sum(rng.random() < wrong for _ in range(TOKENS)) / TOKENS
        found += Losses(1, loss, loss * loss, TOKENS)
    return found


@pytest.mark.parametrize("quality", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("samples", [1, 2, 4, 16])
def test_intervals_hold_the_truth(quality: float, samples: int) -> None:
    rng = random.Random(f"{quality} {samples}")
    found = [estimate(drawn(quality, samples, rng)) for _ in range(300)]
    assert sum(one.low <= quality <= one.high for one in found) >= 0.84 * len(found)


def test_few_samples_without_a_loss_prove_little() -> None:
    few, many = estimate(Losses.of([0.0] * 2)), estimate(Losses.of([0.0] * 60))
    assert few.value == many.value == 1.0 and few.low < 0.8 < 0.96 < many.low < 1
    assert few.reaches(0.99) < many.reaches(0.95)
    assert worst([few, estimate(Losses.of([1.0, 0.0]))]).value == 0.5


def test_losses_of_several_rounds_add_up() -> None:
    values = [0.0, 0.25, 1.0, 0.5, 0.0, -1.0]
    assert estimate(Losses.of(values[:2]) + Losses.of(values[2:])) == estimate(Losses.of(values))


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 32, 60])
def test_rounds_take_every_sample_once(samples: int) -> None:
    plan = rounds(samples)
    assert sum(plan) == samples and plan[0] <= 2 and all(0 < new <= sum(plan[:index]) for index, new in enumerate(plan) if index)


def test_what_is_cheap_and_good_comes_first() -> None:
    goal = Goal(floor=0.9)
    bad, good, dear = made("bad", 10), made("good", 20), made("dear", 90)
    found = {bad.subject.key: Estimate(0.5, 0.02, 4), good.subject.key: Estimate(0.95, 0.02, 4), dear.subject.key: Estimate(1.0, 0.02, 4)}
    assert survivors(goal, [dear, bad, good], found) == [good, dear] and choose(goal, [dear, bad, good], found) is good
    assert survivors(Goal(floor=0.8), [dear, bad, good], found) == [good], "which is surely enough"
    assert survivors(Goal(), [bad, good, dear], found) == [good, dear] and survivors(Goal(floor=1.2), [bad, good, dear], found) == [dear]
    assert choose(Goal(), [bad, good, dear], found) is dear
    assert choose(Goal(floor=1.01), [bad, good, dear], found) is None
    assert frontier(goal, [bad, good, dear, made("beaten", 95)], {**found, made("beaten", 95).subject.key: Estimate(0.4, 0.1, 1)}) == [
        bad,
        good,
        dear,
    ]


def test_limits_decide_who_runs() -> None:
    full, small, quick = made("full", 100, 100, 200), made("small", 30, 90, 130), made("quick", 105, 20, 205)
    assert Goal(floor=0.9).worth(full, [small, quick]) == [small]
    assert Goal(floor=0.9, least="reads").worth(full, [small, quick]) == [quick, small][::-1]
    assert Goal(memory_bytes=150).worth(full, [small, quick]) == [small]
    assert Goal(memory_bytes=300).worth(full, [small, quick]) == [], "full fits, and nothing answers better"
    assert Goal(milliseconds=0.05, bytes_per_s=1e6).worth(full, [small, quick]) == [quick]


def test_a_search_finds_what_the_whole_grid_finds() -> None:
    """Forty candidates, the dearer the better but for noise: the same choice, or one as good, from a seventh of the samples."""
    goal, samples, agreed, cells, worlds = Goal(floor=0.95), 32, 0, 0, 40
    for seed in range(worlds):
        rng = random.Random(seed)
        field = [made(f"c{index}", 10 * index + 10) for index in range(40)]
        truth = {one.subject.key: min(1.0, 0.6 + 0.012 * index + rng.gauss(0, 0.02)) for index, one in enumerate(field)}
        losses = {key: [drawn(quality, 1, rng) for _ in range(samples)] for key, quality in truth.items()}
        whole = {key: estimate(sum(every, Losses())) for key, every in losses.items()}
        found = dict[str, Estimate]()

        def measure(left: Sequence[Candidate], done: int, new: int, losses: dict[str, list[Losses]] = losses) -> dict[str, list[Losses]]:
            nonlocal cells
            cells += new * len(left)
            return {one.subject.key: [sum(losses[one.subject.key][done : done + new], Losses())] for one in left}

        left = race(goal, field, samples, measure, found)
        mine, theirs = choose(goal, left, found), choose(goal, field, whole)
        assert theirs is not None
        near = mine is not None and mine.cost.cache_bytes <= 1.1 * theirs.cost.cache_bytes and truth[mine.subject.key] >= 0.94
        agreed += near
    assert agreed >= 0.95 * worlds and cells <= worlds * len(field) * samples / 7


@pytest.mark.parametrize("name", ["full", "fp8", "kivi", "fier", "quest+fp8", "snapkv"])
def test_costs_are_those_of_the_plan(name: str) -> None:
    context, batch = 8192, 4
    policy = parse_policy(name)
    cost, found = cost_of(MODEL, policy, context, batch), predict(MODEL, policy, context, batch)
    assert cost.cache_bytes == found["reserved_bytes"] and cost.memory_bytes == found["weight_bytes"] + found["peak_bytes"]
    embedding = 2 * MODEL.vocab_size * MODEL.hidden_size
    kv = cost.read_bytes - (found["weight_bytes"] - embedding)
    if policy.retrieve is None:
        assert kv == found["stored_bytes"]
    else:
        whole = batch * 2 * 2 * MODEL.num_kv_heads * MODEL.head_dim * MODEL.num_layers
        assert kv < 0.4 * found["stored_bytes"] and kv >= found["tokens_read_per_step"] * whole / (2.1 if "fp8" in name else 1)
    gemma = ModelConfig.from_hf(model_presets()["gemma3-270m"])
    small = cost_of(gemma, policy, context, batch)
    assert 0 < small.read_bytes - predict(gemma, policy, context, batch)["weight_bytes"] <= predict(gemma, policy, context, batch)["stored_bytes"]
    assert replace(cost, read_bytes=10**9).milliseconds(1e12) == pytest.approx(1.0)

"""Scores that are listed: where they are, rows that launches leave alone, and the launches in turn through the op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plugins import cuda_on_cpu

pytest.importorskip("triton")

from tests.gpu import check_retrieval as checks
from tests.plugins.launches_in_torch import Launches
from tests.plugins.test_wired import Twins, model, run
from trtkv.config import Limits
from trtkv.plugins.kernels import kernels_for
from trtkv.plugins.kv_attend import cuda as attend_cuda
from trtkv.plugins.kv_attend import op as attend_op
from trtkv.plugins.kv_select import cuda as select_cuda
from trtkv.plugins.kv_select import launch, launch_listed
from trtkv.plugins.kv_select import op as select_op
from trtkv.plugins.own import Own, least_budget
from trtkv.policies.registry import parse_policy

SCHEDULE = [{0: 160}, {0: 1}, {0: 1, 1: 134}, {0: 1, 1: 1}, {1: 1}]
PROMPTS = {0: 160, 1: 134}
needs_cpu = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))


def test_lists_have_the_memory_of_the_scores() -> None:
    plan = launch_listed.Listed.plan
    many = plan(64, 4, 128, "softmax-mean", 131072, 132, "90", 2048)
    assert many is not None and many.parts * many.rows > 132
    for one in (many, plan(32, 7, 128, "softmax-max", 131072, 132, "90", 2048), plan(40, 5, 64, "softmax-mean", 140000, 132, "100")):
        assert one is not None and one.capacity % 32 == 0
        region, packet = one.heads * one.stride * 2 // (one.parts * 8) // 128 * 128, 16 * ((one.heads + 1) // 2)
        assert one.capacity * (packet + 4) <= region
        assert one.parts * 8 * region <= one.heads * one.stride * 2
        assert one.parts * 8 * one.capacity >= 0.18 * one.stride
    counts, failed = many.allocate("cpu")
    assert counts.shape == (64, many.parts, 8) and failed.shape == (64,)


def test_what_is_better_stored_is_not_listed() -> None:
    plan = launch_listed.Listed.plan
    assert plan(64, 4, 128, "softmax-mean", 131072, 132, "89") is None, "it has no clusters"
    assert plan(64, 1, 128, "softmax-mean", 131072, 132, "90") is None, "raw scores are ranked"
    assert plan(64, 4, 128, "mean", 131072, 132, "90") is None and plan(64, 4, 128, "none", 131072, 132, "90") is None
    assert plan(64, 4, 128, "softmax-mean", 2048, 132, "90") is None, "a warp has few packets"
    assert plan(64, 4, 128, "softmax-mean", 16384, 132, "90", 2048) is None, "most would be listed"


@needs_cpu
def test_launches_leave_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEV", "cpu")
    loaded = cuda_on_cpu.install(monkeypatch, tmp_path)
    case = checks.Case(2, 2, 32, 32, [417, 97, 300], torch.float16)
    index, rows = (case.q, case.bits, case.meta, case.table, case.lens), 6
    plan = launch.Scratch.plan(rows, 2, "softmax-mean", case.table.shape[1] * 32, 8)
    only = torch.tensor([0, 1, 1, 0, 3, 0], dtype=torch.int32)
    found = []
    for asked in (None, only, torch.zeros_like(only)):
        scores, parts = (one.fill_(-7) for one in plan.allocate(rows, "cpu"))
        out = torch.full((3, 2, 81), -7, dtype=torch.int32)
        launch.fier_score(*index, scores, parts, page_size=32, budget=80, scale=0.2, pooling="softmax-mean", only=asked)
        common = {"budget": 80, "sink": 4, "window": 16, "unit": 1, "group": 32, "pooling": "softmax-mean"}
        launch.select_units(scores, parts, case.lens, out, only=asked, cluster=2, **common)
        found.append([one.flatten(0, -3) if one is out else one for one in (scores, parts, out.view(rows, 1, -1))])
    for every, some, none in zip(*found, strict=True):
        assert torch.equal(some[only > 0], every[only > 0]) and bool((some[only == 0] == -7).all()) and bool((none == -7).all())
    assert {spec.entry for spec in loaded} == {"fier_score", "select_units"}


@pytest.mark.parametrize("fails", [False, True], ids=["lists decide", "rows are scored again"])
@pytest.mark.parametrize("pooling", ["softmax-mean", "softmax-max"])
def test_the_launches_in_turn_choose_as_the_torch_forms(pooling: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_listed, "_LEAST_CAPACITY", 0)
    monkeypatch.setattr(launch_listed, "_LEAST_UNITS_A_CHOICE", 0)
    launches = Launches(monkeypatch)
    launches.fails = fails
    sets = ("retrieve.budget=64", "retrieve.dense_layers=1", f"retrieve.pooling={pooling}")
    twins, compared = Twins(parse_policy("fier", sets=sets).plan(model()), model()), 0
    for session in (twins.plain, twins.wired):
        session.own.set(1, Own(max(50, least_budget(twins.select))))
    for new in SCHEDULE:
        inputs = twins.begin(new, PROMPTS)
        found = run(twins, (select_cuda.select, attend_cuda.attend), twins.wired, inputs)
        expected = run(twins, (select_op.select, attend_op.attend), twins.plain, inputs)
        for b, row in enumerate(twins.plain.step(1).rows):
            if row.decodes:
                compared += 1
                assert torch.equal(found[0][b], expected[0][b])
    in_turn = ["fier_list", "choose_listed", "fier_score", "select_units"]
    assert compared == 5 and [name for name in launches.names if name in in_turn] == in_turn * 4


@pytest.mark.parametrize(
    ("sm", "length", "pooling", "listed"),
    [
        ("90", 131072, "softmax-mean", True),
        ("120", 131072, "softmax-max", True),
        ("89", 131072, "softmax-mean", False),
        ("90", 8192, "softmax-mean", False),
        ("90", 131072, "mean", False),
    ],
)
def test_engines_bring_what_lists_and_what_stores(sm: str, length: int, pooling: str, listed: bool) -> None:
    sets = ("retrieve.budget=2048", "retrieve.dense_layers=1", f"retrieve.pooling={pooling}")
    plan, limits = parse_policy("fier", sets=sets).plan(model()), Limits(max_seq_len=length, max_batch_size=20, max_chunk_tokens=256)
    found = {spec.entry for spec in kernels_for(plan, model(), limits, sm)}
    assert {"fier_score", "select_units"} <= found
    assert ({"fier_list", "choose_listed"} <= found) == listed == bool({"fier_list", "choose_listed"} & found)

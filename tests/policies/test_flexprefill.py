"""What FlexPrefill alone guarantees, from the algorithms of its paper."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.policies.cases import tensors
from trtkv import lines
from trtkv.policies.prefill.flexprefill import FlexPrefill
from trtkv.ranking import attention
from trtkv.rules import Lines

BLOCK, SCALE = 16, 0.25


def make(**fields: object) -> FlexPrefill:
    return FlexPrefill(**{"block": BLOCK, "gamma": 0.7, "tau": 0.0, "min_budget": 1, "dense_below": 0, "dense_last": 0, **fields})


def along(received: Tensor, rows: range) -> Tensor:
    """Add up received [Hq, Bw, Bk] by how many blocks lie between a row and its columns."""
    found = torch.zeros(len(received), received.shape[2], dtype=received.dtype)
    for place, row in enumerate(rows):
        for column in range(row + 1):
            found[:, row - column] += received[:, place, column]
    return found


@given(new=st.integers(1, 60), before=st.integers(0, 70))
@examples(12)
def test_the_newest_queries_pay_one_in_all(new: int, before: int) -> None:
    q, k, _ = tensors(new + before, 4, 2, 16, seed=new)
    found = make().received(q[before:], k.transpose(0, 1), SCALE)
    count = min(new, BLOCK)
    mask = torch.ones(count, new + before, dtype=torch.bool).tril(new + before - count)
    weights = attention(q[-count:].double(), k.transpose(0, 1).double(), SCALE, mask)
    first = (new + before - count) // BLOCK
    exact = torch.zeros(found.shape, dtype=torch.float64)
    for place in range(count):
        for token in range(new + before):
            exact[:, (new + before - count + place) // BLOCK - first, token // BLOCK] += weights[:, place, token] / count
    assert torch.allclose(found.double(), exact, atol=1e-6) and torch.allclose(found.sum((1, 2)), torch.ones(4))


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("gamma", [0.3, 0.7, 0.95])
def test_as_few_lines_as_hold_the_share(gamma: float, before: int) -> None:
    q, k, _ = tensors(200 + before, 4, 2, 16)
    received = make().received(2 * q, k.transpose(0, 1), SCALE)
    found = lines.find_pattern(Lines(BLOCK, gamma, 0.0, 1), received, received.sum(1))
    rows = range(received.shape[2] - received.shape[1], received.shape[2])
    for chosen, sums in ((found.columns, received.sum(1)), (found.diagonals, along(received, rows))):
        held, least = (sums * chosen).sum(1), sums[:, 1:].masked_fill(~chosen[:, 1:], torch.inf).amin(1)
        assert bool(chosen[:, 0].all()) and bool((held >= gamma - 1e-6).all())
        assert bool(((held - least < gamma + 1e-6) | (chosen.sum(1) == 1)).all()), "one less would do"
        assert bool((sums[:, 1:].masked_fill(chosen[:, 1:], 0).amax(1) <= least + 1e-6).all()), "a better line was left out"


def test_heads_read_lines_their_first_block_and_themselves() -> None:
    q, k, _ = tensors(203, 4, 2, 16)
    role = make()
    received = role.received(2 * q, k.transpose(0, 1), SCALE)
    pattern, chosen = lines.find_pattern(role.rule(), received, received.sum(1)), role.blocks(2 * q, k.transpose(0, 1), SCALE)
    for head in range(4):
        for row in range(13):
            expected = {0, row} | {column for column in range(row) if pattern.columns[head, column] or pattern.diagonals[head, row - column]}
            assert set(chosen[head, row].nonzero().flatten().tolist()) == expected
    assert 0.2 < float(chosen.float().mean()) < 0.5, "everything or nothing is read"


@pytest.mark.parametrize("start", [0, 87])
def test_a_head_that_averages_predict_reads_what_they_say(start: int) -> None:
    q, k, _ = tensors(203, 4, 2, 16)
    chosen, first = make(tau=1.0).blocks(4 * q[start:], k.transpose(0, 1), SCALE), start // BLOCK
    means = torch.stack([k[row * BLOCK : (row + 1) * BLOCK].mean(0) for row in range(13)], 1).repeat_interleave(2, 0)
    for row in range(first, 13):
        query = 4 * q[max(start, row * BLOCK) : (row + 1) * BLOCK].mean(0)
        weights = (torch.einsum("hd,hbd->hb", query, means)[:, : row + 1] * SCALE).softmax(1)
        read = chosen[:, row - first, : row + 1]
        assert not bool(chosen[:, row - first, row + 1 :].any()) and bool(read[:, 0].all()) and bool(read[:, row].all())
        free = read[:, 1:row]
        held, least = (weights * read).sum(1), weights[:, 1:row].masked_fill(~free, torch.inf)
        assert bool((held >= 0.7 - 1e-6).all())
        if row > 1:
            assert bool(((held - least.amin(1) < 0.7 + 1e-6) | ~free.any(1)).all()), "one less would do"
    assert float(chosen.float().mean()) < 0.6, "everything is read"


def test_patterns_that_were_planted_are_found() -> None:
    """One head looks at one token, one five blocks back, one alike at all tokens of blocks that it likes."""
    count, turns = 13 * BLOCK, torch.tensor([1 / 3.1, 1 / 11.0, 1 / 41.0, 1 / 149.0])
    token = torch.arange(count)[:, None]
    angle = turns * token
    q, k = torch.zeros(count, 3, 8), torch.zeros(count, 3, 8)
    k[67, 0], q[:, 0] = 1.0, 12.0
    behind = turns * (token + 5 * BLOCK)
    q[:, 1], k[:, 1] = 12 * torch.cat([angle.cos(), angle.sin()], 1), torch.cat([behind.cos(), behind.sin()], 1)
    k[:, 2, 0], q[:, 2, 0] = (token[:, 0] // BLOCK % 4 == 1).float(), 12.0
    received = make().received(q, k.transpose(0, 1), 1.0)
    pattern = make(tau=0.1).pattern(received, q, k.transpose(0, 1), 1.0)
    assert pattern.by_averages.tolist() == [False, False, True]
    chosen = make(tau=0.1).blocks(q, k.transpose(0, 1), 1.0)
    assert pattern.columns[0].nonzero().flatten().tolist() == [0, 4] and bool(chosen[0, 4:, 4].all())
    assert bool(pattern.diagonals[1, 5]) and bool(chosen[1].diagonal(-5).all()) and not bool(chosen[1, 11:, 1:4].any())
    assert bool(chosen[2, 9:, [1, 5, 9]].all()) and int(chosen[2, 12].sum()) == 5


def test_a_least_budget_of_lines_is_read() -> None:
    q, k, _ = tensors(203, 4, 2, 16)
    for tau in (0.0, 1.0):
        role = make(tau=tau, gamma=0.01, min_budget=3 * BLOCK - 5)
        received = role.received(q, k.transpose(0, 1), SCALE)
        pattern = lines.find_pattern(role.rule(), received, received.sum(1))
        assert pattern.columns.sum(1).tolist() == pattern.diagonals.sum(1).tolist() == [3] * 4
    everything = make(min_budget=203).blocks(q, k.transpose(0, 1), SCALE)
    assert bool(everything.eq(torch.ones(13, 13, dtype=torch.bool).tril()).all())


def test_distance_of_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]), torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]])
    assert torch.allclose(lines.distance_of(p, q), torch.tensor([math.sqrt(math.log(2)), 0.0]))
    middle = [0.5 * (0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)), 0.5 * (0.1 * math.log(0.1 / 0.5) + 0.9 * math.log(0.9 / 0.5))]
    assert float(lines.distance_of(torch.tensor([0.9, 0.1]), torch.tensor([0.1, 0.9]))) == pytest.approx(math.sqrt(sum(middle)))


@given(start=st.integers(0, 40), count=st.integers(1, 60))
@examples(20)
def test_averages_of_blocks(start: int, count: int) -> None:
    x = torch.randn(2, count, 4, generator=torch.Generator().manual_seed(count)).half()
    edges = [start, *range((start // BLOCK + 1) * BLOCK, start + count, BLOCK), start + count]
    exact = torch.stack([x[:, a - start : b - start].double().mean(1) for a, b in itertools.pairwise(edges)], 1)
    assert torch.allclose(lines.block_means(x, BLOCK, start).double(), exact, rtol=1e-5, atol=1e-6)

"""Lists of packets as a scorer leaves them, made in torch of random scores, and what is to be chosen among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtkv.plugins.kv_select import fier_layout
from trtkv.plugins.kv_select.launch_listed import SCORER_WARPS, Regions

NONE = -3e38


@dataclass
class Lists:
    """What `choose_listed` reads; halves [R, H, stride] are the scores that were listed, references the parts' [R, H, stride]."""

    scores: Tensor
    parts: Tensor
    counts: Tensor
    lens: Tensor
    halves: Tensor
    references: Tensor
    pooling: str

    def pooled(self) -> Tensor:
        """Pool in fp64: [R, stride]."""
        zero = torch.logsumexp(self.parts[..., 1].double() * 0.6931471805599453, 1) / 0.6931471805599453
        one = torch.exp2(self.halves.double() + self.references.double() - zero[..., None]).nan_to_num(0.0)
        return one.amax(1) if self.pooling == "softmax-max" else one.mean(1)


def make(
    raw: Tensor, lens: Tensor, num_parts: int, reach: list[int], *, pooling: str = "softmax-mean", spread: float = 4.0, crowd: bool = False
) -> Lists:  # fmt: skip
    """List packets of raw [R, H, stride] fp32 log2 scores, lens [B], of which about reach[r] units reach the parts' bounds; 0: all are listed.

    Pairs of groups are dealt to parts in turn. spread: deviation of the parts' references. crowd: all packets of a part lie in its first list.
    """
    rows, heads, stride = raw.shape
    device, stored = raw.device, lens.repeat_interleave(rows // len(lens)).long()
    unit = torch.arange(stride, device=device)
    part = unit // 64 % num_parts
    usable = unit < (stored // 32 * 32)[:, None]  # [R, stride]
    reference = (torch.randn(rows, num_parts, heads, device=device) * spread).round()
    references = reference[:, part].transpose(1, 2)
    halves = (raw - references).half()
    exact = (halves.float() + references).masked_fill(~usable[:, None], float("-inf"))
    parts = torch.zeros(rows, num_parts, heads, 4, device=device)
    parts[..., 0] = reference
    for p in range(num_parts):
        total = torch.logsumexp(exact[:, :, part == p].double() * 0.6931471805599453, 2) / 0.6931471805599453
        parts[:, p, :, 1] = total.clamp(min=NONE).nan_to_num(NONE).float()
    zero = torch.logsumexp(parts[..., 1].double() * 0.6931471805599453, 1) / 0.6931471805599453
    shares = torch.exp2(exact.double() - zero[..., None])
    shares = shares.amax(1) if pooling == "softmax-max" else shares.sum(1)
    order = shares.sort(1, descending=True).values
    theta = torch.stack([order[r, min(n, stride) - 1] for r, n in enumerate(reach)]).log2()
    parts[..., 2] = (theta[:, None, None] + zero[:, None] + torch.randn(rows, num_parts, heads, device=device) * 0.01).float()
    for r, n in enumerate(reach):
        if n == 0:
            parts[r, :, :, 2] = NONE
    left = torch.exp2(exact - parts[:, part, :, 2].transpose(1, 2))
    near = (left.amax(1) if pooling == "softmax-max" else left.sum(1)) >= 0.985
    lists = Lists(torch.full((rows, heads, stride), float("nan"), dtype=torch.float16, device=device), parts,
                  torch.zeros(rows, num_parts, SCORER_WARPS, dtype=torch.int32, device=device), lens, halves, references, pooling)  # fmt: skip
    packet = (near & usable).unflatten(1, (-1, 4)).any(2)
    for r in range(rows):
        _write(lists, r, packet[r].nonzero()[:, 0] * 4, num_parts, crowd)
    return lists


def _write(lists: Lists, row: int, units: Tensor, num_parts: int, crowd: bool) -> None:
    """Write a row's packets, in any order, to any of their parts' warps."""
    heads, stride = lists.scores.shape[1:]
    regions, pairs = Regions.of(heads, stride, num_parts), (heads + 1) // 2
    units = units[torch.randperm(len(units), device=units.device)]
    turn = torch.zeros_like(units) if crowd else torch.randint(SCORER_WARPS, units.shape, device=units.device)
    region, order = (units // 64 % num_parts * SCORER_WARPS + turn).sort(stable=True)
    units, count = units[order], torch.bincount(region, minlength=num_parts * SCORER_WARPS)
    place = torch.arange(len(units), device=units.device) - (count.cumsum(0) - count)[region]
    lists.counts[row] = count.view(num_parts, SCORER_WARPS).int()
    fits = place < regions.capacity
    units, place, region = units[fits], place[fits], region[fits]
    memory = lists.scores[row].view(-1)
    values = torch.full((len(units), 2 * pairs, 4), float("nan"), dtype=torch.float16, device=units.device)
    values[:, :heads] = lists.halves[row].unflatten(1, (-1, 4))[:, units // 4].transpose(0, 1)
    at = region * (regions.bytes // 2) + place * 8 * pairs
    memory[at[:, None] + torch.arange(8 * pairs, device=units.device)] = values.flatten(1)
    memory.view(torch.int32)[region * (regions.bytes // 4) + regions.capacity * pairs * 4 + place] = units.int()


def wrong(lists: Lists, out: Tensor, row: int, width: int, sink: int, window: int) -> str | None:
    """Say what is wrong with a list of chosen tokens [K + 1], among groups of 32, None where it is exact but for rounding in fp32."""
    stored = int(lists.lens[row // (lists.scores.shape[0] // len(lists.lens))])
    first, last = sink, max(sink, min(stored // 32 * 32, stored - window))
    taken = torch.zeros(stored, dtype=torch.bool, device=out.device)
    if int(out[-1]) != width or bool((out[width:-1] != -1).any()):
        return f"{int(out[-1])} of {width} units"
    if not bool((out[1:width] > out[: width - 1]).all()) or int(out[0]) < 0 or int(out[width - 1]) >= stored:
        return "order"
    taken[out[:width].long()] = True
    if not bool(taken[:first].all() and taken[last:].all()):
        return "forced units"
    value, inside = lists.pooled()[row, first:last], taken[first:last]
    return None if bool(value[inside].min() >= value[~inside].max() * (1 - 2e-5)) else f"scores {value[inside].min()} {value[~inside].max()}"


def stand_in(
    q: Tensor, bits: Tensor, meta: Tensor, table: Tensor, lens: Tensor, scores: Tensor, parts: Tensor, counts: Tensor, *,
    budget: int, room: int, scale: float, pooling: str, **unused: Any,
) -> None:  # fmt: skip
    """Do in torch what the launch of a scorer that lists does: four times as many units as are chosen reach the bound, and short rows list all."""
    heads, dim = bits.shape[1], bits.shape[-1]
    raw = torch.zeros(scores.shape, device=q.device)
    for b, stored in enumerate(lens.tolist()):
        groups = stored // 32
        words, bounds = (x[table[b].long()].transpose(0, 1).flatten(1, 2)[:, :groups] for x in (bits, meta))
        keys = fier_layout.unpack(words, bounds).double().flatten(1, 2)
        found = q[b].view(heads, -1, dim).double() @ keys.transpose(1, 2) * (scale / 0.6931471805599453)
        raw[b * heads : (b + 1) * heads, :, : groups * 32] = found.float()
    reach = [0 if stored < 12 * room else 4 * room for stored in lens.tolist() for _ in range(heads)]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # every launch lists alike
        made = make(raw, lens, parts.shape[1], reach, pooling=pooling)
    made.counts[lens.repeat_interleave(heads) <= budget] = 0
    for to, one in ((scores, made.scores), (parts, made.parts), (counts, made.counts)):
        to.copy_(one)

"""Launching scores and choice for many rows: a launch that keeps its scores and lists what may be chosen, and one that ranks the lists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Long, Pointer
from trtkv.plugins._device.spec import shared_limit
from trtkv.plugins.kv_select import launch_fused
from trtkv.plugins.kv_select.launch import POOLS, OwnBudgets, arch, stream
from trtkv.plugins.support import Summary, shares_selection

_HERE = Path(__file__).parent
_STREAM = (Pointer,) * 13 + (Int, Int, Int, Long) + (Int,) * 8 + (Float,)
_RANK = (Pointer,) * 8 + (Long,) + (Int,) * 6
_LOG2_E = 1.4426950408889634
_ARCHS = ("90", "100", "103")  # compute capabilities whose blocks have the shared memory for it
SCORERS, CHOOSERS = 16, 8  # warps
_REGISTERS = 96, 48  # of their threads: together what 24 warps of 80 are launched with
_FORMS = ((3, 4), (2, 4))  # score buffers, and groups of a warp in flight: as many as shared memory has room for
_MOST_TEAM, _MOST_LINES, _MOST_PACKETS = 64, 64, 512  # blocks, rows of a team, packets of eight units of a block, as in stream_choose.cuh
MOST_SMS = 160  # multiprocessors of a device that are used
_WORTHWHILE, _HEADS = 1 << 21, 5  # as measured on an H200: units of all rows, and heads, at least


@dataclass(frozen=True, slots=True)
class Stream:
    """Teams of blocks that share rows: units of a row (stride), of a block and eight (room), score buffers, groups in a warp's ring (stages)."""

    rows: int
    teams: int
    blocks: int
    heads: int
    stride: int
    room: int
    buffers: int
    stages: int

    @staticmethod
    def plan(rows: int, group_heads: int, dim: int, pooling: str, units: int, sms: int, arch: str) -> Stream | None:
        """Lay out R rows of at most `units` tokens for a GPU; None where scores are not of every head, or its multiprocessors do not hold them."""
        if POOLS[pooling] or group_heads == 1 or arch not in _ARCHS:
            return None
        groups, sms, found = -(-units // 32), min(sms, MOST_SMS), []
        for teams in range(1, min(sms, rows) + 1):
            blocks, lines = sms // teams, -(-rows // teams)
            share = -(-groups // blocks)
            if blocks <= _MOST_TEAM and lines <= _MOST_LINES and share * 4 <= _MOST_PACKETS:
                found.append((lines * share, teams))
        for _, teams in sorted(found):
            made = Stream._with_teams(rows, group_heads, dim, groups, teams, sms // teams, arch)
            if made is not None:
                return made
        return None

    @staticmethod
    def _with_teams(rows: int, heads: int, dim: int, groups: int, teams: int, blocks: int, arch: str) -> Stream | None:
        room = -(-groups // blocks // 2) * 64 + 8
        for buffers, stages in _FORMS:
            made = Stream(rows, teams, blocks, heads, groups * 32, room, buffers, stages)
            if made.shared(dim) + static(dim) <= shared_limit(arch):
                return made
        return None

    def shared(self, dim: int) -> int:
        """Return the bytes of shared memory that a launch asks for."""
        return SCORERS * self.stages * 8 * dim + (self.buffers * self.heads + 4) * self.room * 2

    def allocate(self, device: torch.device | str) -> Lists:
        """Allocate what the two launches hand to each other."""
        words = (self.heads + 1) * self.blocks
        mail, stamps = torch.zeros(self.rows, words, 4, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        units = torch.empty(self.rows, self.stride, 2, dtype=torch.int32, device=device)
        return Lists(mail, stamps, units, torch.zeros(self.rows, dtype=torch.int32, device=device), torch.empty(self.rows, device=device))


@dataclass(frozen=True, slots=True)
class Lists:
    """What blocks tell each other (mail, and the launch's stamp), and every row's list: scores and units, their count and lowest score."""

    mail: Tensor
    stamps: Tensor
    units: Tensor
    counts: Tensor
    bounds: Tensor


def static(dim: int) -> int:
    """Return the most shared memory of a block beside what its launch asks for: two queries, twice, and the rest."""
    return 64 * dim + 32 * (dim + 8) + 7 * 1024


def plan_for(plan: SelectPlan, summary: Summary, batch: int, heads: int, group: int, dim: int, units: int, sms: int, arch: str) -> Stream | None:
    """Say how a layer's selection of tokens runs this way for B sequences of at most `units` units, None where it does not."""
    if summary.scorer != "fier" or shares_selection(plan) or plan.pooling == "none" or batch * heads * units < _WORTHWHILE:
        return None
    if group < _HEADS or launch_fused.plan_for(plan, summary, batch, heads, group, dim, units, sms, arch) is not None:
        return None
    return Stream.plan(batch * heads, group, dim, plan.pooling, units, sms, arch)


def plans_on_any(plan: SelectPlan, summary: Summary, batch: int, heads: int, group: int, dim: int, units: int, arch: str) -> list[Stream]:
    """List a plan for every kernel that GPUs of a compute capability may launch, whose multiprocessors are not counted when kernels are built."""
    found = {}
    for sms in range(1, MOST_SMS + 1):
        streamed = plan_for(plan, summary, batch, heads, group, dim, units, sms, arch)
        if streamed is not None:
            found[streamed.buffers, streamed.stages] = streamed
    return list(found.values())


def fier_select(
    q: Tensor, bits: Tensor, meta: Tensor, table: Tensor, lens: Tensor, out: Tensor, lists: Lists, plan: Stream, *,
    page_size: int, budget: int, scale: float, pooling: str, sink: int, window: int, own: OwnBudgets | None = None, overlap: bool = False,
    pooled: Tensor | None = None,
) -> None:  # fmt: skip
    """Score and choose: arguments as of `launch.fier_score` and `launch.select_units`, lists as the plan allocates them.

    pooled [R, stride] fp32 is given for checks: all pooled scores, -1 where a unit is no candidate.
    """
    heads, dim = bits.shape[1], bits.shape[-1]
    rows, most = plan.rows, out.shape[2] - 1
    assert rows == heads * lens.shape[0], f"a plan for {plan.rows} rows"
    slots, budgets, below = (0, 0, 0) if own is None else (own.slots.data_ptr(), own.budgets.data_ptr(), own.dense_below)
    handed = (lists.units.data_ptr(), lists.counts.data_ptr(), lists.bounds.data_ptr())
    kernel = stream_kernel(dim, plan.heads, pooling, plan, q.dtype == torch.bfloat16, arch())
    values = (q.data_ptr(), bits.data_ptr(), meta.data_ptr(), table.data_ptr(), lens.data_ptr(), slots, budgets, lists.mail.data_ptr(),
              lists.stamps.data_ptr(), *handed, 0 if pooled is None else pooled.data_ptr(), q.stride(0), table.stride(0), page_size // 32,
              plan.stride, rows, heads, budget, below, most, sink, window, plan.room, scale * _LOG2_E)  # fmt: skip
    threads = 32 * (SCORERS + CHOOSERS)
    kernel.launch((plan.blocks, plan.teams, 1), threads, plan.shared(dim), stream(), values, overlap=overlap, cooperative=True)
    ranked = (lists.stamps.data_ptr(), lens.data_ptr(), out.data_ptr(), slots, budgets)
    values = (*handed, *ranked, plan.stride, heads, budget, below, most, sink, window)
    rank_kernel(arch()).launch((rows, 1, 1), 1024, plan.stride // 8, stream(), values, overlap=overlap)


def stream_kernel(dim: int, group: int, pooling: str, plan: Stream, bf16: bool, arch: str) -> Kernel:
    """Load the kernel of scores and lists for a shape."""
    shape = {"D": dim, "GROUP_HEADS": group, "POOL": 0, "MAXIMUM": int(pooling == "softmax-max"), "STAGES": plan.stages, "BUFFERS": plan.buffers,
             "SCORER_REGISTERS": _REGISTERS[0], "CHOOSER_REGISTERS": _REGISTERS[1]}  # fmt: skip
    defines = (*(f"-D{name}={value}" for name, value in shape.items()), *(("-DBF16",) if bf16 else ()))
    shared = shared_limit(arch) - static(dim)
    return nvrtc.load(_HERE / "fier_stream.cu", "fier_stream", _STREAM, defines, arch, shared, specific=arch == "90")


def rank_kernel(arch: str) -> Kernel:
    """Load the kernel that ranks lists."""
    return nvrtc.load(_HERE / "rank_lists.cu", "rank_lists", _RANK, (), arch, shared_limit(arch) - 18 * 1024)

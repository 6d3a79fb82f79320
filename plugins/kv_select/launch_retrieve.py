"""Launching scores, choice and attention together, for few rows: one cooperative grid, a block a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Long, Pointer
from trtkv.plugins._device.spec import shared_limit
from trtkv.plugins.kv_select.launch import POOLS, OwnBudgets, arch, stream
from trtkv.plugins.kv_select.launch_fused import LOG2_E, MOST_SMS, Fused, plan_for
from trtkv.plugins.kv_select.launch_pages import KINDS
from trtkv.plugins.support import Summary

_HERE = Path(__file__).parent
_FIER = (Pointer,) * 16 + (Int,) * 5 + (Long,) + (Int,) * 8 + (Float,)
_PAGES = (Pointer,) * 17 + (Int,) * 5 + (Long,) + (Int,) * 8 + (Float,)
MOST_DIM, MOST_GROUP_HEADS = 128, 8  # what the registers of a thread hold beside a choice
HELD = (2, 1)  # tiles of a warp in flight: as many as shared memory has room for
_TILE = 16  # tokens
_STATIC = 28 * 1024  # shared memory of a block beside what its launch asks for
_MAIL_WORDS, _CROWD = 43 + 11 * 11, 512  # as in mail.cuh: words of sixteen bytes of a block beside one a head, and of a row


@dataclass(frozen=True, slots=True)
class Retrieval:
    """One launch that scores, chooses and attends: its choice's plan, tiles of a warp in flight, and how shared memory is laid out, in bytes."""

    fused: Fused
    held: int
    exact_bytes: int
    scores_at: int
    shared: int
    row_words: int

    @staticmethod
    def of(fused: Fused, group: int, dim: int, *, chunk: int, arch: str) -> Retrieval | None:
        """Add attention of G query heads to a plan of a choice whose blocks take `chunk` units in turn; None where it does not fit."""
        if dim > MOST_DIM or group > MOST_GROUP_HEADS:
            return None
        room, blocks = fused.room, fused.blocks
        outputs = -(-group * dim // 3)
        words = -(-outputs // blocks)  # of a block's share of the outputs
        ring = fused.warps * fused.stages * 8 * dim
        start, exact = _whole(room // chunk * 4), _whole(max(room * 4, blocks * (12 * words + 4 * group)))
        scores_at = start + max(ring, exact)
        tiles_at = start + exact + _whole(room * 2)
        laid = fused.warps * 8 * (dim + 4) * 4
        for held in HELD:
            tiles = max(fused.warps * held * 4 * _TILE * dim, laid)
            shared = max(scores_at + fused.heads * (room + 8) * 2, tiles_at + tiles)
            if shared + _STATIC <= shared_limit(arch):
                row = blocks * (fused.heads + _MAIL_WORDS) + _CROWD + blocks * blocks * words + blocks * group
                return Retrieval(fused, held, exact, scores_at, shared, row)
        return None

    def allocate(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Allocate what blocks tell each other, int32, and the rows' stamps [R] int32, all zero."""
        rows = self.fused.rows
        return torch.zeros(rows, self.row_words, 4, dtype=torch.int32, device=device), torch.zeros(rows, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Record:
    """What a launch leaves for readers of lists and for checks.

    marks [R, S] uint8, zero before, 1 where a unit is read of a sequence that is not read whole; ranked [R, S] int32, the bits of pooled scores in an
    order that unsigned comparison keeps; scores [R, heads, S] fp16 and parts [R, blocks, heads, 4] fp32 as the scorer's. Only marks may come alone.
    """

    marks: Tensor
    ranked: Tensor | None = None
    scores: Tensor | None = None
    parts: Tensor | None = None


def plan_retrieval(
    plan: SelectPlan, summary: Summary, batch: int, heads: int, group: int, dim: int, units: int, sms: int, arch: str
) -> Retrieval | None:  # fmt: skip
    """Say how a layer's selection and attention run in one launch for B sequences of at most `units` units, None where they take more."""
    fused = plan_for(plan, summary, batch, heads, group, dim, units, sms, arch)
    return None if fused is None else Retrieval.of(fused, group, dim, chunk=32 if summary.scorer == "fier" else 1, arch=arch)


def retrievals_on_any(plan: SelectPlan, summary: Summary, batch: int, heads: int, group: int, dim: int, units: int, arch: str) -> list[Retrieval]:
    """List a plan for every kernel that GPUs of a compute capability may launch, whose multiprocessors are not counted when kernels are built."""
    found = {}
    for sms in range(2 * batch * heads, MOST_SMS + 1):
        one = plan_retrieval(plan, summary, batch, heads, group, dim, units, sms, arch)
        if one is not None:
            found[one.fused.warps, one.fused.stages, one.held] = one
    return list(found.values())


def fier_retrieve(
    q: Tensor, bits: Tensor, meta: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, out: Tensor, mail: Tensor, stamps: Tensor,
    plan: Retrieval, *, width: int, budget: int, scale: float, pooling: str, sink: int, window: int, own: OwnBudgets | None = None,
    overlap: bool = False, record: Record | None = None,
) -> None:  # fmt: skip
    """Score, choose up to `width` tokens and attend to them: q, out [B, Hq D], keys, values [P, Hk, N, D], the rest as of `fier_select`."""
    heads, dim = bits.shape[1], bits.shape[-1]
    kernel = fier_kernel(dim, q.shape[1] // dim // heads, pooling, plan, q.dtype == torch.bfloat16, arch())
    given = (q, bits, meta, keys, values, table, lens, out)
    _launch(kernel, given, mail, stamps, plan, (width, budget, sink, window, scale), own, overlap, record)


def page_retrieve(
    q: Tensor, vectors: Tensor, beside: Tensor | None, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, out: Tensor, mail: Tensor,
    stamps: Tensor, plan: Retrieval, *, kind: str, unit: int, width: int, budget: int, scale: float, pooling: str, sink: int, window: int,
    own: OwnBudgets | None = None, cut: Tensor | None = None, overlap: bool = False, record: Record | None = None,
) -> None:  # fmt: skip
    """Score, choose up to `width` pages of `unit` tokens and attend to them: arguments as of `page_select` and `fier_retrieve`."""
    heads, per_page, dim = vectors.shape[1], vectors.shape[2], vectors.shape[-1]
    bf16, forced = q.dtype == torch.bfloat16, cut is not None
    kernel = page_kernel(kind, dim, q.shape[1] // dim // heads, pooling, plan, per_page, unit, bf16, arch(), forced=forced)
    given = (q, vectors, beside, cut, keys, values, table, lens, out)
    _launch(kernel, given, mail, stamps, plan, (width, budget, sink, window, scale), own, overlap, record)


def _launch(
    kernel: Kernel, given: tuple[Tensor | None, ...], mail: Tensor, stamps: Tensor, plan: Retrieval, asked: tuple[int, int, int, int, float],
    own: OwnBudgets | None, overlap: bool, record: Record | None,
) -> None:  # fmt: skip
    keys, _, table, lens, out = given[-5:]
    q = given[0]
    assert q is not None and keys is not None and table is not None and lens is not None and out is not None
    width, budget, sink, window, scale = asked
    slots, budgets, below = (None, None, 0) if own is None else (own.slots, own.budgets, own.dense_below)
    left = (None,) * 4 if record is None else (record.marks, record.ranked, record.scores, record.parts)
    pointers = (0 if one is None else one.data_ptr() for one in (*given, slots, budgets, mail, stamps, *left))
    sizes = (q.stride(0), out.stride(0), table.stride(0), keys.shape[2], plan.row_words, 0 if record is None else record.marks.shape[1])
    values = (*pointers, *sizes, budget, below, width, sink, window, plan.fused.room, plan.exact_bytes, plan.scores_at, scale * LOG2_E)
    grid = (plan.fused.blocks, keys.shape[1], lens.shape[0])
    kernel.launch(grid, 32 * plan.fused.warps, plan.shared, stream(), values, overlap=overlap, cooperative=True)


def fier_kernel(dim: int, group: int, pooling: str, plan: Retrieval, bf16: bool, arch: str) -> Kernel:
    """Load the kernel of one-bit keys for a shape."""
    defines = (*_defines(dim, group, pooling, plan), f"-DSTAGES={plan.fused.stages}", *(("-DBF16",) if bf16 else ()))
    return nvrtc.load(_HERE / "fier_retrieve.cu", "fier_retrieve", _FIER, defines, arch, shared_limit(arch) - _STATIC)


def page_kernel(
    kind: str, dim: int, group: int, pooling: str, plan: Retrieval, per_page: int, unit: int, bf16: bool, arch: str, *, forced: bool
) -> Kernel:  # fmt: skip
    """Load the kernel of pages for a shape."""
    flags = [*(["-DFORCED"] if forced else []), *(["-DBF16"] if bf16 else [])]
    defines = (*_defines(dim, group, pooling, plan), f"-DKIND={KINDS[kind]}", f"-DPER_PAGE={per_page}", f"-DUNIT={unit}", *flags)
    return nvrtc.load(_HERE / "page_retrieve.cu", "page_retrieve", _PAGES, defines, arch, shared_limit(arch) - _STATIC)


def _defines(dim: int, group: int, pooling: str, plan: Retrieval) -> tuple[str, ...]:
    pool = POOLS[pooling] if group > 1 else 0
    shape = {"D": dim, "GROUP_HEADS": group, "POOL": pool, "HEADS": 1 if pool else group, "MAXIMUM": int(pooling == "softmax-max" and group > 1),
             "WARPS": plan.fused.warps, "HELD": plan.held}  # fmt: skip
    return tuple(f"-D{name}={value}" for name, value in shape.items())


def _whole(size: int) -> int:
    return -(-size // 128) * 128

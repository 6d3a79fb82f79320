"""Launching block-sparse attention of a prompt's chunk: estimate, choose, attend; in Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from plugins.attend.block_sparse.in_torch import dense_from
from plugins.device import kernel
from plugins.device.driver import arch
from plugins.device.kernel import LOG2_E, Constants, TritonKernel, typed
from plugins.device.spec import Spec, shared_limit
from trtkv.plan import PrefillPlan
from trtkv.rules import Antidiagonal

SOURCE = Path(__file__).parent / "kernel.py"
ESTIMATE = TritonKernel(
    SOURCE, "estimate_kernel",
    {
        **typed("*real", "query", "keys"), "parts": "*fp32", **typed("i32", "new", "stored", "query_row", "key_head", "rows", "blocks"),
        "scale2": "fp32",
    },
    aligned=("query", "keys", "query_row", "key_head"), warps=8,
)  # fmt: skip
CHOOSE = TritonKernel(
    SOURCE, "choose_kernel",
    {"parts": "*fp32", "chosen": "*i32", **typed("i32", "new", "stored", "blocks", "dense_below", "dense_from"), **typed("fp32", "tau", "most")},
)  # fmt: skip
ATTEND = TritonKernel(
    SOURCE, "attend_kernel",
    {
        **typed("*real", "query", "keys", "values"), "chosen": "*i32", "out": "*real",
        **typed("i32", "new", "stored", "query_row", "key_head", "value_head", "blocks"), "scale2": "fp32",
    },
    aligned=("query", "keys", "values", "out", "query_row", "key_head", "value_head"), warps=8,
)  # fmt: skip
WARP_GROUPS = "90"  # the compute capability with asynchronous products of warp groups
BLOCKS, STRIDES = (64, 128), (4, 8, 16, 32)  # that kernels take
WIDTHS = (256, 1024, 4096, 16384)  # blocks among which one program chooses


class Form(NamedTuple):
    """How a kernel runs: its tiles (of rows and columns, or of keys alone), tiles on their way, warps of a block."""

    rows: int
    columns: int
    stages: int
    warps: int


def why_torch(plan: PrefillPlan, stored: int = 0) -> str | None:
    """Say in a sentence why no kernel chooses among so many tokens of heads that other kernels take, None where they do."""
    rule = plan.rule
    if not isinstance(rule, Antidiagonal):
        return f"no kernel chooses as '{plan.meaning.role.rpartition(':')[2]}' does"
    for name, size, taken in (("blocks", rule.block, BLOCKS), ("strides", rule.stride, STRIDES)):
        if size not in taken:
            return f"{name} hold {size} tokens, and the kernels take {', '.join(map(str, taken))}"
    most = WIDTHS[-1] * rule.block
    return f"{stored} tokens are stored, and the kernels take {most}" if stored > most else None


def attend(plan: PrefillPlan, query: Tensor, keys: Tensor, values: Tensor, scale: float, left: int) -> Tensor:
    """Attend query [n, Hq, D], the newest n of S tokens, to blocks of keys and values [Hk, S, D] that kernels choose: [n, Hq, D].

    So many tokens of the prompt are left after these.
    """
    return attend_chosen(query, keys, values, choose(plan, query, keys, scale, left), plan.block, scale)


def choose(plan: PrefillPlan, query: Tensor, keys: Tensor, scale: float, left: int) -> Tensor:
    """Choose what every block of queries reads: [Hq, Bq, Bk + 1] int32, ascending blocks of keys, and how many there are at the end."""
    rule = plan.rule
    assert isinstance(rule, Antidiagonal), "the plan states no rule that kernels know"
    parts = estimate(rule, query, keys, scale)
    heads, rows, blocks = parts.shape
    tiles = rule.block // rule.stride
    chosen = torch.empty(heads, rows // tiles, blocks + 1, dtype=torch.int32, device=query.device)
    dense = plan.dense_below, dense_from(plan.dense_last, keys.shape[1], left)
    numbers = (len(query), keys.shape[1], blocks, *dense, rule.tau, rule.most)
    width = next(one for one in WIDTHS if one >= blocks)
    kernel.run(CHOOSE, (rows // tiles, heads, 1), (parts, chosen, *numbers), choose_constants(rule, width), warps=choose_warps(width))
    return chosen


def estimate(rule: Antidiagonal, query: Tensor, keys: Tensor, scale: float, form: Form | None = None) -> Tensor:
    """Estimate how rows of `stride` queries see blocks of keys: [Hq, Bq block / stride, Bk] fp32, base-2 log-sum-exps; see `kernel.py`."""
    count, heads, dim = query.shape
    stored, tiles = keys.shape[1], rule.block // rule.stride
    _check(query, keys)
    blocks = -(-stored // rule.block)
    rows = (blocks - (stored - count) // rule.block) * tiles
    form = form or estimate_form(_arch(query))
    parts = torch.empty(heads, rows, blocks, dtype=torch.float32, device=query.device)
    grid = (-(-rows // form.rows) * (heads // len(keys)), -(-blocks * tiles // form.columns), len(keys))
    numbers = (count, stored, query.stride(0), keys.stride(0), rows, blocks, scale * LOG2_E / rule.stride)
    constants = estimate_constants(rule, heads // len(keys), dim, form)
    kernel.run(ESTIMATE, grid, (query, keys, parts, *numbers), constants, warps=form.warps)
    return parts


def attend_chosen(query: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, block: int, scale: float, form: Form | None = None) -> Tensor:
    """Attend query [n, Hq, D] to chosen [Hq, Bq, Bk + 1] blocks of keys and values [Hk, S, D], see `choose`: [n, Hq, D]."""
    count, heads, dim = query.shape
    _check(query, keys, values)
    form = form or attend_form(dim, block, _arch(query))
    out = query.new_empty(query.shape)
    strides = (query.stride(0), keys.stride(0), values.stride(0), chosen.shape[2] - 1)
    values_given = (query, keys, values, chosen, out, count, keys.shape[1], *strides, scale * LOG2_E)
    constants = attend_constants(heads // len(keys), dim, block, form)
    kernel.run(ATTEND, (chosen.shape[1], heads, 1), values_given, constants, warps=form.warps)
    return out


def kernels(plan: PrefillPlan, group: int, dim: int, longest: int, dtype: str, arch: str) -> Iterator[Spec]:
    """Yield the kernels for sequences of up to so many tokens, of a dtype by Triton's name."""
    rule = plan.rule
    if not isinstance(rule, Antidiagonal) or why_torch(plan, longest) is not None:
        return
    form = estimate_form(arch)
    yield ESTIMATE.variant(arch, estimate_constants(rule, group, dim, form), dtype, warps=form.warps)
    blocks = -(-longest // rule.block)
    for index, width in enumerate(WIDTHS):
        if index == 0 or blocks > WIDTHS[index - 1]:
            yield CHOOSE.variant(arch, choose_constants(rule, width), warps=choose_warps(width))
    form = attend_form(dim, rule.block, arch)
    yield ATTEND.variant(arch, attend_constants(group, dim, rule.block, form), dtype, warps=form.warps)


def estimate_form(arch: str) -> Form:
    """Return the form of the estimate; warp groups take tiles that are twice as wide."""
    return Form(128, 256 if arch == WARP_GROUPS else 128, 3, 8)


def choose_warps(width: int) -> int:
    """Return the warps of a block that chooses among so many blocks of keys, whose scores it holds in registers."""
    return min(16, max(4, width // 512))


def attend_form(dim: int, block: int, arch: str) -> Form:
    """Return the form of attention over blocks: the tiles on their way have to fit in shared memory beside the queries."""
    warps = block // 16
    if arch == WARP_GROUPS and dim <= 128:
        return Form(block, block, 3, warps)
    if dim <= 128 or arch == WARP_GROUPS:
        return Form(block, 64, 2, warps)
    return Form(block, 32 if shared_limit(arch) > 128 << 10 else 16, 2, warps)


def estimate_constants(rule: Antidiagonal, group: int, dim: int, form: Form) -> Constants:
    """Return the constants of the estimate; products are taken over 64 channels at once."""
    shape = {"GROUP": group, "D": dim, "INNER": min(64, 1 << (dim - 1).bit_length()), "STRIDE": rule.stride, "TILES": rule.block // rule.stride}
    return {**shape, "TILE_Q": form.rows, "TILE_K": form.columns, "STAGES": form.stages}


def choose_constants(rule: Antidiagonal, width: int) -> Constants:
    """Return the constants of the choice."""
    return {"STRIDE": rule.stride, "TILES": rule.block // rule.stride, "WIDTH": width}


def attend_constants(group: int, dim: int, block: int, form: Form) -> Constants:
    """Return the constants of attention."""
    return {"GROUP": group, "D": dim, "BLOCK_D": 1 << (dim - 1).bit_length(), "BLOCK": block, "TILE": form.columns, "STAGES": form.stages}


def _arch(x: Tensor) -> str:
    return arch() if x.is_cuda else WARP_GROUPS


def _check(query: Tensor, *stored: Tensor) -> None:
    dim = query.shape[2]
    assert query.stride(1) == dim and query.stride(2) == 1, "a token's heads must lie side by side"
    assert all(one.stride(1) == dim and one.stride(2) == 1 for one in stored), "rows must lie side by side"

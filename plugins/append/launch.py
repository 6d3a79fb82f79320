"""Launching the append kernel: compiled ahead of time on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from plugins.append import launch_token
from plugins.device import kernel
from plugins.device.driver import arch
from plugins.device.dtypes import TRITON_DTYPES
from plugins.device.kernel import TritonKernel, typed
from plugins.device.triton_aot import TritonSpec
from trtkv.errors import EngineError

NONE, FIER, MINMAX, CUBOID, BALL_MEAN, BALL_MAX, MEAN = range(7)  # what is kept of a group, as in kernel.py, which needs Triton
KINDS = {None: NONE, "fier": FIER, "minmax": MINMAX, "cuboid": CUBOID, "ball-mean": BALL_MEAN, "ball-max": BALL_MAX, "mean": MEAN}
NO_GROUP = 16  # tokens of a block where nothing is summarized
SOURCE = Path(__file__).parent / "kernel.py"
APPEND = TritonKernel(
    SOURCE, "append_kernel",
    {
        "qkv": "*real", **typed("*i32", "positions", "starts", "lens", "table", "homes", "slots", "rings"), "rope": "*fp32",
        **typed("*norm", "q_weight", "k_weight"), **typed("*real", "out", "keys", "values"), "bits": "*bits", "meta": "*meta",
        **typed("i32", "qkv_stride", "table_stride", "page_size", "early", "ring_stride"), "eps": "fp32",
    },
    aligned=("qkv", "rope", "out", "keys", "values", "bits", "meta", "qkv_stride", "page_size"),
)  # fmt: skip


def launch(
    qkv: Tensor, positions: Tensor, starts: Tensor, lens: Tensor, table: Tensor, rope: Tensor, norms: tuple[Tensor, Tensor] | None, out: Tensor,
    keys: Tensor, values: Tensor, bits: Tensor | None, meta: Tensor | None, *,
    eps: float, group: int, summary: int, longest: int, overlap: bool = False, early: bool = False, settled: bool = False,
    homes: Tensor | None = None, heads: int | None = None, slots: Tensor | None = None, rings: Tensor | None = None, sink: int = -1,
    told: Tensor | None = None,
) -> None:  # fmt: skip
    """Append up to `longest` new tokens of every sequence; tensors as in the kernel, page size and heads from the shapes.

    bits may be None where the summary has only meta, both where it is NONE; what they hold is the kernel's to say, not their dtype's. group is a
    power of two that divides the page, which is a multiple of 16. homes [B, M] names the pages of the summaries where they are not those of table.
    early lets the next launch begin before the one in front of this has ended, of which it may then read nothing before it waits. settled says that
    all but qkv was there before the launch in front of this one began, whatever that one and those before it let begin early.
    heads says how many KV heads there are where each has its own length and pages: lens [Hk, B], table [Hk, B, M], keys and values [P, 1, N, D].
    told [B, Hq, words] int32, of single tokens with one-bit keys, is where queries are told to the scorer, see `select/told.py`.
    rings [Z, Hk, 2] with slots [B] and sink says that some of them keep their newest tokens in rings.
    """
    if not qkv.is_cuda:
        from plugins.append import kernel as interpreted

        interpreted.launch(
            qkv, positions, starts, lens, table, rope, norms, out, keys, values, bits, meta, eps=eps, group=group, summary=summary, longest=longest,
            early=early, homes=homes, heads=heads, slots=slots, rings=rings, sink=sink,
        )  # fmt: skip
        return
    heads_kv, page_size, dim = heads or keys.shape[1], *keys.shape[2:]
    aligned = [one.data_ptr() for one in (qkv, rope, out, keys, values, bits, meta) if one is not None]
    if any(pointer % 16 for pointer in aligned) or qkv.stride(0) % 16 or page_size % 16:
        raise EngineError("an input of the append kernel is not aligned to 16 bytes", "Report this with the output of trtkv doctor.")
    if longest == 1 and heads is None and rings is None and launch_token.takes(summary):
        launch_token.launch(
            qkv, positions, starts, lens, table, table if homes is None else homes, rope, norms, out, keys, values, bits, meta,
            eps=eps, group=group, summary=summary, overlap=overlap, early=early, settled=settled, told=told,
        )  # fmt: skip
        return
    heads_q = qkv.shape[1] // dim - 2 * heads_kv
    q_weight, k_weight = norms or (rope, rope)
    bits, meta = keys if bits is None else bits, keys if meta is None else meta
    dtype = TRITON_DTYPES[keys.dtype]
    spec = append_kernel(heads_q, heads_kv, dim, group, summary, norms is not None, dtype, arch(), heads is not None, sink)
    homes, slots, rings = (table if homes is None else homes), (lens if slots is None else slots), (lens if rings is None else rings)
    tensors = (qkv, positions, starts, lens, table, homes, slots, rings, rope, q_weight, k_weight, out, keys, values, bits, meta)
    blocks = 1 if longest == 1 else (longest + group - 2) // group + 1
    grid = (blocks, heads_kv + heads_q, lens.shape[-1])
    numbers = (qkv.stride(0), table.stride(-2), page_size, int(early), rings.stride(0), eps)
    kernel.launch(spec, grid, (*tensors, *numbers), overlap=overlap)


def append_kernel(
    heads_q: int, heads_kv: int, dim: int, group: int, summary: int, norm: bool, dtype: str, arch: str, ragged: bool = False, sink: int = -1
) -> TritonSpec:  # fmt: skip
    """Return the kernel for a shape; dtype is Triton's name of what activations and cache hold.

    From sm_90 on it can always overlap with the kernel before it: launched without leave to do so, its waiting costs nothing.
    """
    types = (("norm", dtype if norm else "fp32"), *summary_types(summary, dtype))
    constants = {
        "HEADS_Q": heads_q, "HEADS_KV": heads_kv, "D": dim, "BLOCK_D": 1 << (dim - 1).bit_length(), "GROUP": group, "SUMMARY": summary,
        "NORM": norm, "OVERLAP": int(arch) >= 90, "RAGGED": ragged, "SINK": sink,
    }  # fmt: skip
    return APPEND.variant(arch, constants, dtype, types=types)


def summary_types(summary: int, dtype: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return Triton's names of what the two parts of a summary hold, of keys of a dtype."""
    return ("bits", "i32" if summary == FIER else "fp32" if summary == MEAN else dtype), ("meta", "fp16" if summary == FIER else dtype)

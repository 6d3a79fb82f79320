"""Products of few tokens with matrices of codes, in Triton: the codes are read as they are stored and never written wide."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _byte_floats(codes):
    """Return e4m3 codes, as bytes, as fp16 numbers 256 times too small: their bits are those of fp16, whose exponent is biased by 8 more."""
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _partial(given, codes, there, low, inside, K: tl.constexpr, FP8: tl.constexpr, middle, BLOCK_K: tl.constexpr):
    """Return x [M, block] times codes less their zero points [block, N], fp32, for inputs from low on; of bytes of two codes both at once."""
    dtype: tl.constexpr = given.dtype.element_ty
    if FP8:
        k = low + tl.arange(0, BLOCK_K)
        x = tl.load(given + k[None, :], there[:, None] & (k < K)[None, :], 0.0)
        w = _byte_floats(tl.load(codes + k[None, :], inside[:, None] & (k < K)[None, :], 0)).to(dtype)
        return tl.dot(x, tl.trans(w), input_precision="ieee")
    pair = low // 2 + tl.arange(0, BLOCK_K // 2)
    taken = (2 * pair < K)[None, :]
    both = tl.load(codes + pair[None, :], inside[:, None] & taken, 0)
    first = tl.load(given + 2 * pair[None, :], there[:, None] & taken, 0.0)
    second = tl.load(given + 2 * pair[None, :] + 1, there[:, None] & taken, 0.0)
    even = ((both & 15).to(tl.float32) - middle[:, None]).to(dtype)
    odd = ((both >> 4).to(tl.float32) - middle[:, None]).to(dtype)
    return tl.dot(first, tl.trans(even), input_precision="ieee") + tl.dot(second, tl.trans(odd), input_precision="ieee")


@triton.jit
def _product(
    given, there, row, inside, codes, scales, zeros, K: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums [M, N], fp32, of tokens and some rows of the matrix; each group's are scaled when they are added."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    stride: tl.constexpr = K if FP8 else K // 2
    mine = codes + row.to(tl.int64)[:, None] * stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for low in range(0, K, BLOCK_K):
        at = row * groups + low // GROUP
        middle = tl.load(zeros + at, inside, 0).to(tl.float32) if ZEROS else tl.full([BLOCK_N], 8.0, tl.float32)
        scale = tl.load(scales + at, inside, 0.0).to(tl.float32)
        total += _partial(given, mine, there, low, inside, K, FP8, middle, BLOCK_K) * scale[None, :]
    return total * 256.0 if FP8 else total


@triton.jit
def packed_kernel(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    tokens,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write out [tokens, WIDTH] of x [tokens, K] times a matrix of codes transposed, plus a bias; gated: silu of its rows n times rows WIDTH + n.

    The grid is blocks of WIDTH. Scales and zero points are [rows, K / GROUP]; BLOCK_K divides GROUP. Sums are fp32 and rounded once; gate, its silu
    and up are each rounded before they are multiplied, as the operators of the graph are.
    """
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, inside = m < tokens, n < WIDTH
    given = x + m[:, None] * K
    dtype: tl.constexpr = out.dtype.element_ty
    total = _product(given, there, n, inside, codes, scales, zeros, K, GROUP, FP8, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K)
    if BIAS:
        total += tl.load(bias + n, inside, 0.0).to(tl.float32)[None, :]
    if GATED:
        up = _product(given, there, WIDTH + n, inside, codes, scales, zeros, K, GROUP, FP8, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K)
        gate = total.to(dtype).to(tl.float32)
        total = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    tl.store(out + m[:, None] * WIDTH + n[None, :], total.to(dtype), there[:, None] & inside[None, :])

"""What rounding in fp32 may change in a result, whatever the order of its sums; `trtkv verify` allows it beside the error of torch's own sums.

A sum of n terms is n - 1 additions, each rounded by at most U of a partial sum. Their roundings are as good as independent, so they add up to the
root of n, not n, times U and the size of a partial sum (Higham and Mary 2019, A New Approach to Probabilistic Rounding Error Analysis, theorem 2.4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

U = torch.finfo(torch.float32).eps / 2


def of_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the rounding of x [T, I] times the transposed weight [O, I]: [T, O]. Terms have both signs: partial sums are as large as their norm."""
    squares: Tensor = x.double().square() @ weight.double().square().T
    return squares.sqrt() * (math.sqrt(x.shape[1]) * U)


def of_encoded(x: Tensor, weight: Tensor) -> Tensor:
    """Return the rounding of a product [T, O] as of `of_product` whose tokens become e4m3, each scaled so that its largest number is 448.

    A number is off by at most a sixteenth of itself, or half the least step of its token, and by any amount up to that alike: its deviation is that
    over the root of three. Sums of them are normal; of a hundred million none is six deviations off.
    """
    x, weight = x.double(), weight.double()
    least = x.abs().amax(1, keepdim=True) / 448 * 2.0**-10
    off = torch.maximum(x.abs() / 16, least) / math.sqrt(3)
    spread: Tensor = off.square() @ weight.square().T
    return 6 * spread.sqrt()


def of_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return the rounding of one query [D] attending to keys and values [S, D]: [D].

    A score off by e multiplies its weight p by 1 + e, which moves the output by p e (value - output). Where scores are large and two of them close,
    that is far more than the sum of the weighted values is off by, and it hits few of the rows.
    """
    query, keys, values = query.double(), keys.double(), values.double()
    scores = keys @ query * scale
    weights = scores.softmax(0)
    # Of a score: its sum, the scaling and the difference to the largest; of its exponential: two units in the last place.
    off = U * (math.sqrt(query.numel()) * scale * (keys.square() @ query.square()).sqrt() + 2 * scores.abs() + (scores.amax() - scores) + 4)
    moved: Tensor = (weights * off) @ (values - weights @ values).abs()
    return moved + math.sqrt(len(keys)) * U * (weights @ values.abs())

"""Matrices of codes as the graph's own DequantizeLinear makes them wide, in ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor

from trtkv.runtime.packed import Codes, PackedWeight


@dataclass(frozen=True, slots=True)
class Dequantized:
    """A value of the graph that is a matrix made wide: the matrix, the operator that does it, and whether both lie [in, out]."""

    matrix: PackedWeight
    op: Any
    transposed: bool

    def rows(self, wanted: Tensor) -> Tensor:
        """Return some rows, fp32 [rows, in]."""
        found, start = [], 0
        for part in self.matrix.parts:
            own = wanted[(wanted >= start) & (wanted < start + len(part.codes))] - start
            found.append(self._wide(part, own.to(part.codes.device)))
            start += len(part.codes)
        return torch.cat(found)

    def _wide(self, part: Codes, rows: Tensor) -> Tensor:
        codes, scales, zeros = _numpy(part, rows)
        if part.group == 0:
            scales, zeros = scales[:, 0], None if zeros is None else zeros[:, 0]
        beside = [scales] if zeros is None else [scales, zeros]
        (made,) = self.op.run(codes.T if self.transposed else codes, *beside)
        return torch.from_numpy(np.ascontiguousarray(made.T if self.transposed else made))


def find_dequantized(nodes: Sequence[onnx.NodeProto], ops: Sequence[Any], weights: Mapping[str, Any]) -> dict[str, Dequantized]:
    """Return every value of a graph that is a matrix of codes made wide, narrowed or not, by name."""
    found: dict[str, Dequantized] = {}
    transposed = {node.input[1] for node in nodes if node.op_type == "Gemm" and not any(one.name == "transB" and one.i for one in node.attribute)}
    for node, op in zip(nodes, ops, strict=True):
        if node.op_type == "DequantizeLinear":
            found[node.output[0]] = Dequantized(weights[node.input[0]], op, node.input[0] + ".wide_t" in transposed)
        elif node.op_type == "Cast" and node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    return found


def _numpy(part: Codes, rows: Tensor) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Return rows of codes, scales and zero points in the types that ONNX gives them."""
    import ml_dtypes

    scales = part.scales[rows].float().cpu().numpy()
    if part.codes.dtype == torch.float8_e4m3fn:
        return part.codes.view(torch.uint8)[rows].cpu().numpy().view(ml_dtypes.float8_e4m3fn), scales, None
    packed = part.codes[rows].cpu().numpy()
    codes = np.empty((len(packed), 2 * packed.shape[1]), np.int8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    if part.zeros is None:
        return (codes - 8).astype(ml_dtypes.int4), scales, None
    return codes.astype(ml_dtypes.uint4), scales, part.zeros[rows].cpu().numpy().astype(ml_dtypes.uint4)

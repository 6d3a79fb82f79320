"""What a quantized checkpoint says of its linear layers, as plain data that graph, manifest, loader and byte counts read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
HALF_OR_SINGLE = ("float32", "float16", "bfloat16")
FP8_SM = 89  # the first compute capability that multiplies by fp8
SCALES, ZEROS = ".scales", ".zeros"  # what the graph's inputs beside a matrix of codes are called


class Quantization(BaseModel):
    """The encoding of every quantized matrix [out, in] of a checkpoint, and the modules that are left as they were.

    A weight is (code - zero point) * scale; `group` weights of a row share a scale, 0 says all of them. fp8 codes are e4m3; int4 codes are unsigned,
    two in a byte, the first in the low half; without zero points theirs is 8. scales says how the file stores scales: in memory each row has them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal["compressed-tensors", "fp8", "awq", "gptq", "gptq_v2", "modelopt"]
    codes: Literal["fp8", "int4"]
    group: int = Field(0, ge=0, le=2**24)
    scales: Literal["tensor", "row", "group", "block"]
    block_rows: int = Field(0, ge=0, le=2**24)
    zero_points: bool = False
    scale_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    plain: tuple[str, ...] = ()

    def groups(self, width: int) -> int:
        """Return the scales of a row of `width` weights."""
        return -(-width // self.group) if self.group else 1

    def nbytes(self, out: int, width: int) -> int:
        """Return the bytes of a matrix [out, width]: codes, scales and zero points."""
        codes = out * width if self.codes == "fp8" else out * width // 2
        return codes + out * self.groups(width) * (BYTES[self.scale_dtype] + self.zero_points)

    @property
    def title(self) -> str:
        """The encoding in words."""
        each = f"groups of {self.group}" if self.group else "rows"
        return f"{self.codes} with scales of {each}{' and zero points' if self.zero_points else ''} ({self.format})"

    @property
    def why_no_plan(self) -> str | None:
        """Why no TensorRT plan is built: as measured, TensorRT-RTX 1.7 would widen each matrix in memory in every step; None where it does not."""
        if self.codes == "fp8" and not self.group:
            return None
        what = f"{self.codes} weights with scales of groups" if self.group else "int4 weights"
        return f"TensorRT would widen {what} in memory in every step"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a module in the file: what it holds, the end of its name, the shapes and dtypes that it may have, and how it lies there.

    Of a kind "absent" there must be none; layout then says why.
    """

    kind: Literal["codes", "scales", "zeros", "order", "absent"]
    suffix: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    layout: str = "rows"

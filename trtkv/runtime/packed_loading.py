"""Binds quantized matrices to a checkpoint: mapped where the file has codes as they lie in memory, repacked in place where it has not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.device.dtypes import TORCH_DTYPES
from trtkv.checkpoint.repack import FIX, LAYOUTS, codes_of, scales_of, zeros_of
from trtkv.checkpoint.weights import Checkpoint, Entry
from trtkv.errors import CheckpointError
from trtkv.quantized.encoding import Quantization, Stored
from trtkv.quantized.formats import stored_of
from trtkv.runtime.packed import Codes, PackedWeight, Scratch
from trtkv.runtime.sources import Source, share
from trtkv.runtime.uploads import Piece, cut

UNBIASED = ("o_proj", "gate_proj", "up_proj", "down_proj")
CODES = {"fp8": torch.float8_e4m3fn, "int4": torch.uint8}


@dataclass(frozen=True, slots=True)
class _Share:
    """A module of a stacked matrix, and which of its rows and columns a part takes."""

    checkpoint: Checkpoint
    name: str
    out: int
    width: int
    rows: slice
    columns: slice
    quantization: Quantization

    def stored(self, kind: str) -> tuple[str, Stored] | None:
        """Return the name and the form of the tensor of a kind, None where the format has none or it may be absent."""
        for one in stored_of(self.quantization, self.out, self.width):
            if one.kind == kind and (kind != "order" or self.name + one.suffix in self.checkpoint):
                return self.name + one.suffix, one
        return None

    def codes(self) -> tuple[Entry, str, tuple[slice, slice]]:
        """Return where the codes lie, in what layout, and which rows and columns of the file's tensor the part takes."""
        found = self.stored("codes")
        assert found is not None, "every format has codes"
        name, one = found
        return self.checkpoint.entry(name), one.layout, LAYOUTS[one.layout].cut(self.rows, self.columns)

    def beside(self) -> tuple[Tensor, Tensor | None]:
        """Return the part's scales and zero points, on the host; raises CheckpointError for values that cannot be right."""
        one = self.quantization
        at, form = _there(self.stored("scales"))
        scales = self._cut(scales_of(self.checkpoint.tensor(at), form.layout, one, self.out, self.width)).to(TORCH_DTYPES[one.scale_dtype])
        if not bool(scales.isfinite().all()):
            raise CheckpointError(f"the tensor '{at}' holds scales that are not finite", FIX)
        self._check_order()
        self._check_bias()
        if (found := self.stored("zeros")) is None:
            return scales.contiguous(), None
        at, form = found
        zeros = self._cut(zeros_of(self.checkpoint.tensor(at), form.layout, at)).contiguous()
        if one.zero_points:
            return scales.contiguous(), zeros
        if bool((zeros != 8).any()):
            raise CheckpointError(f"the tensor '{at}' holds other zero points than 8, and the configuration calls the weights symmetric", FIX)
        return scales.contiguous(), None

    def _cut(self, values: Tensor) -> Tensor:
        """Take the part's rows and groups of values [out, groups]."""
        group = self.quantization.group
        return values[self.rows, self.columns.start // group : -(-self.columns.stop // group)] if group else values[self.rows]

    def _check_order(self) -> None:
        if (found := self.stored("order")) is None:
            return
        plain = torch.arange(self.width, dtype=torch.int32) // (self.quantization.group or self.width)
        if not torch.equal(self.checkpoint.tensor(found[0]), plain):
            raise CheckpointError(f"'{found[0]}' orders columns by activations, which is not supported", "Take a checkpoint without desc_act.")

    def _check_bias(self) -> None:
        """Some writers add a bias to every layer, all zeros where the model has none."""
        name = f"{self.name}.bias"
        if self.name.endswith(UNBIASED) and name in self.checkpoint and bool((self.checkpoint.tensor(name) != 0).any()):
            raise CheckpointError(f"'{self.checkpoint.path}' holds '{name}', and models of this type have no such bias", FIX)


def map_packed(checkpoint: Checkpoint, spec: Source, scratch: Scratch, part: tuple[int, int]) -> PackedWeight:
    """Bind a quantized graph input on the host; codes stay mapped where the file has them as memory does."""
    made = []
    for one in _shares(checkpoint, spec, part):
        entry, layout, (rows, columns) = one.codes()
        raw = checkpoint.tensor(_there(one.stored("codes"))[0])
        whole = columns == slice(0, entry.shape[1])
        codes = codes_of(raw[rows] if whole else raw[rows, columns].contiguous(), layout)
        made.append(Codes(codes, *one.beside(), one.quantization.group))
    return PackedWeight(tuple(made), scratch)


def packed_pieces(checkpoint: Checkpoint, spec: Source, scratch: Scratch, device: torch.device, part: tuple[int, int]) -> Upload:
    """Allocate a quantized graph input on a device and list what fills its codes; scales and zero points are there at once."""
    shares = list(_shares(checkpoint, spec, part))
    one, (out, width) = shares[0].quantization, spec.shape
    codes = torch.empty(out, width if one.codes == "fp8" else width // 2, dtype=CODES[one.codes], device=device)
    beside = [own.beside() for own in shares]
    scales = torch.cat([scale for scale, _ in beside]).to(device)
    zeros = [zero for _, zero in beside if zero is not None]
    weight = PackedWeight((Codes(codes, scales, torch.cat(zeros).to(device) if zeros else None, one.group),), scratch)
    pieces, repacked, start = [], [], 0
    for module in shares:
        entry, layout, (rows, columns) = module.codes()
        own = codes[start : start + module.rows.stop - module.rows.start]
        start += len(own)
        dtype = torch.uint8 if entry.dtype == CODES["fp8"] else entry.dtype  # copies of columns are of bytes, too
        target = own.view(-1).view(torch.uint8).view(dtype).view(rows.stop - rows.start, columns.stop - columns.start)
        row_bytes, whole = entry.shape[1] * dtype.itemsize, columns == slice(0, entry.shape[1])
        place = entry.start + rows.start * row_bytes
        pieces += list(cut(Piece(entry.file, place, len(target) * row_bytes, dtype, entry.shape[1], target, None if whole else columns)))
        if layout not in ("rows", "words"):
            repacked.append((own, target, layout))
    return Upload(weight, pieces, repacked)


@dataclass(frozen=True, slots=True)
class Upload:
    """A matrix on a device, the pieces that fill its codes as the file has them, and what is then to be repacked in its place."""

    weight: PackedWeight
    pieces: Sequence[Piece]
    repacked: Sequence[tuple[Tensor, Tensor, str]]

    def finish(self) -> None:
        """Repack what has arrived, a module at a time."""
        for own, raw, layout in self.repacked:
            own.copy_(codes_of(raw, layout))


def random_packed(spec: Source, generator: torch.Generator, device: torch.device, scratch: Scratch) -> PackedWeight:
    """Fill a quantized graph input with random codes and the scales that give weights the usual deviation of 0.02."""
    one, (out, width) = _quantization(spec), spec.shape
    dtype, groups = TORCH_DTYPES[one.scale_dtype], one.groups(width)
    if one.codes == "fp8":
        codes = torch.empty(out, width, dtype=torch.float32, device=device).normal_(0.0, 16.0, generator=generator).to(CODES["fp8"])
        return PackedWeight((Codes(codes, torch.full((out, groups), 0.02 / 16, dtype=dtype, device=device), None, one.group),), scratch)
    codes = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.full((out, groups), 0.02 / 4.61, dtype=dtype, device=device)  # codes of four bits deviate by the root of 255 / 12
    zeros = torch.full((out, groups), 8, dtype=torch.uint8, device=device) if one.zero_points else None
    return PackedWeight((Codes(codes, scales, zeros, one.group),), scratch)


def _shares(checkpoint: Checkpoint, spec: Source, part: tuple[int, int]) -> Iterator[_Share]:
    for name, shape in spec.sources:
        rows, columns = share(tuple(shape), spec.shape, len(spec.sources), part)
        out, width = shape
        yield _Share(checkpoint, name.removesuffix(".weight"), out, width, rows, columns or slice(0, width), _quantization(spec))


def _quantization(spec: Source) -> Quantization:
    assert spec.quantization is not None, f"{spec.name} is not quantized"
    return spec.quantization


def _there(found: tuple[str, Stored] | None) -> tuple[str, Stored]:
    assert found is not None, "every format has codes and scales"
    return found

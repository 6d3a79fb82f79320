"""Weights as the executor takes them: mapped files on the host, packed tensors on a device, or random numbers of the right shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trtkv.runtime.uploads import Piece, cut, upload

if TYPE_CHECKING:
    from trtkv.checkpoint.weights import Checkpoint

Report = Callable[[int, int], None]


class Source(Protocol):
    """A graph input: its name and shape, and the checkpoint tensors that it is stacked from with their shapes."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def sources(self) -> tuple[tuple[str, tuple[int, ...]], ...]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Weight:
    """A graph input [out, in] or [E] as parts stacked along the first axis, so that mapped checkpoints need not be copied to pack them."""

    parts: tuple[Tensor, ...]

    @property
    def whole(self) -> Tensor:
        """The only part of a weight that is not stacked."""
        assert len(self.parts) == 1, "this weight is stacked from parts"
        return self.parts[0]

    def linear(self, x: Tensor, bias: Weight | None) -> Tensor:
        """Return x [T, in] times the weight transposed, plus bias: [T, out]."""
        if len(self.parts) == 1:
            return torch.nn.functional.linear(x, self.parts[0], bias.whole[0] if bias else None)
        out = x.new_empty(x.shape[0], sum(part.shape[0] for part in self.parts))
        start = 0
        for index, part in enumerate(self.parts):
            target = out[:, start : start + part.shape[0]]
            if bias:
                torch.addmm(bias.parts[index] if len(bias.parts) > 1 else bias.whole[0, start : start + part.shape[0]], x, part.t(), out=target)
            else:
                torch.mm(x, part.t(), out=target)
            start += part.shape[0]
        return out


def map_weights(
    checkpoint: Checkpoint,
    specs: Sequence[Source],
    dtype: torch.dtype,
    device: torch.device,
    report: Report,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Weight]:
    """Bind every graph input to its tensors in the checkpoint; part says which of how many GPUs this is.

    On the CPU tensors stay mapped unless their dtype differs; on a device each input is packed into one tensor, read from the files by several
    threads. report(done_bytes, total_bytes) is called as weights arrive.
    """
    named = [(spec.name, spec.shape, [name for name, _ in spec.sources]) for spec in specs]
    if device.type != "cpu":
        return upload_weights(checkpoint, named, dtype, device, report, part)
    total, done, weights = checkpoint.nbytes, 0, {}
    for name, shape, sources in named:
        tensors = [checkpoint.tensor(source) for source in sources]
        done += sum(one.nbytes for one in tensors)
        cuts = [share(tuple(one.shape), shape, len(sources), part) for one in tensors]
        shares = [one[rows] if columns is None else one[rows, columns].contiguous() for one, (rows, columns) in zip(tensors, cuts, strict=True)]
        weights[name] = _bind(shares, shape, dtype)
        report(min(done, total), total)
    return weights


def upload_weights(
    checkpoint: Checkpoint,
    named: Sequence[tuple[str, tuple[int, ...], Sequence[str]]],
    dtype: torch.dtype,
    device: torch.device,
    report: Report,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Weight]:
    """Fill one tensor a graph input (name, shape, checkpoint tensors stacked along the first axis) from the checkpoint's files."""
    weights, pieces = {}, []
    for name, shape, sources in named:
        packed = torch.empty(shape, dtype=dtype, device=device)
        flat, start = packed.view(-1), 0
        for source in sources:
            entry = checkpoint.entry(source)
            rows, columns = share(entry.shape, shape, len(sources), part)
            width = math.prod(entry.shape[1:])
            count, kept = rows.stop - rows.start, width if columns is None else columns.stop - columns.start
            target = flat[start : start + count * kept].view(count, kept)
            start += count * kept
            row_bytes = width * entry.dtype.itemsize
            if count and row_bytes:
                whole = Piece(entry.file, entry.start + rows.start * row_bytes, count * row_bytes, entry.dtype, width, target, columns)
                pieces += list(cut(whole))
        weights[name] = Weight((packed,))
    upload(sorted(pieces, key=lambda one: (one.file, one.start)), device, report)
    return weights


def share(tensor: tuple[int, ...], shape: tuple[int, ...], stacked: int, part: tuple[int, int]) -> tuple[slice, slice | None]:
    """Return which rows, and which columns if not all, a part takes of a tensor [out, in] or [out].

    shape is the graph input's, stacked how many tensors it is stacked from.
    """
    index, count = part
    if count == 1 or (stacked == 1 and math.prod(tensor) == math.prod(shape)):
        return slice(0, tensor[0]), None
    if len(tensor) == 2 and tensor[1] != shape[1]:
        return slice(0, tensor[0]), slice(index * shape[1], (index + 1) * shape[1])
    size = tensor[0] // count
    return slice(index * size, (index + 1) * size), None


def random_weights(specs: Sequence[Source], dtype: torch.dtype, device: torch.device, report: Report) -> dict[str, Weight]:
    """Fill every graph input with numbers of the usual size: ones for norms, normal with deviation 0.02 otherwise."""
    generator = torch.Generator(device=device).manual_seed(0)
    weights, done = {}, 0
    total = sum(torch.Size(spec.shape).numel() for spec in specs) * dtype.itemsize
    for spec in specs:
        tensor = torch.ones(spec.shape, dtype=dtype, device=device)
        if len(spec.shape) > 1:
            tensor.normal_(0.0, 0.02, generator=generator)
        weights[spec.name] = Weight((tensor,))
        done += tensor.nbytes
        report(done, total)
    return weights


def _bind(parts: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    return Weight(tuple(part.to(dtype).view(1, -1) if len(shape) == 2 and part.dim() == 1 and len(parts) == 1 else part.to(dtype) for part in parts))

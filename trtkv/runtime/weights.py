"""Weights as the executor takes them: mapped files on the host, packed tensors on a device, or random numbers of the right shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trtkv.checkpoint.weights import Checkpoint

Report = Callable[[int, int], None]


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
    specs: Sequence[Mapping[str, object]],
    dtype: torch.dtype,
    device: torch.device,
    report: Report,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Weight]:
    """Bind every graph input to its tensors in the checkpoint; part says which of how many GPUs this is.

    On the CPU parts stay mapped unless their dtype differs; on a device each input is packed into one tensor, read straight from the
    mapping. report(done_bytes, total_bytes) is called as weights arrive.
    """
    total, done, weights = checkpoint.nbytes, 0, {}
    for spec in specs:
        parts = [checkpoint.tensor(name) for name, _ in spec["sources"]]  # type: ignore[attr-defined]
        done += sum(one.nbytes for one in parts)
        parts = [take_part(one, tuple(spec["shape"]), parts, part) for one in parts]  # type: ignore[arg-type]
        weights[str(spec["name"])] = _bind(parts, tuple(spec["shape"]), dtype, device)  # type: ignore[arg-type]
        report(min(done, total), total)
    return weights


def take_part(tensor: Tensor, shape: tuple[int, ...], stacked: Sequence[Tensor], part: tuple[int, int]) -> Tensor:
    """Return a part's rows or columns of a tensor [out, in] or [out] that is stacked with others into a graph input of this shape."""
    index, count = part
    if count == 1 or (len(stacked) == 1 and tensor.numel() == torch.Size(shape).numel()):
        return tensor
    if tensor.dim() == 2 and tensor.shape[1] != shape[1]:
        return tensor.chunk(count, 1)[index].contiguous()
    return tensor.chunk(count, 0)[index]


def random_weights(
    specs: Sequence[Mapping[str, object]], dtype: torch.dtype, device: torch.device, report: Report, seed: int = 0
) -> dict[str, Weight]:
    """Fill every graph input with numbers of the usual size: ones for norms, normal with deviation 0.02 otherwise."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights, done = {}, 0
    shapes = [(str(spec["name"]), tuple(spec["shape"])) for spec in specs]  # type: ignore[arg-type]
    total = sum(torch.Size(shape).numel() for _, shape in shapes) * dtype.itemsize
    for name, shape in shapes:
        tensor = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) > 1:
            tensor.normal_(0.0, 0.02, generator=generator)
        weights[name] = Weight((tensor,))
        done += tensor.nbytes
        report(done, total)
    return weights


def _bind(parts: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Weight:
    if device.type == "cpu":
        return Weight(
            tuple(part.to(dtype).view(1, -1) if len(shape) == 2 and part.dim() == 1 and len(parts) == 1 else part.to(dtype) for part in parts)
        )
    packed = torch.empty(shape, dtype=dtype, device=device)
    flat, start = packed.view(-1), 0
    for part in parts:
        flat[start : start + part.numel()].copy_(part.reshape(-1))
        start += part.numel()
    return Weight((packed,))

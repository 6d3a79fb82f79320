"""What every op over the KV cache shows to the graph, to the executor and to TensorRT."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from plugins.cache.support import runs_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from plugins.cache.session import Session

DOMAIN, VERSION = "trtkv", "1"
Run: TypeAlias = "Callable[[Session, int, OpConfig, Sequence[Tensor], Tensor], None]"


@dataclass(frozen=True, slots=True)
class OpConfig:
    """What a node carries in its one `cfg` attribute, a JSON string: TensorRT truncates integers beyond 32 bits without a word.

    select_width is the number of units that a selection holds for a head, select_heads Hk or (per query head) Hq; plan is the CachePlan's hash.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rms_eps: float
    select_width: int
    select_heads: int
    plan: str

    def to_json(self) -> str:
        """Write the attribute's text; equal configurations give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> OpConfig:
        """Read the attribute's text; raises TypeError or ValueError when it is not one."""
        return OpConfig(**json.loads(text.rstrip("\0")))


@dataclass(frozen=True, slots=True)
class OpFace:
    """An op: its name in the graph, the input whose dtype its output takes, its output shape and its function.

    inputs are the names of all inputs in order, those that are also in optional last; shape maps the input shapes (of integers or of
    TensorRT dimension expressions) and the configuration to the output's shape; integer_output says that the output is int32 instead of
    the first input's dtype;
    torch(session, layer, config, inputs, out) writes the output in place on any device; cuda names the form that does so with kernels
    (`module:function`, imported where there is a GPU), if any does.
    """

    name: str
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    integer_output: bool
    shape: Callable[[Sequence[Sequence[object]], OpConfig], tuple[object, ...]]
    torch: Run
    cuda: str | None = None

    def run(self, session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
        """Write the output in place, by kernels where they take on this layer."""
        if self.cuda is not None and session.held is None and runs_kernels(session.plan, config, inputs[0].dtype, session.device):
            _load(self.cuda)(session, layer, config, inputs, out)
        else:
            self.torch(session, layer, config, inputs, out)


@cache
def _load(path: str) -> Run:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]

"""What every op over the KV cache shows to the graph, to the executor and to TensorRT."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from trtkv.plugins.session import Session

DOMAIN, VERSION = "trtkv", "1"


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
    run(session, layer, config, inputs, out) writes the output in place.
    """

    name: str
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    integer_output: bool
    shape: Callable[[Sequence[Sequence[object]], OpConfig], tuple[object, ...]]
    run: Callable[[Session, int, OpConfig, Sequence[Tensor], Tensor], None]

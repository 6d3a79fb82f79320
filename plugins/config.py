"""What a plugin node carries, and under which name TensorRT knows it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

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

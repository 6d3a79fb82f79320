"""Q-Hitter: heavy hitters that also survive quantization (MLSys 2024, section 4).

Two scores decide: accumulated attention, normalized over the layer, and friendliness to quantization, from the error of a four-bit rounding of the
token's keys and values, normalized likewise. Part of the budget goes to attention alone, part to the combination, part to the newest tokens.
The released code normalizes the errors of a generated token over its own heads only; here all stored tokens are normalized together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from trtkv import rules
from trtkv.errors import ConfigError
from trtkv.lazy import Tensor, torch
from trtkv.plan import CacheView
from trtkv.policies.budgeted import Budgeted
from trtkv.policies.packing import decode_integer_zero, encode_integer_zero
from trtkv.ranking import best, group_mean


class QHitter(Budgeted):
    """Keep tokens that are attended to and quantize well, in every step.

    heavy and recent: shares of the budget for attention alone and for the newest tokens (7 and 5 of the paper's 20 percent), the rest goes to the
    combination; blend: weight of attention in it; bits: of the rounding whose error counts; pooling: how the attention of a group's query heads
    becomes one.
    """

    source: ClassVar[str] = "Q-Hitter, MLSys 2024"
    needs: ClassVar[frozenset[str]] = frozenset({"attention_mass", "dense_decode", "equal_heads"})
    token_state: ClassVar[Mapping[str, str]] = {"key_error": "float32", "value_error": "float32"}
    heavy: float = Field(0.35, ge=0.0, lt=1.0)
    recent: float = Field(0.25, ge=0.0, lt=1.0)
    blend: float = Field(0.5, ge=0.0, le=1.0)
    bits: Literal[2, 4, 8] = 4
    pooling: Literal["mean", "max"] = "mean"

    @property
    def joins_heads(self) -> bool:
        """Attention and errors are scaled to the range of all heads."""
        return True

    def reserved(self, prompt: int) -> tuple[int, int]:
        """The recent share, at least the newest token."""
        return 0, max(1, int(self.budget * self.recent))

    def rule(self) -> rules.Blend:
        """The token of the least combined score is evicted."""
        recent, heavy = self.reserved(0)[1], int(self.budget * self.heavy)
        return rules.Blend(self.budget, recent, heavy, self.blend, self.pooling == "max", self.bits)

    def observe(self, view: CacheView) -> dict[str, Tensor]:
        """Measure the rounding error of this step's tokens while they are still in full precision."""
        first = view.at.stored - view.at.new
        measured = {}
        for name, x in (("key_error", view.keys), ("value_error", view.values)):
            measured[name] = view.state[name].clone()
            measured[name][:, first:] = rounding_error(x[:, first:], self.bits)
        return measured

    def scores(self, view: CacheView) -> Tensor:
        """Return the combined score [Hk, S], infinite for the tokens that attention alone chooses."""
        assert view.mass is not None
        heavy = _unit_range(group_mean(view.mass, view.keys.shape[0], self.pooling))
        friendly = (2 - _unit_range(view.state["key_error"]) - _unit_range(view.state["value_error"])) / 2
        combined = self.blend * heavy + (1 - self.blend) * friendly
        past = view.at.stored - self.reserved(view.at.prompt)[1]
        first = best(heavy[:, :past], min(past, int(self.budget * self.heavy)))
        return combined.scatter(1, first, float("inf"))

    def check(self, policy: str) -> None:
        """Raise ConfigError when the shares leave nothing to the combination."""
        super().check(policy)
        if self.heavy + self.recent >= 1:
            raise ConfigError(f"evict.heavy + evict.recent of '{policy}' are {self.heavy + self.recent:g}, above 1", "Lower one of them.")


def rounding_error(x: Tensor, bits: int) -> Tensor:
    """Return the L2 error [Hk, S] fp32 of rounding tokens x [Hk, S, D] to so many bits each."""
    return (decode_integer_zero(*encode_integer_zero(x.float(), bits)) - x.float()).square().sum(-1).sqrt()


def _unit_range(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x)
    return (x - low) / (high - low).clamp(min=1e-20)

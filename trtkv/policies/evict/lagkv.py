"""LagKV: eviction by how a token's keys and values vary against the next partition (arXiv 2504.04704, eq. 2 to 12).

After the sink the cache is cut into partitions of L tokens. Each is normalized, channel by channel, to the range of the partition that
follows it; a token's score is the softmax over its partition of the standard deviation over channels (ddof 1), for keys plus for values.
The best r L tokens of a partition stay and are frozen; the last full partition and the rest wait for their reference. Prefill and decode
follow the same rule, so the stored set depends on the tokens alone and not on how a prompt was chunked.
Variants of the paper: "local" takes a partition's range, "norm" keeps the smallest key norms. Deviation: a channel whose range in the
reference is zero counts as zero instead of turning its partition into NaN; `strict` raises instead.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trtkv import rules
from trtkv.errors import ConfigError
from trtkv.lazy import Tensor, torch
from trtkv.plan import CacheView, Occupancy, Verdict
from trtkv.policies.base import ROUND_OFF, Allocate, Evict
from trtkv.ranking import best, span


class LagKV(Evict):
    """Keep the tokens of each partition that stand out against the next one.

    ratio: share of each partition that stays; lag: tokens of a partition; sink: first tokens, always kept; score: against the next
    partition (lag), a partition's range (local), or key norms (norm); value_weight: weight of the values' score;
    skip_layers: layers that keep everything; strict: refuse channels without a range.
    """

    source: ClassVar[str] = "LagKV, arXiv 2504.04704"
    takes_layers: ClassVar[bool] = True
    ratio: float = Field(0.5, ge=0.0, lt=1.0)
    lag: int = Field(1024, ge=1)
    sink: int = Field(16, ge=0)
    score: Literal["lag", "local", "norm"] = "lag"
    value_weight: float = Field(1.0, ge=0.0)
    skip_layers: tuple[int, ...] = ()
    strict: bool = False

    @property
    def kept_per_lag(self) -> int:
        """Tokens of a partition that stay."""
        return int(self.ratio * self.lag + ROUND_OFF)

    def expected_length(self, seen: int) -> int:
        """Return the stored tokens after `seen` (eq. 12)."""
        if seen < self.sink + 2 * self.lag:
            return seen
        partitions = (seen - self.sink) // self.lag
        return self.sink + self.kept_per_lag * (partitions - 1) + self.lag + (seen - self.sink) % self.lag

    def rule(self) -> rules.Lag | None:
        """Partitions go by their scores, unless a channel without a range is an error."""
        return None if self.strict else rules.Lag(self.lag, self.sink, self.score, self.value_weight)

    def due(self, at: Occupancy) -> bool:
        """Evict when the frozen tokens are followed by two full partitions."""
        return at.layer not in self.skip_layers and at.stored >= self._frozen(at) + 2 * self.lag

    def remaining(self, at: Occupancy) -> tuple[int, ...]:
        """What the partitions with a reference leave."""
        dropped = ((at.stored - self._frozen(at)) // self.lag - 1) * (self.lag - self.kept_per_lag)
        return tuple(length - dropped for length in at.lengths)

    def keep(self, view: CacheView) -> Verdict:
        """Keep frozen tokens, the best of each partition that has a reference, and the rest."""
        start, stored = self._frozen(view.at), view.at.stored
        partitions = (stored - start) // self.lag
        stop = start + partitions * self.lag
        keys, values = (torch.unflatten(x[:, start:stop], 1, (partitions, self.lag)) for x in (view.keys, view.values))
        chosen = best(self.token_scores(keys, values), self.kept_per_lag)
        offsets = span(0, partitions - 1, chosen) * self.lag + start
        middle = (chosen + offsets[:, None]).flatten(1)
        front, back = span(0, start, chosen), span(stop - self.lag, stored, chosen)
        return Verdict(torch.cat([front.expand(len(middle), -1), middle, back.expand(len(middle), -1)], 1))

    def token_scores(self, keys: Tensor, values: Tensor) -> Tensor:
        """Score the tokens of all partitions but the last: keys and values [Hk, P, L, D] to [Hk, P - 1, L] fp32."""
        if self.score == "norm":
            return keys[:, :-1].float().square().sum(-1).sqrt().neg()
        return self._part_scores(keys) + self.value_weight * self._part_scores(values)

    def page_groups(self, allocate: Allocate | None, num_layers: int) -> tuple[int, ...]:
        """Layers that keep everything, if there are any, and the others."""
        first = 0 in self.skip_layers
        return tuple(int((layer in self.skip_layers) != first) for layer in range(num_layers))

    def settled(self, at: Occupancy) -> int:
        """The frozen tokens; everything in a layer that is skipped."""
        if at.layer in self.skip_layers:
            return at.stored
        if at.seen < self.sink + 2 * self.lag:
            return min(at.seen, self.sink)
        return self.expected_length(at.seen) - self.lag - (at.seen - self.sink) % self.lag

    def _frozen(self, at: Occupancy) -> int:
        return max(at.settled, self.sink)

    def _part_scores(self, x: Tensor) -> Tensor:
        reference = x[:, :-1] if self.score == "local" else x[:, 1:]
        low, high = reference.float().amin(2, keepdim=True), reference.float().amax(2, keepdim=True)
        reach = high - low
        if self.strict and bool((reach == 0).any()):
            raise ConfigError("a channel of a LagKV reference partition has no range", "Set evict.strict=false to leave such channels out.")
        normalized = torch.where(reach > 0, (x[:, :-1].float() - low) / reach.where(reach > 0, torch.ones_like(reach)), torch.zeros_like(reach))
        return normalized.std(-1).softmax(-1)

"""The lowered form of a policy: buffers, budgets and op calls as plain data.

Graph, plugins and runtime see only this, never a policy class. A meaning is named by import path, so that the reference definition of a
policy runs where no kernel for it exists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trtkv.config import DTYPE_BYTES
from trtkv.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

BOOKKEEPING = ("positions", "last_queries")  # buffers of a cache that is evicted from that hold none of it: they are occupied, not stored
FORMAT = 1  # raised whenever an engine directory of the previous format can no longer be run

Tier = Literal["device", "host"]
Phase = Literal["prefill", "decode"]
Pooling = Literal["softmax-mean", "softmax-max", "mean", "max", "none"]


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer of the cache in every layer that needs it.

    shape begins with "P" (one row a page of the pool) or "Z" (one row a sequence slot); the rest are integers.
    tokens_per_entry says how many tokens one entry describes: 1 for keys, the group for a group's bounds, the page for a page's bounds.
    pool says whose pages: those of tokens in full precision with their summaries, or those of encoded tokens; a token is in one of them.
    """

    name: str
    shape: tuple[str | int, ...]
    letters: str
    dtype: str
    layers: tuple[int, ...]
    tokens_per_entry: int = 1
    tier: Tier = "device"
    pool: Literal["plain", "encoded"] = "plain"

    @property
    def row_bytes(self) -> int:
        """Bytes of one page or one slot in one layer."""
        size = DTYPE_BYTES[self.dtype]
        for dim in self.shape[1:]:
            size *= int(dim)
        return size

    @property
    def paged(self) -> bool:
        """Whether rows belong to pages rather than to sequence slots."""
        return self.shape[0] == "P"


@dataclass(frozen=True, slots=True)
class Meaning:
    """A role by import path (`module:Class`) with its fields, and the name under which `plugins` may have a kernel for it."""

    op: str
    role: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SelectPlan:
    """How a layer chooses what a decode query reads.

    budget counts the attended tokens of one KV head, with sink, window and open group; unit is 1 (tokens) or the page.
    Tokens behind the last multiple of group have no summary yet and are always attended. speculative roles may select with the previous
    step's query, forces says that the role names units that every query reads.
    """

    meaning: Meaning
    budget: int
    sink: int
    window: int
    unit: int
    group: int
    pooling: Pooling
    speculative: bool = False
    forces: bool = False

    @property
    def width(self) -> int:
        """Units that a selection holds for one head, forced ones included."""
        return -(-self.budget // self.unit)

    def reads(self, stored: int) -> int:
        """Tokens that a decode query reads of so many stored ones, per KV head."""
        return min(stored, self.width * self.unit) if stored > self.budget else stored


@dataclass(frozen=True, slots=True)
class EvictPlan:
    """What the runtime must know to let a layer evict.

    needs names what the role, or the allocate role that serves it, reads besides keys and values (attention_mass, attention_newest, last_queries);
    observe_window is the number of queries kept for them; token_state maps the role's own numbers per stored token to their dtype; paged says that
    all KV heads of a layer keep equally many tokens and that integers alone say how many, so that the cache can lie in pages; ragged that heads keep
    as many as they are granted and integers say how many once that is known, so that every head can have pages of its own; prompt_only that nothing
    is evicted behind the prompt.
    """

    meaning: Meaning
    needs: tuple[str, ...] = ()
    observe_window: int = 0
    token_state: Mapping[str, str] = field(default_factory=dict)
    paged: bool = False
    prompt_only: bool = False
    ragged: bool = False

    @property
    def queries(self) -> int:
        """Newest queries that are kept for a sequence: the role's window, or the one whose attention is looked at behind a decode step."""
        newest = "attention_newest" in self.needs or ("attention_mass" in self.needs and not self.prompt_only)
        return max(self.observe_window, int(newest))


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """How tokens pass into their encoded form.

    flush_first: a decode step encodes before its attention instead of behind it; demoted_only: the tokens that the evict role marks are encoded
    instead of a leading run; key_group: consecutive tokens that are encoded together; residual: tokens behind the settled ones that stay in full
    precision at most; mixed: the marked tokens lie in pages like those in full precision, of the same pool.
    """

    meaning: Meaning
    flush_first: bool = False
    demoted_only: bool = False
    key_group: int = 1
    residual: int = 0
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A layer's cache of one sequence in integers that the host knows, once a step's tokens have been appended.

    seen counts the sequence's tokens, lengths the stored ones of each KV head, new those of this step; the leading settled tokens will never be
    evicted; complete says that the prompt (of prompt tokens) is in; budget and precise are what an allocate role granted each KV head.
    """

    seen: int
    lengths: tuple[int, ...]
    new: int = 1
    settled: int = 0
    phase: Phase = "decode"
    complete: bool = True
    prompt: int = 0
    layer: int = 0
    num_layers: int = 1
    budget: tuple[int, ...] | None = None
    precise: tuple[int, ...] | None = None

    @property
    def stored(self) -> int:
        """Tokens of the fullest head."""
        return max(self.lengths)


@dataclass(frozen=True, slots=True)
class CacheView:
    """A layer's cache of one sequence behind the attention of a step, as an evict or allocate role sees it; all floats fp32.

    keys and values [Hk, S, D] decoded, rows beyond a head's length are zero; positions [Hk, S] int64 logical positions, ascending, -1 beyond the
    length; queries [W, Hq, D] the newest queries after rotation, the last at position seen - 1 (fewer than a role asked for in short sequences,
    more where another role asks for more); mass [Hq, S] attention probability that each token received from all queries so far; newest [Hq, S]
    probabilities of the newest query; state: the role's own numbers [Hk, S] by name, zero for tokens that are new in this step. What the role does
    not need is None. num_layers layers are shown at once to a role that takes several: their heads stand one behind the other. received tells what
    each stored token [Hq, S] received from the newest so many queries where a kernel counts that, else None.
    """

    at: Occupancy
    keys: Tensor
    values: Tensor
    positions: Tensor
    scale: float
    queries: Tensor | None = None
    mass: Tensor | None = None
    newest: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    num_layers: int = 1
    received: Callable[[int], Tensor | None] = lambda window: None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stays: for each KV head ascending int64 indices into the stored tokens, and which of them a quantize role is to encode (bool).

    Where all heads keep equally many, one tensor [Hk, K] does for both.
    """

    kept: tuple[Tensor, ...] | Tensor
    demoted: tuple[Tensor, ...] | Tensor | None = None


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Everything that happens to the KV cache of one model under one policy."""

    policy: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    page_size: int
    buffers: tuple[BufferSpec, ...]
    select: tuple[SelectPlan | None, ...]
    roles: Mapping[str, Meaning] = field(default_factory=dict)
    page_groups: tuple[int, ...] = ()
    evict: EvictPlan | None = None
    quantize: QuantizePlan | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Let every layer share one page table unless the policy says otherwise."""
        if not self.page_groups:
            object.__setattr__(self, "page_groups", (0,) * self.num_layers)

    @property
    def held(self) -> bool:
        """Whether tokens are evicted or encoded in a way that pages do not hold: caches are then tensors of exactly the stored size."""
        return (self.evict is not None or self.quantize is not None) and not self.compacts and not self.mixed

    @property
    def compacts(self) -> bool:
        """Whether tokens are evicted from pages: those that stay move together, and freed pages go back to the pool."""
        return self.evict is not None and (self.evict.paged or self.evict.ragged) and self.quantize is None and not any(self.select)

    @property
    def ragged(self) -> bool:
        """Whether every KV head of every layer has pages of its own, all from one pool: each is then a page group."""
        return self.compacts and self.evict is not None and not self.evict.paged

    @property
    def mixed(self) -> bool:
        """Whether tokens in full precision and encoded ones of a layer have pages of one pool: page groups are the layers, then the layers' codes."""
        return self.quantize is not None and self.quantize.mixed

    @property
    def pooled(self) -> bool:
        """Whether all page groups have pages of one pool."""
        return self.ragged or self.mixed

    @property
    def evicts_once(self) -> bool:
        """Whether tokens go at the end of the prompt alone, equally many of each KV head of a layer, and what stays is encoded."""
        if self.evict is None or self.quantize is None or any(self.select):
            return False
        once = self.evict.paged and self.evict.prompt_only and not self.evict.token_state and "attention_newest" not in self.evict.needs
        return once and not self.quantize.demoted_only

    @property
    def settles(self) -> bool:
        """Whether tokens go while the model decodes, by keys and values alone, and those that will never go are encoded in a leading run."""
        if self.evict is None or self.quantize is None or any(self.select):
            return False
        alone = self.evict.paged and not self.evict.prompt_only and not self.evict.token_state and not self.evict.needs and not self.evict.queries
        return alone and not self.quantize.demoted_only and not self.quantize.flush_first

    @property
    def num_page_groups(self) -> int:
        """Page groups (Y): layers of one group keep equally many tokens and share page numbers; `page_groups` names a ragged layer's first head."""
        if self.mixed:
            return 2 * self.num_layers
        return self.num_layers * self.num_kv_heads if self.ragged else max(self.page_groups) + 1

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data; `from_json` reads it back equal."""
        data = dict(json.loads(json.dumps(asdict(self))))
        if data["evict"] and not data["evict"]["ragged"]:
            del data["evict"]["ragged"]  # the hashes of plans that are recorded know nothing of it
        if data["quantize"] and not data["quantize"]["mixed"]:
            del data["quantize"]["mixed"]
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CachePlan:
        """Read a plan back; raises EngineError when it was written by another format."""
        if data.get("format") != FORMAT:
            raise EngineError(f"the cache plan has format {data.get('format')}, this version reads {FORMAT}", "Build the engine again.")
        try:
            fields = dict(data)
            fields["buffers"] = tuple(
                BufferSpec(**{**spec, "shape": tuple(spec["shape"]), "layers": tuple(spec["layers"])}) for spec in data["buffers"]
            )
            fields["select"] = tuple(SelectPlan(**{**one, "meaning": Meaning(**one["meaning"])}) if one else None for one in data["select"])
            fields["page_groups"] = tuple(data["page_groups"])
            fields["evict"], fields["quantize"] = _evict_plan(data.get("evict")), _quantize_plan(data.get("quantize"))
            fields["roles"] = {kind: Meaning(**one) for kind, one in data["roles"].items()}
            return CachePlan(**fields)
        except (KeyError, TypeError) as error:
            raise EngineError(f"the cache plan is damaged ({error})", "Build the engine again.") from None

    @property
    def hash(self) -> str:
        """Twelve hex digits that change whenever anything in the plan does."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-tokens // self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in full precision, in all layers and paged buffers."""
        return sum(spec.row_bytes * len(spec.layers) for spec in self.buffers if spec.paged and spec.pool == "plain")

    def group_page_bytes(self, group: int) -> int:
        """Bytes of one page in full precision, in the layers of one page group, or in one KV head."""
        if self.ragged:
            return self.page_bytes // self.num_page_groups
        if self.mixed:
            one = {spec.name: spec.row_bytes for spec in self.buffers if spec.paged}
            more = sum(one[name] for name in ("positions", "key_scale", "value_scale"))
            return one["keys"] + one["values"] + self.codes_per_row * more
        paged = [spec for spec in self.buffers if spec.paged and spec.pool == "plain"]
        return sum(spec.row_bytes for spec in paged for layer in spec.layers if self.page_groups[layer] == group)

    @property
    def codes_per_row(self) -> int:
        """Encoded tokens that fit where one lies in full precision, in a mixed plan."""
        return DTYPE_BYTES[self.kv_dtype]

    @property
    def slot_bytes(self) -> int:
        """Bytes that one sequence occupies whatever its length."""
        return sum(spec.row_bytes * len(spec.layers) for spec in self.buffers if not spec.paged)

    def stored_bytes(self, tokens: int) -> int:
        """Bytes that hold data for a sequence of so many tokens, without the unused rest of its last page."""
        return sum(size for _, size in self._stored(tokens))

    def stored_bytes_by_group(self, lengths: Sequence[int]) -> int:
        """Bytes that hold data for a sequence of which the layers of each page group store so many tokens, without bookkeeping."""
        coded = [spec for spec in self.buffers if self.mixed and spec.pool == "encoded"]
        total = sum(spec.row_bytes // self.page_size * sum(map(int, lengths[self.num_layers :])) for spec in coded)
        for spec in self.buffers:
            if spec.paged and spec.pool == "plain" and spec.name not in BOOKKEEPING:
                entry = spec.row_bytes * spec.tokens_per_entry // self.page_size
                if self.mixed:
                    total += sum(map(int, lengths[: self.num_layers])) * entry
                    continue
                if self.ragged:
                    total += sum(map(int, lengths)) * entry // self.num_kv_heads
                    continue
                total += sum(lengths[self.page_groups[layer]] // spec.tokens_per_entry for layer in spec.layers) * entry
        return total

    def reserved_bytes_by_group(self, lengths: Sequence[int]) -> int:
        """Bytes that the pool lends to such a sequence: whole pages and its slot."""
        if self.ragged:
            return sum(self.pages(int(one)) for one in lengths) * self.group_page_bytes(0) + self.slot_bytes
        if self.mixed:
            coded = sum(self.pages(-(-int(one) // self.codes_per_row)) for one in lengths[self.num_layers :])
            return (coded + sum(self.pages(int(one)) for one in lengths[: self.num_layers])) * self.group_page_bytes(0) + self.slot_bytes
        own = (spec.row_bytes * self.pages(lengths[self.page_groups[layer]]) for spec in self.buffers if spec.paged for layer in spec.layers)
        return sum(own) + self.slot_bytes

    def reserved_bytes(self, tokens: int) -> int:
        """Bytes that the pool lends to a sequence of so many tokens: whole pages and its slot."""
        return self.pages(tokens) * self.page_bytes + self.slot_bytes

    def bytes_per_token(self) -> float:
        """Bytes that one more token costs in the long run."""
        return self.page_bytes / self.page_size

    def tokens_read(self, tokens: int) -> float:
        """Tokens whose keys and values one decode step reads, mean over the layers."""
        return sum(one.reads(tokens) if one else tokens for one in self.select) / self.num_layers

    def _stored(self, tokens: int) -> Iterator[tuple[str, int]]:
        for spec in self.buffers:
            if spec.pool == "encoded":
                continue
            if not spec.paged:
                yield spec.name, spec.row_bytes * len(spec.layers)
            else:
                entries_per_page = self.page_size // spec.tokens_per_entry
                yield spec.name, tokens // spec.tokens_per_entry * (spec.row_bytes // entries_per_page) * len(spec.layers)


def _evict_plan(data: Mapping[str, Any] | None) -> EvictPlan | None:
    return EvictPlan(**{**data, "meaning": Meaning(**data["meaning"]), "needs": tuple(data["needs"])}) if data else None


def _quantize_plan(data: Mapping[str, Any] | None) -> QuantizePlan | None:
    return QuantizePlan(**{**data, "meaning": Meaning(**data["meaning"])}) if data else None

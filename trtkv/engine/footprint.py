"""What one sequence's cache holds under a policy, layer by layer, from integers alone: tokens, and bytes of every buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plugins.cache.encodings.grouped import store as encoded
from plugins.cache.encodings.grouped.formats import Format, find_format
from plugins.cache.encodings.grouped.ledger import SettledLedger
from plugins.cache.support import why_torch
from trtkv.config import ModelConfig
from trtkv.plan import BOOKKEEPING, BufferSpec, CachePlan
from trtkv.policies.compacted import state_buffers
from trtkv.policies.policy import Policy
from trtkv.policies.schedule import Stored, prefill_peak, trajectory

DEFAULT_CHUNK = 2048


@dataclass(frozen=True)
class Footprint:
    """The cache of one sequence of a model under a policy; prompts are read in chunks of `chunk` tokens.

    A policy that encodes, where kernels do so, lends whole pages of codes and a ring of newest tokens a sequence; another one that encodes, or whose
    KV heads keep different numbers of tokens, holds a cache exactly as long as it is; any other lends whole pages.
    """

    model: ModelConfig
    policy: Policy
    chunk: int = DEFAULT_CHUNK
    plan: CachePlan = field(init=False)

    def __post_init__(self) -> None:
        """Lower the policy; raises ConfigError or PolicyConflict when it cannot work."""
        object.__setattr__(self, "plan", self.policy.plan(self.model))

    @cached_property
    def form(self) -> Format | None:
        """How kernels store what is encoded, None where nothing is or no kernel does."""
        return find_format(self.plan) if why_torch(self.plan) is None else None

    @property
    def held(self) -> bool:
        """Whether tokens are held in tensors of exactly their size."""
        return self.plan.held and self.form is None

    @property
    def shrinks(self) -> bool:
        """Whether tokens are evicted or encoded, so that lengths differ from the context's."""
        return self.plan.held or self.plan.compacts or self.plan.mixed

    @property
    def data(self) -> tuple[BufferSpec, ...]:
        """Keys, values, codes and summaries."""
        if not self.plan.compacts and not self.plan.mixed:
            return self.plan.buffers
        return tuple(spec for spec in self.plan.buffers if spec not in self.scores and spec.name not in BOOKKEEPING)

    @property
    def lasting_scores(self) -> tuple[BufferSpec, ...]:
        """Those that are kept behind the prompt: none where eviction ends with it and the scores lie beside the pages."""
        evict = self.policy.evict
        return () if evict is not None and evict.prompt_only and not evict.token_state and not self.plan.compacts else self.scores

    @property
    def scores(self) -> tuple[BufferSpec, ...]:
        """What the evict role keeps for every stored token beside them while a prompt is read."""
        evict, plan = self.policy.evict, self.plan
        if evict is None:
            return ()
        if plan.compacts or plan.mixed:
            assert plan.evict is not None
            return tuple(spec for spec in state_buffers(plan.evict, self.model, plan.page_size) if spec.name not in BOOKKEEPING)
        every = tuple(range(plan.num_layers))
        kept = [BufferSpec(name, ("P", plan.num_kv_heads, plan.page_size), "P Hk N", dtype, every) for name, dtype in evict.token_state.items()]
        if "attention_mass" in evict.needs:
            kept.append(BufferSpec("attention_mass", ("P", plan.num_q_heads, plan.page_size), "P Hq N", "float32", every))
        return tuple(kept)

    def layers(self, prompt: int) -> tuple[Stored, ...]:
        """Return what each layer stores behind a prompt; where an allocate role measures it, all layers are taken to be alike."""
        policy, model = self.policy, self.model
        grants = None
        if policy.evict and policy.allocate and policy.allocate.measured:
            import torch  # only roles that measure need it, and it is slow to import

            alike = torch.ones(model.num_layers, model.num_kv_heads)
            grants = policy.evict.grants(policy.allocate, model.num_layers, model.num_kv_heads, prompt, alike)
        elif policy.evict:
            grants = policy.evict.grants(policy.allocate, model.num_layers, model.num_kv_heads, prompt)
        found = []
        for layer in range(model.num_layers):
            own = trajectory(policy, prompt, 0, num_kv_heads=model.num_kv_heads, layer=layer, num_layers=model.num_layers, grants=grants)[0]
            if self.counts_demoted:
                precise = grants.precise[layer][0] if grants and grants.precise else None
                low = policy.evict.expected_tokens(prompt, 0, precise)[1]  # type: ignore[union-attr]
                own = Stored(own.lengths, (low, low))
            found.append(own)
        return tuple(found)

    @property
    def counts_demoted(self) -> bool:
        """Whether the evict role chooses which tokens are encoded and can say how many those will be."""
        return bool(self.policy.quantize and self.policy.quantize.demoted_only and hasattr(self.policy.evict, "expected_tokens"))

    def layers_at_peak(self, prompt: int) -> tuple[Stored, ...]:
        """Return the most that each layer stores while the prompt is read: nothing is encoded before its end, and few roles evict."""
        heads, num_layers = self.model.num_kv_heads, self.model.num_layers
        most = [prefill_peak(self.policy, prompt, self.chunk, num_kv_heads=heads, layer=layer, num_layers=num_layers) for layer in range(num_layers)]
        return tuple(Stored((one,) * heads, (0, 0)) for one in most)

    def stored_bytes(self, prompt: int) -> int:
        """Return the bytes of keys, values, codes and summaries that hold data behind a prompt."""
        return self.bytes_of(self.data, self.layers(prompt)) if self.shrinks else self.plan.stored_bytes(prompt)

    def score_bytes(self, prompt: int) -> int:
        """Return the bytes of the evict role's numbers behind a prompt."""
        return self.bytes_of(self.lasting_scores, self.layers(prompt)) if self.lasting_scores else 0

    def reserved_bytes(self, prompt: int) -> int:
        """Return the bytes that a sequence occupies behind its prompt: whole pages, with a ring beside codes, or what is held with its scores."""
        if self.form is not None:
            pages = sum(count * encoded.group_bytes(self.plan, group) for group, count in enumerate(self.coded_pages(prompt)))
            return pages + encoded.slot_bytes(self.plan, self.form)
        if self.plan.compacts or self.plan.mixed:
            return self.plan.reserved_bytes_by_group(self.by_group(self.layers(prompt)))
        return self.stored_bytes(prompt) + self.score_bytes(prompt) if self.held else self.plan.reserved_bytes(prompt)

    def coded_pages(self, prompt: int) -> list[int]:
        """Return the pages of each page group behind a prompt where kernels encode: those of its tokens, or of the settled ones."""
        if self.form is not None and self.form.window:
            return SettledLedger(self.plan).settled_pages(prompt)
        return [self.plan.pages(one) for one in self.by_group(self.layers(prompt))]

    def peak_bytes(self, prompt: int) -> int:
        """Return the most bytes that a sequence occupies while its prompt is read, and behind it."""
        if self.form is not None:
            return self.reserved_bytes(prompt) + encoded.prompt_bytes(self.plan, prompt, whole=prompt <= self.chunk, chunk=self.chunk)
        if self.plan.mixed:  # codes are written while what they come from is still there
            layers, behind = self.plan.num_layers, self.by_group(self.layers(prompt))
            return max(
                self.reserved_bytes(prompt), self.plan.reserved_bytes_by_group(self.by_group(self.layers_at_peak(prompt))[:layers] + behind[layers:])
            )
        if self.plan.compacts:
            return max(self.reserved_bytes(prompt), self.plan.reserved_bytes_by_group(self.by_group(self.layers_at_peak(prompt))))
        if not self.held:
            return self.plan.reserved_bytes(prompt)
        return max(self.reserved_bytes(prompt), self.bytes_of((*self.plan.buffers, *self.scores), self.layers_at_peak(prompt)))

    def tokens_read(self, prompt: int) -> float:
        """Return the tokens whose keys and values a decode step reads, mean over layers and KV heads."""
        read = 0.0
        for own, select in zip(self.layers(prompt), self.plan.select, strict=True):
            mean = sum(own.lengths) / len(own.lengths)
            read += min(mean, select.budget) if select else mean
        return read / self.model.num_layers

    def by_group(self, layers: Sequence[Stored]) -> list[int]:
        """Return the tokens of each page group, whose layers are alike, or of every KV head of every layer where those are the groups."""
        if self.plan.ragged:
            return [length for layer in layers for length in layer.lengths]
        if self.plan.mixed:
            return [layer.lengths[0] - layer.encoded[0] for layer in layers] + [layer.encoded[0] for layer in layers]
        return [layers[self.plan.page_groups.index(group)].lengths[0] for group in range(self.plan.num_page_groups)]

    def bytes_of(self, specs: Sequence[BufferSpec], layers: Sequence[Stored]) -> int:
        """Return the bytes of these buffers for one sequence that holds so much in each layer."""
        total = 0
        for spec in specs:
            for layer in spec.layers:
                total += sum(self.entries(spec, layers[layer])) * self.entry_bytes(spec) if spec.paged else spec.row_bytes
        return total

    def entries(self, spec: BufferSpec, own: Stored) -> tuple[int, ...]:
        """Return the entries of a paged buffer in one layer, for each KV head."""
        part = 1 if spec.name.startswith("value") else 0  # codes and metadata are named after what they encode
        found = []
        for length in own.lengths:
            coded = min(own.encoded[part], length)
            tokens = coded if spec.pool == "encoded" else length - coded if spec.name in ("keys", "values") else length
            found.append(tokens // spec.tokens_per_entry)
        return tuple(found)

    def entry_bytes(self, spec: BufferSpec) -> int:
        """Return the bytes of one entry of a paged buffer for one KV head (with its group's query heads)."""
        return spec.row_bytes * spec.tokens_per_entry // (self.plan.page_size * self.plan.num_kv_heads)

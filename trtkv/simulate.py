"""Any policy's reference meaning over raw tensors, without a model: `simulate(policy, q, k, v)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtkv.errors import ConfigError
from trtkv.plan import CacheView, Occupancy, Phase
from trtkv.policies.base import Grants
from trtkv.policies.policy import Policy
from trtkv.policies.ranking import span
from trtkv.policies.registry import parse_policy
from trtkv.policies.selection import choose, pool, speculative_query, tokens_of
from trtkv.policies.store import PARTS, HeadStore


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a policy did to one layer of one sequence.

    output [T, Hq, D] in the input's dtype. Step 0 is the prompt, step i the i-th generated token: kept[i][h] are the logical positions int64 that KV
    head h stores behind step i, stored_bytes[i] the bytes of keys and values as held (codes and metadata included), state_bytes[i] those of
    summaries and scores beside them, lengths[i] the tokens in full precision and encoded of the fullest head. For each generated token: selected
    holds the logical positions that each KV head read (each query head, where every one selects for itself), None where all stored were;
    attention_error the L2 error of the layer's output relative to full attention; covered the share of full attention's probability that was
    read; recall the share of full attention's `top` tokens that were.
    """

    output: Tensor
    kept: list[tuple[Tensor, ...]]
    selected: list[tuple[Tensor, ...] | None]
    stored_bytes: list[int]
    state_bytes: list[int]
    lengths: list[tuple[int, int]]
    attention_error: list[float]
    covered: list[float]
    recall: list[float]

    @property
    def mean_error(self) -> float:
        """Mean attention error over the generated tokens, 0 without any."""
        return sum(self.attention_error) / max(1, len(self.attention_error))

    @property
    def mean_covered(self) -> float:
        """Mean covered attention over the generated tokens, 1 without any."""
        return sum(self.covered) / len(self.covered) if self.covered else 1.0

    @property
    def mean_recall(self) -> float:
        """Mean recall over the generated tokens, 1 without any."""
        return sum(self.recall) / len(self.recall) if self.recall else 1.0


def simulate(
    policy: str | Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prefill: int,
    layer: int | None = None,
    num_layers: int = 32,
    chunk: int | Sequence[int] | None = None,
    scale: float | None = None,
    measures: Tensor | None = None,
    top: int = 32,
    budget: int | None = None,
    sets: Iterable[str] = (),
) -> Simulation:
    """Run a policy over one layer of one sequence: queries q [T, Hq, D], keys k and values v [T, Hk, D] after rotation, any float dtype, any device.

    The first `prefill` tokens are the prompt, in chunks of so many tokens (a number or the sizes one by one) or whole; the others are decoded one by
    one. layer (a middle one by default) of num_layers matters to policies that treat layers differently; measures [L, Hk] fp32 are what an
    allocate role measured in all layers (this layer's row is replaced by its own measure; without it all layers are taken to be alike). scale is
    attention's, 1 / sqrt(D) by default. budget and sets edit a policy given by name.
    Raises UnknownName, PolicyConflict or ConfigError for a policy that cannot work, and ConfigError for tensors that do not fit.
    """
    if isinstance(policy, str):
        policy = parse_policy(policy, budget=budget, sets=sets)
    policy.check()
    _check_tensors(q, k, v, prefill)
    layer = num_layers // 2 if layer is None else layer
    if not 0 <= layer < num_layers:
        raise ConfigError(f"layer {layer} is outside the {num_layers} layers", f"Give a layer from 0 to {num_layers - 1}.")
    run = _Run(policy, q, k, v, prefill, layer, num_layers, scale or q.shape[2] ** -0.5, measures, top)
    with torch.no_grad():
        return run(_chunks(prefill, chunk))


@dataclass(slots=True)
class _Run:
    policy: Policy
    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int
    layer: int
    num_layers: int
    scale: float
    measures: Tensor | None
    top: int
    heads: list[HeadStore] = field(default_factory=list)
    summary: dict[str, Tensor] = field(default_factory=dict)
    summarized: int = 0
    previous: Tensor | None = None
    encoded: tuple[int, int] = (0, 0)
    settled: int = 0
    granted: Grants = field(default_factory=lambda: Grants(None, None))

    def __call__(self, chunks: Sequence[int]) -> Simulation:
        """Run the prompt in chunks, then every other token."""
        evict = self.policy.evict
        group, empty = self.q.shape[1] // self.k.shape[1], self.k[:0, 0]
        state = evict.token_state if evict else {}
        self.heads = [HeadStore(empty, group, state, self.policy.quantize) for _ in range(self.k.shape[1])]
        done = Simulation(torch.empty_like(self.q), [], [], [], [], [], [], [], [])
        start = 0
        for size in chunks:
            self._step(start, start + size, "prefill", done)
            start += size
        self._record(done)
        for token in range(start, len(self.q)):
            self._step(token, token + 1, "decode", done)
            self._record(done)
        return done

    def _step(self, start: int, stop: int, phase: Phase, done: Simulation) -> None:
        """Append tokens [start, stop), attend, evict, encode: the order that `policies.base` states."""
        for head, store in enumerate(self.heads):
            store.append(self.k[start:stop, head], self.v[start:stop, head], start)
        at = self._occupancy(start, stop, phase)
        if phase == "decode" and self.policy.quantize and self.policy.quantize.flush_first:
            self._flush(at)
        self._summarize()
        chosen = self._select(self.q[start].float(), len(self.heads[0])) if phase == "decode" else None
        done.output[start:stop] = self._attend(start, stop, chosen).to(done.output.dtype)
        if phase == "decode":
            self._compare(start, chosen, done)
            self.previous = self.q[start].float()
        self._evict(at)
        if self.policy.quantize:
            self._flush(self._occupancy(start, stop, phase))

    def _occupancy(self, start: int, stop: int, phase: Phase) -> Occupancy:
        grants, lengths = self.granted, tuple(len(store) for store in self.heads)
        return Occupancy(
            seen=stop,
            lengths=lengths,
            new=stop - start,
            settled=self.settled if self.policy.evict else min(lengths),
            phase=phase,
            complete=stop >= self.prompt,
            prompt=self.prompt,
            layer=self.layer,
            num_layers=self.num_layers,
            budget=grants.tokens[self.layer] if grants.tokens else None,
            precise=grants.precise[self.layer] if grants.precise else None,
        )

    def _attend(self, start: int, stop: int, chosen: Tensor | None) -> Tensor:
        """Attend with queries [start, stop) over what is stored, or over the chosen tokens [Hq, S] bool: [n, Hq, D] fp32."""
        group, outputs = self.q.shape[1] // len(self.heads), []
        asked = span(start, stop, self.q)
        for head, store in enumerate(self.heads):
            queries = self.q[start:stop, head * group : (head + 1) * group].float().transpose(0, 1)
            visible = store.positions <= asked[:, None]
            if chosen is not None:
                visible = visible & chosen[head * group : (head + 1) * group, None]
            keys, values = (store.parts[part].decoded() for part in PARTS)
            probs = (queries @ keys.T * self.scale).masked_fill(~visible, float("-inf")).softmax(-1)
            store.mass, store.newest = store.mass + probs.sum(1), probs[:, -1]
            outputs.append(probs @ values)
        return torch.cat(outputs).transpose(0, 1)

    def _summarize(self) -> None:
        """Summarize the groups of tokens that have closed since the last time."""
        role = self.policy.retrieve
        if role is None or self.layer < role.dense_layers:
            return
        closed = len(self.heads[0]) // role.summary_group * role.summary_group
        if closed > self.summarized:
            keys = torch._stack([store.parts["keys"].decoded()[self.summarized : closed] for store in self.heads])
            new = role.summarize(keys.to(self.k.dtype))
            self.summary = {name: torch.cat([self.summary[name], x], 1) if self.summarized else x for name, x in new.items()}
            self.summarized = closed

    def _select(self, query: Tensor, stored: int) -> Tensor | None:
        """Return the tokens [Hq, S] bool that each query head reads, or None for all."""
        role = self.policy.retrieve
        if role is None or self.layer < role.dense_layers or stored <= role.budget:
            return None
        heads = len(self.heads)
        asking = speculative_query(role, query, self.previous, heads)
        pooled = pool(role.score(asking, self.summary), heads, self.scale, role.pooling)
        forced = role.forced(self.summary)
        if forced is not None:
            forced = forced.repeat_interleave(len(pooled) // heads, 0)
        units = choose(role, pooled, stored, forced)
        read = torch.zeros(len(pooled), stored, dtype=torch.bool, device=query.device)
        for row, own in zip(read, units, strict=True):
            row[tokens_of(own, role.unit, stored)] = True
        return read.repeat_interleave(self.q.shape[1] // len(read), 0)

    def _view(self, at: Occupancy) -> CacheView:
        evict, allocate = self.policy.evict, self.policy.allocate
        needs = evict.needs if evict else frozenset()
        window = max(evict.observe_window if evict else 0, allocate.observe_window if allocate else 0)
        return CacheView(
            at=at,
            keys=_stack([store.parts["keys"].decoded() for store in self.heads]),
            values=_stack([store.parts["values"].decoded() for store in self.heads]),
            positions=_stack([store.positions for store in self.heads], -1),
            scale=self.scale,
            queries=self.q[max(0, at.seen - window) : at.seen].float() if window else None,
            mass=_stack([store.mass.T for store in self.heads]).transpose(1, 2).flatten(0, 1) if "attention_mass" in needs else None,
            newest=_stack([store.newest.T for store in self.heads]).transpose(1, 2).flatten(0, 1) if "attention_newest" in needs else None,
            state={name: _stack([store.state[name] for store in self.heads]) for name in (evict.token_state if evict else {})},
        )

    def _evict(self, at: Occupancy) -> None:
        evict, allocate = self.policy.evict, self.policy.allocate
        if evict is None:
            self.settled = min(at.lengths)
            return
        if evict.token_state:
            for name, x in evict.observe(self._view(at)).items():
                for store, row in zip(self.heads, x, strict=True):
                    store.state[name] = row[: len(store)]
        if at.complete and at.phase == "prefill":
            measured = self._measured(at) if allocate and allocate.measured else None
            self.granted = evict.grants(allocate, self.num_layers, len(self.heads), self.prompt, measured)
            at = self._occupancy(at.seen - at.new, at.seen, at.phase)
        if evict.due(at):
            verdict = evict.keep(self._view(at))
            demote = self.policy.quantize is not None and self.policy.quantize.demoted_only
            for head, (store, kept) in enumerate(zip(self.heads, verdict.kept, strict=True)):
                marked = verdict.demoted[head] if verdict.demoted else torch.zeros_like(kept, dtype=torch.bool)
                store.keep(kept, marked if demote else None)
            self.summarized = 0
        self.settled = evict.settled(self._occupancy(at.seen - at.new, at.seen, at.phase))

    def _measured(self, at: Occupancy) -> Tensor:
        assert self.policy.allocate is not None
        own = self.policy.allocate.measure(self._view(at)).float()
        every = own.expand(self.num_layers, -1).clone() if self.measures is None else self.measures.to(own).clone()
        every[self.layer] = own
        return every

    def _flush(self, at: Occupancy) -> None:
        quantize = self.policy.quantize
        if quantize is None or quantize.demoted_only:
            return
        self.encoded = quantize.flush(at, self.encoded)
        for store in self.heads:
            for part, count in zip(PARTS, self.encoded, strict=True):
                store.parts[part].encode_until(min(count, len(store)))

    def _compare(self, token: int, chosen: Tensor | None, done: Simulation) -> None:
        """Set this step against full attention over everything seen, in fp32."""
        group = self.q.shape[1] // len(self.heads)
        keys, values = (x[: token + 1].float().transpose(0, 1).repeat_interleave(group, 0) for x in (self.k, self.v))
        probs = (keys @ self.q[token].float()[..., None] * self.scale)[..., 0].softmax(-1)
        exact = (probs[:, None] @ values)[:, 0]
        read = torch.zeros_like(probs, dtype=torch.bool)
        for row in range(len(read)):
            positions = self.heads[row // group].positions
            read[row, positions if chosen is None else positions[chosen[row]]] = True
        best = probs.topk(min(self.top, token + 1), -1).indices
        done.attention_error.append(float((done.output[token].float() - exact).norm() / exact.norm().clamp(min=1e-20)))
        done.covered.append(float((probs * read).sum(-1).mean()))
        done.recall.append(float(read.gather(1, best).float().mean()))
        step = group if self.policy.retrieve and self.policy.retrieve.pooling != "none" else 1
        done.selected.append(None if chosen is None else tuple(row.nonzero()[:, 0] for row in read[::step]))

    def _record(self, done: Simulation) -> None:
        done.kept.append(tuple(store.positions.clone() for store in self.heads))
        done.stored_bytes.append(sum(store.parts[part].nbytes() for store in self.heads for part in PARTS))
        fullest = max(self.heads, key=len).parts["keys"]
        done.lengths.append((len(fullest.plain), int(fullest.coded.sum())))
        evict = self.policy.evict
        beside = [*self.summary.values(), *(x for store in self.heads for x in store.state.values())]
        beside += [store.mass for store in self.heads] if evict and "attention_mass" in evict.needs else []
        done.state_bytes.append(sum(x.numel() * x.element_size() for x in beside))


def _stack(rows: Sequence[Tensor], fill: float = 0.0) -> Tensor:
    """Stack [S, ...] of every head to [Hk, S, ...], filling up the shorter ones."""
    longest = max(map(len, rows))
    return torch.stack([torch.cat([row, row.new_full((longest - len(row), *row.shape[1:]), fill)]) for row in rows])


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, prefill: int) -> None:
    """Raise ConfigError for tensors that do not belong together or hold numbers that are none."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or not x.is_floating_point():
            raise ConfigError(
                f"{name} is {x.dtype} of shape {list(x.shape)}", "Give floating-point tensors [tokens, heads, head dim] of one sequence."
            )
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} disagree", "Give q [T, Hq, D] and k, v [T, Hk, D] with the same T and D."
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ConfigError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} key-value heads", "Give a multiple of the key-value heads.")
    if not k.shape[2] or k.shape[2] % 16:
        raise ConfigError(f"head dimension {k.shape[2]} is not a multiple of 16", "Such heads are not supported.")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        raise ConfigError("q, k and v differ in dtype or device", "Bring them to one dtype and device.")
    if prefill < 1:
        raise ConfigError(f"the prompt has {prefill} tokens", "Give prefill=1 or more.")
    if prefill > len(q):
        raise ConfigError(f"prefill {prefill} is beyond the {len(q)} tokens of q", f"Give at most {len(q)}.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not bool(torch.isfinite(x).all()):
            token = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
            raise ConfigError(f"{name} holds NaN or infinite numbers from token {token} on", "Look for an overflow where it was computed.")


def _chunks(prefill: int, chunk: int | Sequence[int] | None) -> list[int]:
    """Return the sizes of the prompt's chunks; raises ConfigError unless they are positive and make up the prompt."""
    if chunk is None:
        return [prefill]
    if isinstance(chunk, int):
        chunk = [min(chunk, prefill - start) for start in range(0, prefill, chunk)] if chunk > 0 else [chunk]
    sizes = list(chunk)
    if not sizes or min(sizes) < 1 or sum(sizes) != prefill:
        raise ConfigError(f"chunks {sizes} do not make up a prompt of {prefill} tokens", "Give a positive size, or sizes that add up to the prompt.")
    return sizes

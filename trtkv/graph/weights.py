"""Which checkpoint tensors make up which graph input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trtkv.config import ModelConfig


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A graph input and the checkpoint tensors that it is stacked from along the first axis.

    shape is that of the graph input; sources are names and shapes in the checkpoint; a bias [out] becomes [1, out].
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]


def weight_specs(model: ModelConfig, tp: int = 1) -> list[WeightSpec]:
    """List the weights of a decoder in the order of the graph's inputs.

    With tp above 1 model is one part: shapes are the part's, sources the whole tensors, of which a part takes rows, or columns of `o` and `down`.
    The embedding stays whole, because a step reads few of its rows; a head that is tied to it becomes a separate input where parts share it.
    """
    e, v = model.hidden_size, model.vocab_size
    specs = [_single("embed", "model.embed_tokens.weight", (v, e))]
    for layer in range(model.num_layers):
        specs += _layer(model, layer, tp)
    specs.append(_single("norm", "model.norm.weight", (e,)))
    if shares_head(model, tp) or not model.tie_embeddings:
        rows = v // tp if shares_head(model, tp) else v
        specs.append(WeightSpec("head", (rows, e), (("model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight", (v, e)),)))
    return specs


def shares_head(model: ModelConfig, tp: int) -> bool:
    """Say whether each of several parts has its own rows of the head: where the vocabulary divides."""
    return tp > 1 and model.vocab_size % tp == 0


def expected_tensors(specs: list[WeightSpec]) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every checkpoint tensor that the specs need."""
    return {name: shape for spec in specs for name, shape in spec.sources}


def _layer(model: ModelConfig, layer: int, tp: int) -> Iterator[WeightSpec]:
    e, f, d = model.hidden_size, model.intermediate_size, model.head_dim
    q, kv = model.num_q_heads * d, model.num_kv_heads * d
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    attention = [(f"{theirs}.self_attn.{name}_proj", rows) for name, rows in (("q", q * tp), ("k", kv * tp), ("v", kv * tp))]
    yield _single(f"{ours}.attention_norm", f"{theirs}.input_layernorm.weight", (e,))
    yield WeightSpec(f"{ours}.qkv", (q + 2 * kv, e), tuple((f"{name}.weight", (rows, e)) for name, rows in attention))
    if model.qkv_bias:
        yield WeightSpec(f"{ours}.qkv_bias", (1, q + 2 * kv), tuple((f"{name}.bias", (rows,)) for name, rows in attention))
    if model.qk_norm:
        yield _single(f"{ours}.q_norm", f"{theirs}.self_attn.q_norm.weight", (d,))
        yield _single(f"{ours}.k_norm", f"{theirs}.self_attn.k_norm.weight", (d,))
    yield WeightSpec(f"{ours}.o", (e, q), ((f"{theirs}.self_attn.o_proj.weight", (e, q * tp)),))
    yield _single(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm.weight", (e,))
    gate_up = tuple((f"{theirs}.mlp.{name}_proj.weight", (f * tp, e)) for name in ("gate", "up"))
    yield WeightSpec(f"{ours}.gate_up", (2 * f, e), gate_up)
    yield WeightSpec(f"{ours}.down", (e, f), ((f"{theirs}.mlp.down_proj.weight", (e, f * tp)),))


def _single(name: str, source: str, shape: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(name, shape, ((source, shape),))

"""Subclasses of TensorRT-LLM's Qwen and LLaMA models whose attention is trtkv's plugins.

The attention objects stay those that TensorRT-LLM made, with their qkv and dense layers under the same names; they only take another class. So
checkpoints load and quantization, which follows __init__, finds what it looks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from trtkv.config import Limits
from trtkv.errors import BuildError
from trtkv.integrations.tensorrt_llm.network import Emitter, declare_inputs, rope_rows
from trtkv.integrations.tensorrt_llm.settings import cache_plan, model_config, refuse_flags
from trtkv.integrations.tensorrt_llm.surface import Surface, load_surface

# What a step may not request, by the name under which TensorRT-LLM passes it to an attention layer or to prepare_inputs.
REFUSED_CALLS = ("attention_mask", "spec_decoding_params", "mrope_params", "lora_layer_params", "encoder_output", "cross_kv_cache_gen", "skip_attn")
REFUSED_INPUTS = (
    "max_draft_len",
    "prompt_embedding_table_size",
    "position_encoding_2d",
    "speculative_decoding_draft_tokens_external",
    "gather_context_logits",
    "lora_target_modules",
    "mrope_rotary_cos_sin_size",
)


@dataclass(frozen=True, slots=True)
class Models:
    """The two classes: qwen serves Qwen2, 2.5 and 3, llama serves Llama 2 and 3 and Mistral."""

    qwen: Any
    llama: Any


@cache
def models() -> Models:
    """Make the classes over the installed TensorRT-LLM; raises BuildError when it is missing or builds no TensorRT engines."""
    surface = load_surface()
    attention, params = _attention_class(surface), _params_class(surface)
    bases = (("QWenForCausalLM", surface.qwen), ("LLaMAForCausalLM", surface.llama))
    qwen, llama = (type(name, (_DecoderMixin, base), {"surface": surface, "kinds": (attention, params)}) for name, base in bases)
    return Models(qwen, llama)


def _params_class(surface: Surface) -> Any:
    class StepParams(surface.attention_params):  # type: ignore[name-defined, misc]
        """Carries the tensors of a step through TensorRT-LLM's layers, which pass it on by reference."""

        step: dict[str, Any]

    return StepParams


def _attention_class(surface: Surface) -> Any:
    class KvAttention(surface.attention):  # type: ignore[name-defined, misc]
        """TensorRT-LLM's attention with trtkv's nodes between the qkv and the dense layer."""

        def forward(self, hidden_states: Any, use_cache: bool = False, attention_params: Any = None, **others: Any) -> Any:
            """Add the layer to the network: hidden states [T, E] in and out. What else TensorRT-LLM passes belongs to its attention."""
            for name in REFUSED_CALLS:
                if others.get(name) is not None:
                    raise BuildError(f"{name} reached layer {self.trtkv_layer}, which trtkv's attention does not support", "Build without it.")
            qkv = self.qkv(hidden_states)
            norms = [self.q_layernorm.weight.value, self.k_layernorm.weight.value] if self.qk_layernorm else []
            attended = self.trtkv_emitter.attention(self.trtkv_layer, qkv, attention_params.step, norms)
            out = self.dense(attended)
            return (out, None) if use_cache else out

    return KvAttention


class _DecoderMixin:
    """Precedes TensorRT-LLM's model class: exchanges the attention at the end of __init__, and declares trtkv's inputs."""

    surface: Surface
    kinds: tuple[Any, Any]

    def __init__(self, config: Any) -> None:
        model = model_config(config)
        plan = cache_plan(config, model)
        super().__init__(config)  # type: ignore[call-arg]
        self.trtkv_emitter = Emitter(self.surface, model, plan)
        for layer, block in enumerate(self.transformer.layers):  # type: ignore[attr-defined]
            _check_attention(layer, block.attention, model.qk_norm)
            block.attention.__class__ = self.kinds[0]
            block.attention.trtkv_layer, block.attention.trtkv_emitter = layer, self.trtkv_emitter

    def prepare_inputs(
        self,
        max_batch_size: int,
        max_input_len: int,
        max_seq_len: int,
        max_num_tokens: int,
        use_cache: bool = True,
        max_beam_width: int = 1,
        **others: Any,
    ) -> dict[str, Any]:
        """Declare the inputs of the core path's graph and return them as forward's arguments; raises BuildError or ConfigError."""
        emitter, surface = self.trtkv_emitter, self.surface
        refuse_flags(surface.default_net().plugin_config)
        self._refuse(max_beam_width, others)
        limits = Limits(max_seq_len=max_seq_len, max_batch_size=max_batch_size, max_chunk_tokens=max_num_tokens).check(emitter.model)
        step = declare_inputs(surface, emitter.model, emitter.plan, limits)
        table = self.embed_positions_for_gpt_attention.raw_value  # type: ignore[attr-defined]
        step["rope"] = surface.constant(rope_rows(table, emitter.model.head_dim, max_seq_len))
        params = self.kinds[1]()
        params.step = step
        return {
            "input_ids": step["token_ids"],
            "position_ids": step["positions"],
            "use_cache": False,  # the cache is no tensor of the network
            "last_token_ids": step["last_rows"] + 1,  # TensorRT-LLM counts from one
            "attention_mask": None,
            "kv_cache_params": surface.kv_cache_params(),
            "attention_params": params,
        }

    def _refuse(self, max_beam_width: int, others: dict[str, Any]) -> None:
        if max_beam_width != 1:
            raise BuildError(f"max_beam_width is {max_beam_width}", "Build with --max_beam_width 1: trtkv's runtime samples.")
        for name in REFUSED_INPUTS:
            if others.get(name):
                raise BuildError(f"{name} is {others[name]}, which trtkv's engines do not support", "Build without it.")
        for layer, block in enumerate(self.transformer.layers):  # type: ignore[attr-defined]
            if not isinstance(block.attention, self.kinds[0]):
                kind = type(block.attention).__name__
                raise BuildError(f"TensorRT-LLM put {kind} in the place of the attention of layer {layer}", "Take another quantization.")


def _check_attention(layer: int, attention: Any, qk_norm: bool) -> None:
    """Raise BuildError for an attention layer that does more than the plugins do."""
    if bool(attention.qk_layernorm) != qk_norm:
        has = "lacks" if qk_norm else "has"
        raise BuildError(f"layer {layer} {has} a norm of queries and keys, unlike its architecture", "Take another checkpoint.")

    for name in ("clip_qkv", "use_logn_scaling"):
        value = getattr(attention, name, None)
        if value is not None and value is not False:
            raise BuildError(f"layer {layer} has {name}, which trtkv's attention does not support", "Take another checkpoint.")

"""The networks, tensors and layers of TensorRT-LLM 1.2.x that the adapter may touch, for `fake_tensorrt_llm.py`, which tests take them from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np

from tests.integrations.fake_tensorrt import DataType, INetworkDefinition, ITensor, Layer

# tensorrt_llm._common, .functional


class PluginConfig:
    def __init__(self) -> None:
        self.remove_input_padding = True
        self.paged_kv_cache = True
        self.gpt_attention_plugin: str | None = "auto"
        self.reduce_fusion = self.user_buffer = self.norm_quant_fusion = self.use_fp8_context_fmha = self.fuse_fp4_quant = False
        self.pp_reduce_scatter = False
        self.lora_plugin: str | None = None


class Network:
    def __init__(self, plugin_config: PluginConfig) -> None:
        self.trt_network, self.plugin_config = INetworkDefinition(), plugin_config
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Any] = {}
        self.constants: list[np.ndarray] = []
        self.modules: dict[Module, str] = {}  # paths, from the first module that is called
        self.calls: list[Module] = []
        self.names: dict[str, int] = {}

    def set_layer_name(self, layer: Layer) -> None:
        """Name a layer by the module that adds it and its kind, numbered, and its outputs by that."""
        path = "/".join([*(self.modules.get(one, "").replace(".", "/") for one in self.calls[-1:]), layer.type.name])
        self.names[path] = self.names.get(path, -1) + 1
        layer.name = f"{path}_{self.names[path]}"
        for index in range(layer.num_outputs):
            layer.get_output(index).name = f"{layer.name}_output_{index}"


_net: Network | None = None


@contextmanager
def net_guard(network: Network) -> Iterator[None]:
    global _net
    _net = network
    try:
        yield
    finally:
        _net = None


def default_net() -> Network:
    assert _net is not None, "no network is set"
    return _net


def default_trtnet() -> INetworkDefinition:
    return default_net().trt_network


class Tensor:
    def __init__(
        self,
        name: str | None = None,
        dtype: str | None = None,
        shape: Sequence[int] | None = None,
        dim_range: OrderedDict[str, list[Any]] | None = None,
        is_network_input: bool = True,
        location: Any = None,
        network: Any = None,
        trt_tensor: ITensor | None = None,
    ) -> None:
        self.profiles: list[dict[str, Any]] = []
        if trt_tensor is not None:
            self.trt_tensor = trt_tensor
            return
        assert name and dtype and shape is not None and isinstance(dim_range, OrderedDict) and len(dim_range) == len(shape)
        assert len({len(ranges) for ranges in dim_range.values()}) == 1
        for index in range(len(next(iter(dim_range.values())))):
            self.profiles.append({dim: ranges[index] for dim, ranges in dim_range.items()})
        for size, ranges in zip(shape, dim_range.values(), strict=True):
            for one in ranges:
                assert one == size if isinstance(one, int) else size == -1 and len(one) == 3 and 0 <= one[0] <= one[1] <= one[2]
        self.trt_tensor = ITensor(name, DataType(dtype), shape)
        default_net().inputs[name] = self

    @property
    def name(self) -> str:
        return self.trt_tensor.name

    def mark_output(self, name: str | None = None, dtype: str | None = None) -> None:
        default_net().outputs[name or self.name] = (self.name, dtype)

    def __add__(self, other: int) -> Tensor:
        return _wrap(f"{self.name}+{other}", self.trt_tensor.dtype, self.trt_tensor.shape)


def _wrap(name: str, dtype: DataType, shape: Sequence[int]) -> Tensor:
    return Tensor(is_network_input=False, trt_tensor=ITensor(name, dtype, shape))


def _create_tensor(trt_tensor: ITensor, producer: Layer) -> Tensor:
    assert isinstance(trt_tensor, ITensor) and isinstance(producer, Layer)
    default_net().set_layer_name(producer)
    return Tensor(is_network_input=False, trt_tensor=trt_tensor)


def constant(ndarray: np.ndarray, as_dtype: Any = None, as_shape: Any = None) -> Tensor:
    assert isinstance(ndarray, np.ndarray) and ndarray.flags.c_contiguous
    default_net().constants.append(ndarray)
    return _wrap(f"constant.{len(default_net().constants)}", DataType(ndarray.dtype.name), ndarray.shape)


# tensorrt_llm.layers, .quantization, .mapping


class PositionEmbeddingType(IntEnum):
    learned_absolute = 0
    rope_gptj = 1
    rope_gpt_neox = 2
    mrope = 8


class Module:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        net = default_net()
        net.modules = net.modules or dict(self.named_modules(type(self).__name__))
        net.calls.append(self)
        try:
            return self.forward(*args, **kwargs)
        finally:
            net.calls.pop()

    def named_modules(self, path: str) -> Iterator[tuple[Module, str]]:
        yield self, path
        for name, value in vars(self).items():
            parts = [(name, value)] if not isinstance(value, list) else [(f"{name}.{index}", one) for index, one in enumerate(value)]
            for part, one in parts:
                if isinstance(one, Module):
                    yield from one.named_modules(f"{path}.{part}")


class Parameter:
    def __init__(self, name: str, value: np.ndarray, dtype: str) -> None:
        self._name, self.raw_value, self._dtype = name, value, dtype

    @property
    def value(self) -> Tensor:
        default_net()
        return _wrap(self._name, DataType(self._dtype), self.raw_value.shape)


class Linear(Module):
    def __init__(self, name: str, out_features: int) -> None:
        self.name, self.out_features = name, out_features
        self.read: list[str] = []

    def forward(self, x: Tensor, lora_runtime_params: Any = None, all_reduce_params: Any = None) -> Tensor:
        self.read.append(x.name)
        return _wrap(f"{self.name}.out", x.trt_tensor.dtype, (x.trt_tensor.shape[0], self.out_features))


class QuantizedLinear(Linear):
    """What quantization puts in the place of a linear layer."""


class RmsNorm(Module):
    def __init__(self, normalized_shape: int, name: str, dtype: str) -> None:
        self.weight = Parameter(name, np.ones(normalized_shape, np.float32), dtype)


class AttentionParams:
    def __init__(
        self,
        sequence_length: Any = None,
        context_lengths: Any = None,
        host_context_lengths: Any = None,
        max_context_length: Any = None,
        host_request_types: Any = None,
        encoder_input_lengths: Any = None,
        encoder_max_input_length: Any = None,
        host_runtime_perf_knobs: Any = None,
        host_context_progress: Any = None,
    ) -> None:
        self.embed_positions_for_gpt_attention: Tensor | None = None


class KeyValueCacheParams:
    def __init__(self, past_key_value: Any = None, host_past_key_value_lengths: Any = None, cache_indirection: Any = None) -> None:
        self.past_key_value = past_key_value

    def fill_none_tensor_list(self, list_size: int) -> None:
        if self.past_key_value is None:
            self.past_key_value = (None,) * list_size


class Attention(Module):
    def __init__(
        self,
        *,
        local_layer_idx: int,
        hidden_size: int,
        num_attention_heads: int,
        num_kv_heads: int,
        attention_head_size: int,
        qk_layernorm: bool,
        dtype: str,
    ) -> None:
        at = f"layers.{local_layer_idx}"
        self.qk_layernorm, self.clip_qkv = qk_layernorm, None
        self.qkv = Linear(f"{at}.qkv", (num_attention_heads + 2 * num_kv_heads) * attention_head_size)
        self.dense = Linear(f"{at}.dense", hidden_size)
        if qk_layernorm:
            self.q_layernorm = RmsNorm(attention_head_size, f"{at}.q_norm", dtype)
            self.k_layernorm = RmsNorm(attention_head_size, f"{at}.k_norm", dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        attention_packed_mask: Any = None,
        use_cache: bool = False,
        spec_decoding_params: Any = None,
        mrope_params: Any = None,
        kv_cache_params: Any = None,
        attention_params: Any = None,
        encoder_output: Any = None,
        position_embedding: Any = None,
        norm_before_bmm1: bool = False,
        lora_layer_params: Any = None,
        cross_kv_cache_gen: Any = None,
        cross_kv_reuse: Any = None,
        all_reduce_params: Any = None,
        skip_attn: Any = None,
    ) -> Any:
        raise AssertionError("TensorRT-LLM's attention was traced")

    @staticmethod
    def create_attention_const_params(model_cls: Any, config: Any) -> None:
        model_cls.embed_positions_for_gpt_attention = Parameter("embed_positions_for_gpt_attention", rotary_pairs(config), "float32")

    @staticmethod
    def fill_attention_params(model_cls: Any, attention_params: AttentionParams) -> AttentionParams:
        attention_params.embed_positions_for_gpt_attention = model_cls.embed_positions_for_gpt_attention.value
        return attention_params


class SmoothQuantAttention(Module):
    """What SmoothQuant puts in the place of an attention layer."""


def rotary_pairs(config: Any) -> np.ndarray:
    """Flat [1, positions * D]: for every position and frequency a cosine and a sine."""
    frequencies = 1.0 / config.rotary_base ** (np.arange(0, config.head_size, 2) / config.head_size)
    angles = np.outer(np.arange(config.max_position_embeddings), frequencies)
    return np.stack([np.cos(angles), np.sin(angles)], -1).reshape(1, -1).astype(np.float32)


class Mapping_:
    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size


class QuantConfig:
    def __init__(self, quant_algo: str | None = None, kv_cache_quant_algo: str | None = None) -> None:
        self.quant_algo, self.kv_cache_quant_algo = quant_algo, kv_cache_quant_algo

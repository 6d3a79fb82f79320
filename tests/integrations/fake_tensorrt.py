"""The part of TensorRT 10.14 that plugins, the adapter and the plugin host touch: for machines and GPUs without the package."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import ModuleType
from typing import Any


class DataType(Enum):
    FLOAT = "float32"
    HALF = "float16"
    BF16 = "bfloat16"
    INT32 = "int32"
    INT64 = "int64"
    FP8 = "fp8"


class TensorRTPhase(Enum):
    BUILD = 0
    RUNTIME = 1


class TensorFormat(Enum):
    LINEAR = 0


class PluginFieldType(Enum):
    INT32 = 0
    CHAR = 1


class PluginField:
    def __init__(self, name: str, data: Any = None, type: PluginFieldType = PluginFieldType.INT32) -> None:
        self.name, self.data, self.type = name, data, type


class PluginFieldCollection(list[Any]):
    pass


class DimsExprs(list[Any]):
    pass


class Dimension:
    def __init__(self, size: int) -> None:
        self.size = size

    def is_constant(self) -> bool:
        return self.size >= 0

    def get_constant_value(self) -> int:
        return self.size


class ExprBuilder:
    def constant(self, size: int) -> Dimension:
        return Dimension(size)


class Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str = "") -> bool:
        return self.creators.setdefault((namespace, creator.name), creator) is creator

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        found = self.creators.get((plugin_namespace, type))
        return found if found is not None and found.plugin_version == version else None


class Dims(tuple[int, ...]):
    pass


class PluginTensorDesc:
    dims: Dims
    type: DataType
    format: TensorFormat


class DynamicPluginTensorDesc:
    desc: PluginTensorDesc


class ITensor:
    def __init__(self, name: str, dtype: DataType, shape: Sequence[int]) -> None:
        self.name, self.dtype, self.shape = name, dtype, tuple(shape)


class LayerType(Enum):
    PLUGIN_V3 = 0


class Layer:
    """An IPluginV3Layer: what the plugin says of its output, whose name does not follow the layer's."""

    type, num_outputs = LayerType.PLUGIN_V3, 1

    def __init__(self, inputs: Sequence[ITensor], plugin: Any) -> None:
        self.inputs, self.plugin, self.name = list(inputs), plugin, "(Unnamed Layer*)"
        (dtype,) = plugin.get_output_data_types([one.dtype for one in inputs])
        (shape,) = plugin.get_output_shapes([DimsExprs(map(Dimension, one.shape)) for one in inputs], [], ExprBuilder())
        self._output = ITensor(f"{self.name}_output_0", dtype, [one.size for one in shape])

    def get_output(self, index: int) -> ITensor:
        assert index == 0
        return self._output


class INetworkDefinition:
    def __init__(self) -> None:
        self.plugins: list[Layer] = []
        self.refuse = False

    def add_plugin_v3(self, inputs: Sequence[ITensor], shape_inputs: Sequence[ITensor], plugin: Any) -> Layer | None:
        assert not shape_inputs
        assert all(isinstance(one, ITensor) for one in inputs)
        if self.refuse:
            return None
        self.plugins.append(Layer(inputs, plugin))
        return self.plugins[-1]


CLASSES = (
    DataType,
    Dims,
    DimsExprs,
    DynamicPluginTensorDesc,
    PluginField,
    PluginFieldCollection,
    PluginFieldType,
    PluginTensorDesc,
    TensorFormat,
    TensorRTPhase,
)


def _class(name: str) -> type:
    return type(name, (), {})


def make_tensorrt(name: str = "tensorrt") -> ModuleType:
    """Make a module; plugins are registered once a name, so another registry takes another name."""
    module = ModuleType(name)
    registry = Registry()
    interfaces = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime", "IPluginCreatorV3One", "Builder")
    severities = dict.fromkeys(("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"))
    content = {
        "__version__": "10.14.1",
        **{name: _class(name) for name in interfaces},
        "ILogger": type("ILogger", (), severities),
        "get_plugin_registry": lambda: registry,
        **{one.__name__: one for one in CLASSES},
    }
    module.__dict__.update(content)
    return module

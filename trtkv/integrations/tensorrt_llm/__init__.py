"""TensorRT-LLM's model definitions with trtkv's plugins in the place of its attention.

For tensorrt_llm>=1.2.0,<1.3.0rc21: the versions that build TensorRT engines. Checkpoints, quantization and the builder stay TensorRT-LLM's; the
engine runs under trtkv's runtime. `models()` gives the two classes, `MODEL_CLS_FILE` is for `trtllm-build --model_cls_file`.
"""

from pathlib import Path

from trtkv.integrations.tensorrt_llm.models import Models, models

MODEL_CLS_FILE = Path(__file__).with_name("model_cls.py")

__all__ = ["MODEL_CLS_FILE", "Models", "models"]

"""For `trtllm-build --model_cls_file THIS --model_cls_name QWenForCausalLM` (or LLaMAForCausalLM); the policy comes from TRTKV_POLICY."""

from trtkv.integrations.tensorrt_llm import models

QWenForCausalLM = models().qwen
LLaMAForCausalLM = models().llama

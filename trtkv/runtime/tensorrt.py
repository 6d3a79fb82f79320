"""Runs an engine's plan with TensorRT on a GPU: static buffers, one execution context a profile, the plugins bound to the session's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plugins.cache.cache import Cache
from plugins.nodes import FACES
from plugins.tensorrt.backend import Backend, load
from plugins.tensorrt.binding import bind
from plugins.tensorrt.plugin import register
from plugins.tensorrt.recorder import Recorder, recording
from plugins.tensorrt.tensors import TORCH_NAMES
from trtkv.engine.manifest import Manifest
from trtkv.errors import EngineError
from trtkv.quantized.encoding import SCALES
from trtkv.runtime.packed import PackedWeight
from trtkv.runtime.weights import Bound

TRY_TORCH = "Try --executor torch, which runs the same graph."
DECODE, PREFILL = 0, 1  # profiles, in the order in which the build adds them
ROPE = "rope"  # an engine built by TensorRT-LLM holds its own rotary table
Shape = tuple[int, ...]


class _Refused(Exception):
    """TensorRT said no; why is in its log or in what a plugin recorded."""


def open_executor(plan: bytes, manifest: Manifest, weights: Mapping[str, Bound], cache: Cache) -> TensorrtExecutor:
    """Load an engine's plan on the session's device with the weights as its inputs; none are needed for a plan that holds them.

    Raises EngineError when TensorRT refuses the plan or its inputs are not the manifest's, BuildError when its TensorRT is not installed.
    """
    assert manifest.plan_info is not None
    backend, recorder = load(manifest.plan_info.backend), Recorder()
    register(backend.trt, list(FACES.values()))
    with torch.cuda.device(cache.device), backend.log.collect() as messages, recording(recorder):
        runtime = backend.trt.Runtime(backend.logger)
        engine = runtime.deserialize_cuda_engine(plan)
    recorder.check(EngineError)
    if engine is None:
        built, here = manifest.plan_info.version, backend.version
        versions = "" if built == here else f" (built with version {built}, here is {here})"
        reason = messages.errors[0].rstrip(". ") if messages.errors else "it gave no reason"
        raise EngineError(f"{backend.title} refused the plan{versions}: {reason}", f"Build the engine again: {manifest.command} --force.")
    listed = {name for one in manifest.weights for name in one.inputs}
    taken = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)} & listed
    wrong = taken if manifest.plan_info.holds_weights else listed - taken
    if wrong:
        does = "takes the" if manifest.plan_info.holds_weights else "takes no"
        raise EngineError(f"the plan {does} weight '{min(wrong)}', unlike the manifest", f"Build the engine again: {manifest.command} --force.")
    bindings = {name: tensor for name, tensor in _tensors(weights) if name in taken}
    return TensorrtExecutor(engine, backend, cache, bindings, recorder, Lane(cache.device), keep=runtime)


def _tensors(weights: Mapping[str, Bound]) -> Iterator[tuple[str, Tensor]]:
    """Yield the plan's inputs: of matrices of codes these [in, out], as TensorRT multiplies by them, and the scales [out].

    Codes are transposed where they lie, so that no second copy of all is needed: nothing else may use the weights afterwards.
    """
    for name, one in weights.items():
        if isinstance(one, PackedWeight):
            (part,) = one.parts
            turned = part.codes.t().contiguous()
            yield name, part.codes.view(turned.shape).copy_(turned)
            yield name + SCALES, part.scales.flatten()
        else:
            yield name, one.whole


class Lane:
    """A separate stream for TensorRT, which synchronizes the whole device on the default one; in order with the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.handle: int = self.stream.cuda_stream

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block's work on the stream, after what the caller has queued and before what it queues next."""
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            yield
        caller.wait_stream(self.stream)


class TensorrtExecutor:
    """Runs steps of one cache; `name` is the backend's.

    Inputs of fixed shape (weights, tables) are bound where they lie; dynamic ones are copied into buffers that hold the largest step, so that
    every address stays the same from step to step: plugins see new addresses through slow callbacks, and a captured step not at all.
    """

    def __init__(
        self, engine: Any, backend: Backend, cache: Cache, bindings: Mapping[str, Tensor], recorder: Recorder, lane: Lane, keep: Any = None
    ) -> None:
        """Make the contexts and buffers of a deserialized engine; keep is what must outlive the engine.

        Raises EngineError where bindings do not fit the engine's inputs or a context cannot be made.
        """
        self.name, self.cache, self._backend, self._engine, self._keep = backend.name, cache, backend, engine, keep
        self._recorder, self._lane = recorder, lane
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == backend.trt.TensorIOMode.INPUT]
        self._output = next(name for name in names if name not in inputs)
        self._dtypes = {name: getattr(torch, TORCH_NAMES[engine.get_tensor_dtype(name).name]) for name in names}
        self._fixed = {name: tuple(engine.get_tensor_shape(name)) for name in inputs if -1 not in tuple(engine.get_tensor_shape(name))}
        self._ranges: dict[str, list[tuple[Shape, ...]]] = {
            name: [tuple(map(tuple, engine.get_tensor_profile_shape(name, profile))) for profile in range(engine.num_optimization_profiles)]
            for name in inputs
            if name not in self._fixed
        }
        self._bound: dict[str, Tensor] = {}
        with self._reporting("its execution contexts cannot be made"):
            self._memory = self._empty(engine.device_memory_size_v2, torch.uint8)
            self._contexts = [self._make_context(profile) for profile in range(engine.num_optimization_profiles)]
            self._shapes: list[dict[str, Shape]] = [{} for _ in self._contexts]
            self.buffers = {name: self._empty(self._largest(name), self._dtypes[name]) for name in self._ranges}
            self._logits = self._empty(max(map(self._largest_output, range(len(self._contexts)))), self._dtypes[self._output])
            self._set_addresses({**self.buffers, self._output: self._logits})
            for name, tensor in bindings.items():
                self._bind(name, tensor)

    num_adapters = 0

    @property
    def capturable(self) -> bool:
        """A step goes through TensorRT's launches."""
        return False

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one step that `Cache.begin_step` announced; inputs by graph input name, on any device. Returns logits [R, V] fp32.

        Raises EngineError for a step beyond the engine's limits and for what fails inside TensorRT or a plugin.
        """
        if ROPE not in self._fixed:
            inputs = {name: tensor for name, tensor in inputs.items() if name != ROPE}
        profile = self.choose_profile(inputs)
        context = self._contexts[profile]
        with self._reporting("the step failed"):
            with self._lane.entered():
                for name, tensor in inputs.items():
                    self._place(profile, name, tensor)
                if not context.execute_async_v3(self._lane.handle):
                    raise _Refused
                shape = tuple(context.get_tensor_shape(self._output))
            return self._logits[: math.prod(shape)].view(shape).clone()

    def choose_profile(self, inputs: Mapping[str, Tensor]) -> int:
        """Take decode when every sequence has one token and the batch fits, else prefill."""
        decodes = inputs["token_ids"].shape[0] == inputs["seq_lens"].shape[0]
        fits = all(self._fits(DECODE, name, tuple(tensor.shape)) for name, tensor in inputs.items() if name in self._ranges)
        return DECODE if (decodes and fits) or len(self._contexts) == 1 else PREFILL

    def close(self) -> None:
        """Free what TensorRT holds on the device; the executor cannot run any more."""
        self._contexts, self._engine, self._keep = [], None, None
        self._bound, self.buffers = {}, {}

    def _make_context(self, profile: int) -> Any:
        strategy = self._backend.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with bind(self.cache):
            context = self._engine.create_execution_context(strategy)
        if context is None:
            raise _Refused
        # Steps run one after the other, so the contexts of all profiles share their scratch memory.
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        with self._lane.entered():
            if not context.set_optimization_profile_async(profile, self._lane.handle):
                raise _Refused
        return context

    def _place(self, profile: int, name: str, tensor: Tensor) -> None:
        """Make one input of a step known to the profile's context."""
        if name not in self._ranges:
            if (bound := self._bound.get(name)) is None or bound.data_ptr() != tensor.data_ptr():
                self._bind(name, tensor)
            return
        shape = tuple(tensor.shape)
        if not self._fits(profile, name, shape):
            _, _, high = self._ranges[name][profile]
            raise EngineError(f"the step's '{name}' has shape {shape}, this engine takes up to {high}", "Build the engine with larger limits.")
        target = self.buffers[name][: tensor.numel()]
        if target.data_ptr() != tensor.data_ptr():
            target.view(shape).copy_(tensor, non_blocking=True)
        if self._shapes[profile].get(name) != shape:
            if not self._contexts[profile].set_input_shape(name, shape):
                raise _Refused
            self._shapes[profile][name] = shape

    def _bind(self, name: str, tensor: Tensor) -> None:
        """Let TensorRT read an input of fixed shape where it lies."""
        if name not in self._fixed:
            raise EngineError(f"the engine has no input '{name}' of fixed shape", "Build the engine again with this version of trtkv.")
        if tuple(tensor.shape) != self._fixed[name] or tensor.dtype != self._dtypes[name]:
            raise EngineError(
                f"the input '{name}' is {tensor.dtype} {tuple(tensor.shape)}, the engine takes {self._dtypes[name]} {self._fixed[name]}",
                "Run with the checkpoint that the engine was built from.",
            )
        self._bound[name] = tensor.to(self.cache.device).contiguous()
        self._set_addresses({name: self._bound[name]})

    def _set_addresses(self, tensors: Mapping[str, Tensor]) -> None:
        for context in self._contexts:
            for name, tensor in tensors.items():
                if not context.set_tensor_address(name, tensor.data_ptr()):
                    raise _Refused

    def _fits(self, profile: int, name: str, shape: Shape) -> bool:
        low, _, high = self._ranges[name][profile]
        return len(shape) == len(high) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))

    def _largest(self, name: str) -> int:
        return max(math.prod(high) for _, _, high in self._ranges[name])

    def _largest_output(self, profile: int) -> int:
        context = self._contexts[profile]
        for name, ranges in self._ranges.items():
            shape = ranges[profile][2]
            if not context.set_input_shape(name, shape):
                raise _Refused
            self._shapes[profile][name] = shape
        return math.prod(tuple(context.get_tensor_shape(self._output)))

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(max(1, size), dtype=dtype, device=self.cache.device)

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Raise what a plugin recorded, or else TensorRT's message, in the place of a bare refusal."""
        with self._backend.log.collect() as messages:
            try:
                yield
            except _Refused:
                self._recorder.check(EngineError)
                reason = messages.errors[0].rstrip(". ") if messages.errors else "it gave no reason"
                raise EngineError(f"{self._backend.title}: {what}: {reason}", TRY_TORCH) from None

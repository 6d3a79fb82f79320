"""Opens an engine directory: checks it, finds its weights, allocates the cache, picks what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtkv.checkpoint.find import resolve_model
from trtkv.checkpoint.weights import Checkpoint
from trtkv.config import DTYPE_BYTES
from trtkv.errors import CheckpointError, ConfigError, EngineError, TrtkvError
from trtkv.manifest import GRAPH, PLAN, Manifest, check_files, read_manifest
from trtkv.plugins._device import store
from trtkv.plugins._device.driver import arch
from trtkv.plugins.dtypes import TORCH_DTYPES
from trtkv.plugins.kernels import FOLDER, request
from trtkv.plugins.session import Session
from trtkv.plugins.support import dense_below, gpu_ready
from trtkv.runtime.executor import TorchExecutor
from trtkv.runtime.memory import check_weights, pool_pages
from trtkv.runtime.pages import PageAllocator
from trtkv.runtime.rope import rope_table
from trtkv.runtime.step import Executor, Stepper
from trtkv.runtime.weights import Weight, map_weights, random_weights

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How to open an engine: weights is a directory, "random" or None for the engine's own; executor is auto, torch or tensorrt.

    Sequences of up to dense_below tokens are read whole whatever the budget; None chooses what is fastest here (0 without kernels).
    """

    weights: str | None = None
    device: str = "auto"
    executor: str = "auto"
    cache_bytes: int | None = None
    dense_below: int | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """An opened engine; slots are the free ones, why_torch says why TensorRT does not run it, if it does not."""

    manifest: Manifest
    session: Session
    stepper: Stepper
    pages: PageAllocator
    slots: list[int]
    why_torch: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of an engine this process runs: reduce sums a tensor in place over all parts, least agrees on the smallest of their numbers."""

    index: int
    count: int
    reduce: Callable[[Tensor], None]
    least: Callable[[int], int]


def open_engine(directory: Path, options: Options, progress: Progress = lambda stage, fraction: None, *, part: Part | None = None) -> Engine:
    """Open an engine directory, or one part of it, for running.

    Raises EngineError for a directory that is damaged or of another version, CheckpointError for weights that are missing or do not fit,
    CapacityError when weights or cache exceed the memory.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    if manifest.tp > 1 and part is None:
        raise EngineError(f"'{directory}' has {manifest.tp} parts, and this needs one of a single part", "Build it without --tp for this.")
    store.register(directory / FOLDER)
    device = find_device(options.device)
    plan = manifest.cache
    total = sum(_numel(one.shape) for one in manifest.weights) * DTYPE_BYTES[manifest.model.dtype]
    check_weights(total, device)
    weights = _weights(manifest, options.weights, device, progress, (part.index, part.count) if part else (0, 1))
    num_pages = pool_pages(plan, manifest.limits, device, options.cache_bytes)
    num_pages = part.least(num_pages) if part else num_pages
    if options.dense_below is not None and options.dense_below < 0:
        raise ConfigError(f"dense-below {options.dense_below} is below 0", "Give tokens, 0 to select wherever the budget is smaller.")
    sequences = manifest.limits.max_batch_size
    dense = dense_below(plan, sequences, device) if options.dense_below is None else options.dense_below
    session = Session(plan, [num_pages] * plan.num_page_groups, sequences, device, dense)
    if part:
        session.reduce, session.parts = part.reduce, part.count
    if gpu_ready(device) is None:
        progress("kernels", 0.0)
        with torch.cuda.device(device):
            request(plan, manifest.model, manifest.limits, arch())
    executor, why_torch = _executor(directory, manifest, options.executor, weights, session)
    rope = rope_table(manifest.model.rope, manifest.model.head_dim, manifest.limits.max_seq_len)
    slots = list(range(manifest.limits.max_batch_size - 1, -1, -1))
    return Engine(manifest, session, Stepper(executor, session, manifest.limits, rope), PageAllocator(num_pages), slots, why_torch)


def find_device(name: str) -> torch.device:
    """Return the device of a name as typed; raises ConfigError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device '{name}' is not understood", "Write auto, cpu, cuda or cuda:1.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}' is not supported", "Write auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device '{name}' is not there: {torch.cuda.device_count()} CUDA devices are", "Use --device cpu, or see trtkv doctor.")
    return device


def _weights(manifest: Manifest, wanted: str | None, device: torch.device, progress: Progress, part: tuple[int, int]) -> dict[str, Weight]:
    specs = [one.model_dump() for one in manifest.weights]
    dtype = TORCH_DTYPES[manifest.model.dtype]
    report = lambda done, total: progress("weights", done / max(1, total))  # noqa: E731
    if wanted == "random":
        return random_weights(specs, dtype, device, report)
    path = _checkpoint_path(manifest, wanted)
    checkpoint = Checkpoint(path)
    checkpoint.check({name: tuple(shape) for one in manifest.weights for name, shape in one.sources})
    return map_weights(checkpoint, specs, dtype, device, report, part)


def _checkpoint_path(manifest: Manifest, wanted: str | None) -> Path:
    if wanted is not None:
        path = Path(wanted)
        if not path.is_dir():
            raise CheckpointError(f"the weights directory '{wanted}' does not exist", "Give a directory with safetensors, or --weights random.")
        return path
    candidates = [Path(manifest.checkpoint)] if manifest.checkpoint else []
    try:
        found = resolve_model(manifest.model_name).path
    except TrtkvError:
        found = None
    for path in candidates + ([found] if found else []):
        if any(path.glob("*.safetensors")):
            return path
    raise CheckpointError(
        f"no weights for '{manifest.model_name}' are on this machine",
        f"Run trtkv pull {manifest.model_name}, or give --weights DIRECTORY or --weights random.",
    )


def _executor(directory: Path, manifest: Manifest, wanted: str, weights: dict[str, Weight], session: Session) -> tuple[Executor, str | None]:
    if wanted not in ("auto", "torch", "tensorrt"):
        raise ConfigError(f"executor '{wanted}' is not known", "Choose auto, torch or tensorrt.")
    reason = "the torch executor was asked for" if wanted == "torch" else _why_not_tensorrt(manifest, session)
    if reason is None and manifest.plan_info:
        from trtkv.runtime.tensorrt import open_executor

        return open_executor((directory / PLAN).read_bytes(), manifest, weights, session), None
    if wanted == "tensorrt":
        raise EngineError(f"TensorRT cannot run this engine here: {reason}", "Leave --executor out: the torch executor runs the same graph.")
    return TorchExecutor(directory / GRAPH, weights, session), reason


def _why_not_tensorrt(manifest: Manifest, session: Session) -> str | None:
    if session.device.type != "cuda":
        return "no CUDA device is used"
    if manifest.plan_info is None:
        return manifest.plan_missing
    from trtkv.runtime.tensorrt import can_run

    return can_run(manifest.plan_info.backend, manifest.plan_info.sms)


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size

"""Builds an engine directory: graph, TensorRT plan, tokenizer, manifest; whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import trtkv
from plugins.nodes import FACES
from plugins.tensorrt.backend import available, load
from trtkv.checkpoint.find import Source, data_home, origin
from trtkv.checkpoint.staging import replace_directory, staging
from trtkv.checkpoint.weights import Checkpoint
from trtkv.config import Limits, ModelConfig
from trtkv.engine.compile_kernels import list_kernels, write_kernels
from trtkv.engine.manifest import GRAPH, PLAN, Manifest, PlanInfo, WeightInput, check_files, file_sha256, read_manifest
from trtkv.engine.native import check_self_contained, native_sms, record_native, write_native
from trtkv.engine.profiles import profiles
from trtkv.engine.targets import Targets, choose_targets
from trtkv.engine.tensorrt import build_plan
from trtkv.errors import BuildError, CapacityError, EngineError
from trtkv.graph.decoder import build_decoder
from trtkv.graph.weights import WeightSpec, expected_tensors
from trtkv.plan import CachePlan
from trtkv.policies.policy import Policy

Progress = Callable[[str, float], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Request:
    """What to build: model is source's configuration with dtype and rope changes applied, sms are compute capabilities as typed.

    native writes the library of the plugins as well, self_contained also a plan that holds it.
    """

    source: Source
    model: ModelConfig
    policy: Policy
    limits: Limits
    out: Path
    sms: tuple[str, ...] = ()
    backend: str | None = None
    force: bool = False
    command: str = "trtkv build"
    tp: int = 1
    native: bool = False
    self_contained: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """A finished engine directory; reused says that nothing had to be done."""

    path: Path
    manifest: Manifest
    reused: bool


def build_engine(request: Request, progress: Progress = lambda stage, fraction: None) -> Built:
    """Build an engine directory, or return an existing one with the same content.

    Raises ConfigError, CheckpointError, BuildError or CapacityError; in every case, Ctrl-C included, nothing half-written remains.
    """
    limits = request.limits.check(request.model)
    plan = request.policy.plan(request.model)
    progress("graph", 0.0)
    decoder = build_decoder(request.model, plan, limits, request.tp)
    weights_hash = None
    if request.source.path and any(request.source.path.glob("*.safetensors")):
        checkpoint = Checkpoint(request.source.path)
        checkpoint.check(expected_tensors(decoder.weights))
        weights_hash = checkpoint.fingerprint
    graph = decoder.model.SerializeToString(deterministic=True)
    backend = _backend(request.backend)
    loaded, insisted = load(backend) if backend else None, request.backend is not None
    targets = choose_targets(request.sms, loaded, insisted=insisted, dtype=request.model.dtype)
    specs, no_kernels = list_kernels(plan, request.model, limits, targets.kernels)
    if request.self_contained:
        check_self_contained(targets, backend)
    native = record_native(plan, request.model, limits, native_sms(targets, request.sms), request.tp) if request.native else None
    plan_key = _plan_key(request, plan, graph, backend, targets)
    inside = [[spec.arch, spec.name] for spec in native.specs] + [request.self_contained] if native else None
    identity = _hash([plan_key, [[spec.arch, spec.name] for spec in specs], no_kernels, weights_hash, *([inside] if inside else [])])
    if found := _reusable(request, identity, progress):
        return found
    with _writing(request.out, progress) as stage:
        if found := _reusable(request, identity, progress):  # another build, for which this one waited, has made it
            return found
        (stage / GRAPH).write_bytes(graph)
        _copy_tokenizer(request.source, stage)
        info, no_plan = _write_plan(request, plan, graph, backend, targets, plan_key, stage, progress)
        kernels = write_kernels(specs, stage, progress, fresh=request.force) if specs else None
        parts: dict[str, Any] = {"plan_info": info, "plan_missing": no_plan, "kernels": kernels, "kernels_missing": no_kernels}
        if native:
            where = (targets, backend if request.self_contained else None)
            parts["native"] = write_native(native, graph, stage, progress, where, self_contained=request.self_contained, fresh=request.force)
        parts["weights_hash"] = weights_hash
        manifest = _manifest(request, plan, decoder.weights, identity, parts, stage)
        manifest.write(stage)
        replace_directory(stage, request.out)
    progress("done", 1.0)
    return Built(request.out, manifest, False)


def _backend(wanted: str | None) -> str | None:
    found = available()
    if wanted == "none":
        return None
    if wanted and wanted not in found:
        extra = "rtx" if wanted == "tensorrt_rtx" else "tensorrt"
        raise BuildError(f"the backend '{wanted}' is not installed", f"Run: pip install 'trtkv[{extra}]', or leave --backend out.")
    return wanted or (load(None).name if found else None)


def _plan_key(request: Request, plan: CachePlan, graph: bytes, backend: str | None, targets: Targets) -> str:
    """Name everything that decides a TensorRT plan; plans are cached by it."""
    parts = {
        "graph": hashlib.sha256(graph).hexdigest(),
        "plan": plan.hash,
        "limits": request.limits.model_dump(),
        "backend": [backend, available().get(backend or "")],
        "sms": [targets.plan, targets.no_plan],
        "source": str(request.source.path),
        "version": trtkv.__version__,
    }
    return _hash(parts)


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _reusable(request: Request, identity: str, progress: Progress) -> Built | None:
    """Return the directory as it is, if it holds what is requested."""
    if request.force:
        return None
    try:
        manifest = read_manifest(request.out)
        if manifest.build_hash != identity:
            return None
        check_files(request.out, manifest)
    except EngineError:
        return None
    progress("reused", 1.0)
    return Built(request.out, manifest, True)


@contextmanager
def _writing(out: Path, progress: Progress) -> Iterator[Path]:
    """Give a directory beside `out` for what is to take its place; errors of the disk become a user's."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]) and not (out / "manifest.json").is_file():
        raise BuildError(f"'{out}' exists and is not an engine directory", "Choose another --out.")
    try:
        with staging(out, lambda: progress("waiting for another build", 0.0)) as stage:
            yield stage
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CapacityError(f"the disk that holds '{out.parent}' is full", "Free some space or choose another --out.") from None
        raise BuildError(f"'{out}' cannot be written: {error.strerror or error}", "Choose another --out.") from None


def _copy_tokenizer(source: Source, stage: Path) -> None:
    for name in TOKENIZER_FILES:
        if source.path and (source.path / name).is_file():
            shutil.copyfile(source.path / name, stage / name)


def _write_plan(
    request: Request, plan: CachePlan, graph: bytes, backend: str | None, targets: Targets, key: str, stage: Path, progress: Progress
) -> tuple[PlanInfo | None, str | None]:
    if backend is None:
        why = "it was built with --backend none" if request.backend == "none" else "no TensorRT was installed at build time"
        return None, f"{why}; the torch executor runs this engine"
    if targets.no_plan is not None:
        return None, f"{targets.no_plan}; the torch executor runs this engine"
    cached = data_home() / "plans" / f"{key}.plan"
    note = cached.with_suffix(".json")
    if not request.force and cached.is_file() and note.is_file():
        info = PlanInfo.model_validate_json(note.read_text())
        shutil.copyfile(cached, stage / PLAN)
        return info, None
    built = build_plan(graph, profiles(plan, request.limits), backend=backend, sms=targets.plan, faces=FACES.values(), progress=progress)
    info = PlanInfo(backend=built.backend, version=built.version, sms=built.sms, seconds=round(built.seconds, 2))
    (stage / PLAN).write_bytes(built.data)
    _remember(stage / PLAN, cached, note, info)
    return info, None


def _remember(plan: Path, cached: Path, note: Path, info: PlanInfo) -> None:
    """Save a plan for the next directory with the same content; a cache that cannot be written is no error."""
    part = cached.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        for left in cached.parent.glob("*.partial"):  # of killed builds; one that is just being written is then not saved
            left.unlink(missing_ok=True)
        shutil.copyfile(plan, part)
        part.replace(cached)
        part.write_text(info.model_dump_json())
        part.replace(note)
    except OSError:
        part.unlink(missing_ok=True)


def _manifest(request: Request, plan: CachePlan, weights: Sequence[WeightSpec], identity: str, parts: Mapping[str, Any], stage: Path) -> Manifest:
    return Manifest(
        name=request.out.name,
        version=trtkv.__version__,
        build_hash=identity,
        model_name=request.source.name,
        model=request.model,
        checkpoint=str(request.source.path.resolve()) if request.source.path else None,
        hub=request.source.hub,
        source=origin(request.source.path) if request.source.path else None,
        tp=request.tp,
        limits=request.limits,
        policy=request.policy.model_dump(mode="json", exclude_none=True),
        cache_plan=plan.to_json(),
        weights=tuple(WeightInput(name=one.name, shape=one.shape, sources=one.sources) for one in weights),
        **parts,
        files={file.relative_to(stage).as_posix(): file_sha256(file) for file in sorted(stage.rglob("*")) if file.is_file()},
        command=request.command,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )

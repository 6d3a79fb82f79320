"""What an engine directory holds: `trtkv inspect`. Needs no GPU and no TensorRT."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from plugins.cache.bytes import ByteCount
from plugins.cache.formats import find_format
from plugins.cache.kernel_support import in_torch, why_torch
from plugins.config import DOMAIN
from plugins.tensorrt.native.record import why_not
from trtkv.engine.manifest import GRAPH, MANIFEST, PLAN, Manifest, check_files, read_manifest
from trtkv.plan import CachePlan

# TensorRT-RTX writes its schedule into the plan as text, one line an entry; this format is not documented.
ENTRY = re.compile(rb'\n  (function|custom_layer|fully_connected|copy|memset|transpose|runtime_fusion)=\{ name="?([^ "]+)"?([^\n]{0,6000})')
ORIGIN = re.compile(rb'layers="([^"]*)')
FROM = re.compile(r"\[ONNX Layer: ([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One entry of a plan's schedule: kind, the kernel's or layer's name, and the layers of the graph that it is made of."""

    kind: str
    name: str
    layers: tuple[str, ...]


def contents(directory: Path, *, layers: bool = False) -> dict[str, Any]:
    """Describe an engine directory as JSON-ready data, with the plan's schedule and every plugin node if layers is set.

    Raises EngineError for a directory that is none, or whose files differ from their checksums.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    graph = onnx.load(str(directory / GRAPH)).graph
    schedule = plan_schedule((directory / PLAN).read_bytes()) if manifest.plan_info else []
    decode = first_profile(schedule)
    found = {
        **_facts(manifest),
        "files": {name: (directory / name).stat().st_size for name in (MANIFEST, *manifest.files)},
        "buffers": _buffers(manifest),
        "plugins": _plugins(graph),
        "gemms": _gemms(manifest),
        "kernels": _kernels(manifest),
        "fused": [{"kernel": name, "count": count} for name, count in Counter(_kind(one) for one in decode).most_common()],
        "notes": _notes(manifest, schedule),
    }
    if layers:
        found["schedule"] = [{"kind": one.kind, "kernel": one.name, "layers": list(one.layers)} for one in decode]
        found["plugin_nodes"] = [
            {"node": one.name, "op": one.op_type, "layer": _layer(one), "inputs": list(one.input)} for one in graph.node if one.domain == DOMAIN
        ]
    return found


def plan_schedule(plan: bytes) -> list[PlanEntry]:
    """Read the schedule that TensorRT-RTX writes into a plan, all profiles one after the other; empty where a plan holds none."""
    entries = []
    for found in ENTRY.finditer(plan):
        origin = ORIGIN.search(found[3])
        names = FROM.findall(origin[1].decode(errors="replace")) if origin else []
        entries.append(PlanEntry(found[1].decode(), found[2].decode(errors="replace"), tuple(names)))
    return entries


def first_profile(schedule: Sequence[PlanEntry]) -> list[PlanEntry]:
    """Return the entries of the first profile: those before the first kernel's layers come up again."""
    seen: set[tuple[str, ...]] = set()
    for index, one in enumerate(schedule):
        if one.kind == "fully_connected":
            if one.layers in seen:
                return _until(schedule, index)
            seen.add(one.layers)
    return list(schedule)


def _until(schedule: Sequence[PlanEntry], index: int) -> list[PlanEntry]:
    """Go back from the second profile's first product to where that profile begins: its first entry whose layers came before."""
    before = {one.layers for one in schedule[:index] if one.layers}
    while index > 0 and schedule[index - 1].layers in before and schedule[index - 1].layers in {one.layers for one in schedule[: index - 1]}:
        index -= 1
    return list(schedule[:index])


def _cache(plan: CachePlan) -> str:
    if plan.in_pages:
        return "paged"
    held = "stored in tensors of exactly their size"
    return held if why_torch(plan) else f"encoded in pages where kernels run, elsewhere {held}"


def _facts(manifest: Manifest) -> dict[str, Any]:
    plan, info, limits = manifest.cache, manifest.plan_info, manifest.limits
    return {
        "engine": manifest.name,
        "model": manifest.model_name,
        "dtype": manifest.model.dtype,
        "policy": plan.policy,
        "plan_hash": plan.hash,
        "cache": _cache(plan),
        "page_size": plan.page_size,
        "kv_bytes_per_token": ByteCount(plan, find_format(plan)).bytes_per_token,
        "max_seq_len": limits.max_seq_len,
        "max_batch_size": limits.max_batch_size,
        "max_chunk_tokens": limits.max_chunk_tokens,
        "backend": f"{info.backend} {info.version}" if info else None,
        "sms": list(info.sms) if info else [],
        "runs_here": _runs_here(manifest),
        "plugins_by": _plugins_by(manifest),
        "all_weights_bytes": manifest.weight_bytes,
        "weights_stored_as": manifest.model.quantization.title if manifest.model.quantization else manifest.model.dtype,
        "weights": "in the plan; the torch executor takes the checkpoint's" if info and info.holds_weights else "the checkpoint's",
        "checkpoint": manifest.checkpoint or manifest.hub,
        "source": manifest.source,
        "created": manifest.created,
        "command": manifest.command,
    }


def _runs_here(manifest: Manifest) -> str:
    """Say what would execute the engine on this machine, and why not TensorRT if that is so."""
    import torch

    from trtkv.runtime.where_tensorrt_runs import can_run

    where = "cuda" if torch.cuda.is_available() else "cpu"
    reason = manifest.plan_missing if manifest.plan_info is None else can_run(manifest.plan_info, manifest.command)
    return f"torch on {where}: {reason}" if reason else f"TensorRT ({manifest.plan_info.backend if manifest.plan_info else ''})"


def _plugins_by(manifest: Manifest) -> str:
    """Say what runs the plugin nodes: Python, and for which GPUs a library; where there is none, whether there could be."""
    native, reason = manifest.native, "it is one part of several" if manifest.tp > 1 else why_not(manifest.cache)
    if native is not None:
        inside = "; native/engine.plan holds it" if native.self_contained else ""
        return f"Python; outside of Python the native library, for sm {', '.join(native.sms)}{inside}"
    return f"Python; no native library runs this policy: {reason}" if reason else "Python; trtkv build --native writes a native library, too"


def _buffers(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "buffer": one.name,
            "shape": "x".join(map(str, one.shape)),
            "letters": one.letters,
            "dtype": one.dtype,
            "tier": one.tier,
            "layers": len(one.layers),
            "bytes_per_row": one.row_bytes,
        }
        for one in manifest.cache.buffers
    ]


def _plugins(graph: onnx.GraphProto) -> list[dict[str, Any]]:
    layers: dict[str, list[int]] = {}
    for node in graph.node:
        if node.domain == DOMAIN:
            layers.setdefault(node.op_type, []).append(_layer(node))
    return [{"op": op, "nodes": len(found), "layers": _ranges(found)} for op, found in layers.items()]


def _layer(node: onnx.NodeProto) -> int:
    return next(int(helper.get_attribute_value(one)) for one in node.attribute if one.name == "layer")


def _gemms(manifest: Manifest) -> list[dict[str, Any]]:
    found: Counter[tuple[str, int, int, str]] = Counter()
    looked_up = {"embed"} if any(one.name == "head" for one in manifest.weights) else set[str]()
    for one in manifest.weights:
        if len(one.shape) == 2 and one.shape[0] > 1 and one.name not in looked_up:
            stored = one.quantization.title if one.quantization else manifest.model.dtype
            found[one.name.split(".")[-1], one.shape[1], one.shape[0], stored] += 1
    return [{"name": name, "in": width, "out": out, "weights": stored, "nodes": count} for (name, width, out, stored), count in found.items()]


def _kernels(manifest: Manifest) -> list[dict[str, Any]]:
    if manifest.kernels is None:
        return []
    groups: dict[str, list[Any]] = {}
    for one in manifest.kernels.files:
        groups.setdefault(one.kernel, []).append(one)
    return [
        {"kernel": kernel, "sms": list(dict.fromkeys(one.sm for one in files)), "files": len(files), "bytes": sum(one.size_bytes for one in files)}
        for kernel, files in groups.items()
    ]


def _kind(entry: PlanEntry) -> str:
    """Name an entry so that equal ones of different layers count together."""
    if entry.kind == "function":
        return entry.name
    last = entry.layers[-1].split(".")[-1] if entry.layers else re.sub(r"_U\d+$", "", entry.name).split(".")[-1]
    return f"{entry.kind} {last}" if entry.layers else entry.kind


def _notes(manifest: Manifest, schedule: Sequence[PlanEntry]) -> list[str]:
    lines = []
    if manifest.plan_missing:
        lines.append(f"The directory holds no TensorRT plan: {manifest.plan_missing}.")
    elif not schedule:
        lines.append("This plan does not say how it was fused: only TensorRT-RTX writes its schedule into the plan.")
    if manifest.kernels_missing:
        lines.append(f"GPU kernels compile at the first run instead: {manifest.kernels_missing}.")
    lines += [f"On a GPU too, {reason}." for reason in in_torch(manifest.cache)]
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: 0-1, 4."""
    parts: list[list[int]] = []
    for one in numbers:
        if parts and one == parts[-1][1] + 1:
            parts[-1][1] = one
        else:
            parts.append([one, one])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)

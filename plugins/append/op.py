"""KvAppend in torch, for any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.cache.batch import StepGroup
from plugins.cache.indexes import index as indexes
from plugins.cache.session import Session
from plugins.cache.tiers.host.chunk import write_chunk
from plugins.nodes.node import OpConfig


def append(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Rotate and store new tokens.

    inputs: qkv [T, (Hq + 2 Hk) D], positions [T] int32, five tensors that `Session.begin_step` already carries, rope [X, D] fp32 (cosines of
    D / 2 frequencies, then sines), state, and for models with QK-norm two weights [D]. Writes the rotated queries to out [T, Hq D], keys
    and values into the session's pages, and completes the summaries of the groups that this step closes.
    """
    qkv, positions, rope = inputs[0], inputs[1], inputs[7]
    heads, dim = config.num_q_heads + config.num_kv_heads, config.head_dim
    step = session.step(layer)
    rotated = qkv[:, : heads * dim].unflatten(1, (heads, dim))
    if len(inputs) > 9:
        rotated = _norm_heads(rotated, inputs[9], inputs[10], config)
    rotated = _rotate(rotated, *_angles(step, positions, rope))
    out.unflatten(1, (config.num_q_heads, dim)).copy_(rotated[:, : config.num_q_heads])
    values = qkv[:, heads * dim :].unflatten(1, (config.num_kv_heads, dim))
    if session.held is not None:
        for row in step.rows:
            rows = slice(row.start, row.start + row.new)
            session.held.find(layer, row.slot).append(rotated[rows, config.num_q_heads :].to(qkv.dtype), values[rows], row.prompt)
        return
    if session.ragged is not None:
        session.ragged.store(layer, rotated[:, config.num_q_heads :], values)
        return
    if session.offload is not None and session.offload.covers(layer):
        write_chunk(session.offload, layer, step, rotated[:, config.num_q_heads :], values)
    else:
        page, inside = step.places
        session.buffer("keys", layer)[page, :, inside] = rotated[:, config.num_q_heads :].to(qkv.dtype)
        session.buffer("values", layer)[page, :, inside] = values
    select = session.plan.select[layer]
    if select is not None:
        indexes.find(select).update(session, layer, select)


def _norm_heads(qk: Tensor, q_weight: Tensor, k_weight: Tensor, config: OpConfig) -> Tensor:
    """Normalize each head of qk [T, Hq + Hk, D] by its root mean square, in fp32 as the graph's norms."""
    wide = qk.float()
    scaled = (wide / (wide.square().mean(-1, keepdim=True) + config.rms_eps).sqrt()).to(qk.dtype)
    weights = qk.new_empty(qk.shape[1], qk.shape[2])
    weights[: config.num_q_heads], weights[config.num_q_heads :] = q_weight, k_weight
    return scaled * weights


def _angles(step: StepGroup, positions: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 1, D / 2] fp32, looked up once a step."""
    if "angles" not in step.cache:
        rows = rope.index_select(0, positions)[:, None]
        half = rope.shape[1] // 2
        step.cache["angles"] = (rows[..., :half], rows[..., half:])
    return step.cache["angles"]  # type: ignore[return-value]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of every head of x [T, H, D] against each other, in fp32."""
    wide = x.float()
    half = x.shape[-1] // 2
    first, second = wide[..., :half], wide[..., half:]
    rotated = wide.new_empty(x.shape)
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half:] = second * cos + first * sin
    return rotated

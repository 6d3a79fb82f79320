"""Which summaries a layer's kernels keep of closed groups of keys, and where."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plugins.append.launch import FIER, KINDS, NO_GROUP, NONE
from plugins.cache.session import Session
from plugins.cache.support import summary_of


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens of a group, the kind of its summary as `kernel.py` numbers them, and the buffers of its two parts as kernels take them."""

    group: int
    kind: int
    bits: Tensor | None = None
    meta: Tensor | None = None


def kept_of(session: Session, layer: int) -> Kept:
    """Return what kernels keep for a layer; kind `NONE` where it selects nothing or selects in torch."""
    summary, select = summary_of(session.plan, layer), session.plan.select[layer]
    if summary is None or select is None:
        return Kept(NO_GROUP, NONE)
    kind = KINDS[summary.kept]
    if kind == FIER:
        return Kept(select.group, kind, session.words(layer), session.ranges(layer))
    return Kept(select.group, kind, None if summary.beside is None else session.buffer(summary.beside, layer), session.buffer(summary.vectors, layer))

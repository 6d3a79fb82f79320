"""AllGather through the library's collective, which a captured graph may hold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.cache.session import Session
from plugins.nodes.node import OpConfig
from trtkv.errors import EngineError


def all_gather(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Write the columns x [R, V / G] of all G parts of the session's group into out [R, V], in the order of the parts.

    Raises EngineError where the session belongs to no group.
    """
    if session.gather is None:
        raise EngineError("this engine is one part of several and runs alone", "Open it with LLM or trtkv run, which start the other parts.")
    session.gather(inputs[0], out)

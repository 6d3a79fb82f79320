"""StreamingLLM: attention sinks and the newest tokens (arXiv 2309.17453).

The paper caches keys before rotation and numbers positions inside the cache; here keys keep the rotation of their place in the text, as everywhere
in this project.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from trtkv.plan import CacheView
from trtkv.policies.budgeted import Budgeted


class Streaming(Budgeted):
    """Keep the first and the newest tokens.

    sink: first tokens that stay.
    """

    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    sink: int = Field(4, ge=0)

    def reserved(self, prompt: int) -> tuple[int, int]:
        """The sink and the newest token."""
        return self.sink, 1

    def scores(self, view: CacheView) -> Tensor:
        """Return the logical positions [Hk, S]."""
        return view.positions.double()

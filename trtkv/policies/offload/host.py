"""A host pool for pages between the steps that select them (FreeKV, ArkVale, ShadowKV).

Every full page lives in pinned host memory and is copied to the device when a selection names it; pages that are named again and again, as the
sink's, and the newest ones, as the window's, stay there. It takes effect where an engine is opened with --offload; without, pages are on the device.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from trtkv.plan import OffloadPlan
from trtkv.policies.base import Offload


class Host(Offload):
    """Store pages in host memory, where an engine is opened with --offload.

    parts: what is moved out, keys and values or (not there yet) values alone; schedule: "speculative" recalls after the attention of the previous
    step what its query selected, "blocking" recalls before attention.
    """

    source: ClassVar[str] = "FreeKV, arXiv 2505.13109"
    needs: ClassVar[frozenset[str]] = frozenset({"pages_chosen"})
    parts: Literal["both", "values"] = "both"
    schedule: Literal["speculative", "blocking"] = "speculative"

    def plan(self) -> OffloadPlan:
        """Lower the fields."""
        return OffloadPlan(values_only=self.parts == "values", blocking=self.schedule == "blocking")

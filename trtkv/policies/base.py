"""What a KV policy is: five optional roles, each a frozen description with its meaning in torch.

A role holds fields, says what it means in a few lines of obviously right fp32 torch, and says which buffers it needs. It has no state, no
forward and no device code: state lives in buffers that the plan names, kernels live in `trtkv.plugins`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from trtkv.config import ModelConfig
from trtkv.plan import BufferSpec, Meaning, Pooling, SelectPlan

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["allocate", "evict", "quantize", "retrieve", "offload"]
KINDS: tuple[Kind, ...] = ("allocate", "evict", "quantize", "retrieve", "offload")


class Role(BaseModel):
    """One of the five questions that a policy may answer.

    kind is the slot that the role fills, needs and gives are the capabilities by which roles of one policy are checked against each other,
    source names the paper and equation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[Kind]
    source: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()

    def meaning(self) -> Meaning:
        """Name this role by import path and fields, as a plan carries it."""
        cls = type(self)
        return Meaning(op=cls.__module__.rpartition(".")[2], role=f"{cls.__module__}:{cls.__qualname__}", fields=self.model_dump(mode="json"))

    def buffers(self, model: ModelConfig, page_size: int, layers: tuple[int, ...]) -> tuple[BufferSpec, ...]:
        """Return the buffers that hold this role's state in the given layers."""
        return ()


class Allocate(Role):
    """How many tokens may each layer and KV head keep?"""

    kind: ClassVar[Kind] = "allocate"


class Evict(Role):
    """Which stored tokens go for good?"""

    kind: ClassVar[Kind] = "evict"


class Quantize(Role):
    """How is a stored token encoded?"""

    kind: ClassVar[Kind] = "quantize"


class Offload(Role):
    """Where does a page live, and when does it move?"""

    kind: ClassVar[Kind] = "offload"


class Retrieve(Role):
    """Which stored tokens or pages does a decode query read?

    budget: attended tokens of each KV head, with sink, window and the open group; sink and window: first and last tokens that every query
    reads; dense_layers: first layers that read everything; pooling: how the query heads of a group agree on one selection ("none":
    every query head selects for itself).
    """

    kind: ClassVar[Kind] = "retrieve"
    unit: ClassVar[int] = 1
    budget: int = Field(1024, gt=0)
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)
    dense_layers: int = Field(0, ge=0)
    pooling: Pooling = "softmax-mean"

    @property
    def summary_group(self) -> int:
        """Tokens that are summarized together; the ones behind the last full group are always read."""
        raise NotImplementedError

    def summarize(self, keys: Tensor) -> dict[str, Tensor]:
        """Summarize keys [Hk, S, D] whose S is a multiple of `summary_group`; every value has Hk first."""
        raise NotImplementedError

    def score(self, query: Tensor, summary: dict[str, Tensor]) -> Tensor:
        """Score every unit for query [Hq, D] from a summary: [Hq, U] fp32, higher is read first."""
        raise NotImplementedError

    def select_plan(self) -> SelectPlan:
        """Lower the fields to what the selection op reads."""
        return SelectPlan(self.meaning(), self.budget, self.sink, self.window, self.unit, self.summary_group, self.pooling)

"""A policy: up to five roles, merged with `+`, checked against each other, lowered to a CachePlan."""

from __future__ import annotations

from math import lcm
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializeAsAny, ValidationError

from trtkv.config import ModelConfig
from trtkv.errors import ConfigError, PolicyConflict, UnknownName
from trtkv.plan import BufferSpec, CachePlan, SelectPlan
from trtkv.policies.base import KINDS, Allocate, Evict, Offload, Quantize, Retrieve, Role

DEFAULT_PAGE_SIZE = 32


class Policy(BaseModel):
    """What happens to the KV cache: at most one role of each kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "full"
    allocate: SerializeAsAny[Allocate] | None = None
    evict: SerializeAsAny[Evict] | None = None
    quantize: SerializeAsAny[Quantize] | None = None
    retrieve: SerializeAsAny[Retrieve] | None = None
    offload: SerializeAsAny[Offload] | None = None

    @property
    def roles(self) -> dict[str, Role]:
        """The filled roles by kind."""
        return {kind: role for kind in KINDS if (role := getattr(self, kind)) is not None}

    def __add__(self, other: Policy) -> Policy:
        """Merge two policies that fill different roles; raises PolicyConflict when both fill one."""
        both = sorted(set(self.roles) & set(other.roles))
        if both:
            mine, theirs = self.roles[both[0]], other.roles[both[0]]
            raise PolicyConflict(
                f"'{self.name}' and '{other.name}' both {both[0]}: {type(mine).__name__} and {type(theirs).__name__}",
                f"Use '{self.name}' or '{other.name}' alone.",
            )
        name = "+".join(part for part in (self.name, other.name) if part != "full") or "full"
        return Policy(name=name, **self.roles, **other.roles)

    def with_field(self, path: str, text: str) -> Policy:
        """Return a copy with one field set, `retrieve.budget` to `2048`; raises UnknownName or ConfigError."""
        kind, _, name = path.partition(".")
        if kind not in KINDS or not name:
            raise UnknownName("policy field", path, [f"{k}.{f}" for k, role in self.roles.items() for f in type(role).model_fields])
        role = self.roles.get(kind)
        if role is None:
            raise ConfigError(f"policy '{self.name}' has no {kind} role, so '{path}' means nothing", f"Its roles: {', '.join(self.roles) or 'none'}.")
        if name not in type(role).model_fields:
            raise UnknownName("policy field", path, [f"{kind}.{field}" for field in type(role).model_fields])
        return self.model_copy(update={kind: make_role(type(role), {**role.model_dump(), name: text}, self.name)})

    def with_budget(self, budget: int) -> Policy:
        """Return a copy whose budget, wherever it lives, is so many tokens of each KV head."""
        for kind in ("allocate", "evict", "retrieve"):
            role = self.roles.get(kind)
            if role is not None and "budget" in type(role).model_fields:
                return self.with_field(f"{kind}.budget", str(budget))
        if not self.roles:
            raise ConfigError("policy 'full' keeps and reads every token, a budget means nothing to it", "Leave --budget out or choose another policy.")
        raise ConfigError(f"policy '{self.name}' has no budget", f"Set one of its fields with --set: {', '.join(self._fields())}.")

    def _fields(self) -> list[str]:
        return [f"{kind}.{field}" for kind, role in self.roles.items() for field in type(role).model_fields]

    def plan(self, model: ModelConfig) -> CachePlan:
        """Lower the policy for a model; raises ConfigError or PolicyConflict when it cannot work."""
        every = tuple(range(model.num_layers))
        retrieve = self.retrieve
        page_size = lcm(DEFAULT_PAGE_SIZE, retrieve.summary_group) if retrieve else DEFAULT_PAGE_SIZE
        head = ("P", model.num_kv_heads, page_size, model.head_dim)
        buffers = [BufferSpec(name, head, "P Hk N D", model.dtype, every) for name in ("keys", "values")]
        select: list[SelectPlan | None] = [None] * model.num_layers
        if retrieve:
            check_budget(self.name, retrieve)
            sparse = every[retrieve.dense_layers :]
            buffers += retrieve.buffers(model, page_size, sparse)
            for layer in sparse:
                select[layer] = retrieve.select_plan()
        return CachePlan(
            policy=self.name,
            num_layers=model.num_layers,
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            kv_dtype=model.dtype,
            page_size=page_size,
            buffers=tuple(buffers),
            select=tuple(select),
            roles={kind: role.meaning() for kind, role in self.roles.items()},
        )


def check_budget(name: str, role: Retrieve) -> None:
    """Raise ConfigError unless the budget holds sink, window and one group."""
    least = role.sink + role.window + role.summary_group
    if role.budget < least:
        raise ConfigError(
            f"budget {role.budget} of '{name}' is below sink {role.sink} + window {role.window} + one group {role.summary_group}",
            f"Give at least --budget {least}.",
        )


def make_role(cls: type[Role], fields: dict[str, Any], policy: str) -> Role:
    """Build a role from plain fields; raises UnknownName for a field it lacks and ConfigError for a value out of range."""
    for name in fields:
        if name not in cls.model_fields:
            raise UnknownName(f"field of {cls.kind} role '{cls.__name__.lower()}'", name, cls.model_fields)
    try:
        return cls(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        path = f"{cls.kind}.{'.'.join(map(str, first['loc']))}"
        raise ConfigError(f"{path} = {first['input']} of policy '{policy}' is refused: {first['msg'].lower()}", f"See `trtkv policies {policy}`.") from None

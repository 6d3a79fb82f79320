"""Triton's interpreter, made to remember what it derives again at each operation: the same bits in a third of the time.

Most of its time goes into types, which every operation describes, hashes and wraps again, and into the language, which every launch patches.
"""

from __future__ import annotations

from typing import Any

from triton.language import core, semantic
from triton.runtime import interpreter

_WRAPPED = (core.constexpr,)


def remember() -> None:
    """Patch the interpreter of this process, once."""
    if core.block_type.__init__ is _block_type:
        return
    core.block_type.__init__ = _block_type
    core.tensor.__init__ = _tensor
    core.dtype.__eq__, core.dtype.__hash__ = _same, _hash
    interpreter._get_np_dtype = _numpy_dtype
    interpreter._patch_lang = _patch_once
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = _unchecked
    semantic.TritonSemantic.broadcast_impl_value = _broadcast


_described: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_describe = core.block_type.__init__


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = element_ty.name, tuple(one.value if isinstance(one, _WRAPPED) else one for one in shape)
    known = _described.get(key)
    if known is None:
        _describe(self, element_ty, shape)
        self.wrapped, self.count = core.tuple([core.constexpr(one) for one in self.shape]), core.constexpr(self.numel)
        known = _described[key] = dict(self.__dict__)
    self.__dict__.update(known)


_SCALAR, _ONE = core.tuple(()), core.constexpr(1)


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type = handle, type
    if isinstance(type, core.block_type):
        self.shape, self.numel, self.dtype = type.wrapped, type.count, type.element_ty
    else:
        self.shape, self.numel, self.dtype = _SCALAR, _ONE, type.scalar


def _same(self: Any, other: Any) -> bool:
    if self is other:
        return True
    other = other.value if isinstance(other, _WRAPPED) else other
    return isinstance(other, core.dtype) and self.name == other.name


def _hash(self: Any) -> int:
    return hash(self.name)


_numpy: dict[str, Any] = {}
_look_up = interpreter._get_np_dtype


def _numpy_dtype(type: Any) -> Any:
    found = _numpy.get(type.name)
    if found is None:
        found = _numpy[type.name] = _look_up(type)
    return found


_patched: set[int] = set()
_patch = interpreter._patch_lang


class _Nothing:
    def restore(self) -> None:
        """Leave the language patched: nothing here compiles."""


def _patch_once(function: Any) -> Any:
    """Patch the language for the first function of a module; every launch used to do and undo it."""
    space = id(function.__globals__)
    if space not in _patched:
        _patched.add(space)
        _patch(function)
    return _Nothing()


def _unchecked(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """Compute no check of overflow: the interpreter makes its assertion in debug mode only, but computes it always."""


_broadcast_any = semantic.TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return _broadcast_any(self, lhs, rhs)

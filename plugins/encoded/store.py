"""Encoded caches of a session on a GPU: pages of codes for every layer, a ring of newest tokens for every slot, and prompts while they are read.

A prompt attends to itself in full precision and is encoded when it is complete, so its keys and values lie in tensors of their own until then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trtkv.config import DTYPE_BYTES
from trtkv.plan import BufferSpec, CachePlan
from trtkv.plugins.dtypes import TORCH_DTYPES
from trtkv.plugins.encoded import launch, reference
from trtkv.plugins.encoded.formats import Format
from trtkv.plugins.rows import Row

_CODES = ("key_codes", "key_scale", "key_minimum", "value_codes", "value_scale", "value_minimum")
Prompt = tuple[Tensor, Tensor]


class EncodedStore:
    """The caches of all layers; `buffers[name][layer]` as a session has them, "keys" and "values" being the rings [Z, Hk, ring, D]."""

    def __init__(self, plan: CachePlan, form: Format, num_pages: int, num_slots: int, device: torch.device) -> None:
        """Allocate pages and rings."""
        self.plan, self.form, self.device = plan, form, device
        every = range(plan.num_layers)
        ring = (num_slots, plan.num_kv_heads, form.ring, plan.head_dim)
        real = TORCH_DTYPES[plan.kv_dtype]
        self.buffers: dict[str, list[Tensor | None]] = {}
        for name in ("keys", "values"):
            self.buffers[name] = [torch.empty(ring, dtype=real, device=device) for _ in every]
        for spec in _encoded(plan):
            shape = (num_pages, *map(int, spec.shape[1:]))
            self.buffers[spec.name] = [torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype], device=device) for _ in every]
        self.pages = [self._pages(layer) for layer in every]
        self.one_page = torch.zeros(1, 1, dtype=torch.int32, device=device)  # the page table of a prompt that is read
        self.keep_prompts = False  # until the step behind the prompt, for those who compare
        self._prompts: dict[int, dict[int, Prompt]] = {}  # by slot, then layer
        self._lengths: dict[int, int] = {}
        self._begins: dict[int, tuple[int, int]] = {}  # encoded tokens before what is being read

    def begin(self, rows: Iterable[Row]) -> None:
        """Take note of a step's sequences; one whose stored tokens are all new begins afresh."""
        for row in rows:
            before = row.stored - row.new
            if row.answers or not before or before >= self._lengths[row.slot]:
                self._prompts[row.slot] = {}
            self._lengths[row.slot] = row.prompt

    def release(self, slot: int) -> None:
        """Drop what a slot holds beside its pages."""
        self._prompts.pop(slot, None)
        self._lengths.pop(slot, None)

    def prompt(self, layer: int, row: Row) -> Prompt:
        """Return the keys and values [1, Hk, X, D] of a prompt that is being read, X its length in whole sixteens; made with its first chunk.

        What is longer than its prompt was said to be goes on behind what its pages and its ring hold.
        """
        own = self._prompts[row.slot]
        if layer not in own:
            shape = (1, self.plan.num_kv_heads, -(-row.prompt // 16) * 16, self.plan.head_dim)
            made = [torch.empty(shape, dtype=TORCH_DTYPES[self.plan.kv_dtype], device=self.device) for _ in range(2)]
            before = row.stored - row.new
            if before:
                for x, old in zip(made, reference.visible(self.pages[layer], row.pages, row.slot, before + self.form.lag), strict=True):
                    x[0, :, :before] = old[:, :before]
            own[layer] = (made[0], made[1])
            self._begins[row.slot] = self.form.encoded(before)
        return own[layer]

    def encode_prompt(self, layer: int, row: Row, table: Tensor) -> None:
        """Encode a complete prompt into its pages, table [M] int32, and keep what stays in full precision in the slot's ring."""
        plain, pages = self._prompts[row.slot][layer], self.pages[layer]
        if not self.keep_prompts:
            del self._prompts[row.slot][layer]
        ends = self.form.encoded(row.stored)
        launch.encode_prompt(plain[0][0], plain[1][0], table, pages, ends, self._begins[row.slot])
        for x, ring, end in zip(plain, (pages.keys, pages.values), ends, strict=True):
            tokens = torch.arange(end, row.stored, device=self.device)
            ring[row.slot][:, tokens % self.form.ring] = x[0, :, end : row.stored]

    def seen(self, layer: int, row: Row) -> Prompt:
        """Return the keys and values [Hk, S, D] that the announced step's attention read of a sequence; of a complete prompt with `keep_prompts`."""
        plain = self._prompts[row.slot].get(layer)
        if plain is not None:
            return plain[0][0, :, : row.stored], plain[1][0, :, : row.stored]
        return reference.visible(self.pages[layer], row.pages, row.slot, row.stored)

    def stored_bytes(self, slot: int, seen: int) -> int:
        """Return the bytes that hold keys, values, codes and metadata of a sequence that has seen so many tokens."""
        ends = self.form.encoded(seen) if seen >= self._lengths.get(slot, 0) else (0, 0)
        return sum(self._bytes(spec, seen, ends[spec.name.startswith("value")]) for spec in self.plan.buffers) * self.plan.num_layers

    def reserved_bytes(self, slot: int, seen: int) -> int:
        """Return the bytes that such a sequence occupies: pages, ring, and its prompt while that is read."""
        reading = sum(x.nbytes for pair in self._prompts.get(slot, {}).values() for x in pair)
        return self.plan.pages(seen) * page_bytes(self.plan) + slot_bytes(self.plan, self.form) + reading

    def _bytes(self, spec: BufferSpec, seen: int, end: int) -> int:
        tokens = end if spec.pool == "encoded" else seen - end
        return tokens // spec.tokens_per_entry * spec.row_bytes * spec.tokens_per_entry // self.plan.page_size

    def _pages(self, layer: int) -> launch.Pages:
        found = {name: self.buffers[name][layer] for name in ("keys", "values", *_CODES) if name in self.buffers}
        found |= {name: found[name.replace("minimum", "scale")] for name in _CODES if name not in found}
        return launch.Pages(self.form, self.plan.page_size, **found)  # type: ignore[arg-type]


def page_bytes(plan: CachePlan) -> int:
    """Return the bytes of one page of encoded tokens in all layers."""
    return sum(spec.row_bytes * len(spec.layers) for spec in _encoded(plan))


def slot_bytes(plan: CachePlan, form: Format) -> int:
    """Return the bytes of a slot's rings in all layers."""
    return form.ring * token_bytes(plan)


def token_bytes(plan: CachePlan) -> int:
    """Return the bytes of one token in full precision in all layers."""
    return 2 * plan.num_kv_heads * plan.head_dim * DTYPE_BYTES[plan.kv_dtype] * plan.num_layers


def _encoded(plan: CachePlan) -> list[BufferSpec]:
    return [spec for spec in plan.buffers if spec.pool == "encoded"]

"""Where an offloaded page lies: which layers are offloaded, and how many frames and ring places a sequence has on the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trtkv.config import DTYPE_BYTES
from trtkv.errors import ConfigError
from trtkv.plan import CachePlan, SelectPlan

LEAST_RING = 2  # the page that fills up and the one before it


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of one sequence in one offloaded layer, in pages, the same for every KV head.

    frames (F) hold older pages that were selected; the newest ring (R) pages, which the window always reads, lie at place page % R of a ring. A
    selection lists at most width (K) pages. page_bytes are those of the keys and values of one page of one layer on the host.
    """

    layers: tuple[int, ...]
    frames: int
    ring: int
    width: int
    page_size: int
    page_bytes: int
    num_kv_heads: int

    @property
    def places(self) -> int:
        """Frames and ring together: what an entry of a list of places may name."""
        return self.frames + self.ring

    def device_bytes(self, slots: int) -> int:
        """Bytes of the frames and rings of so many sequences in all offloaded layers, with what is known about them."""
        state = 2 * 4 * self.num_kv_heads * self.frames
        return (slots * (self.places * self.page_bytes + state) + 2 * 8) * len(self.layers)

    def host_bytes(self, pages: int) -> int:
        """Bytes of so many pages on the host, over all offloaded layers."""
        return pages * self.page_bytes * len(self.layers)


def why_not(plan: CachePlan) -> str | None:
    """Say why the pages of a plan cannot live on the host, None where they can."""
    chosen = [one for one in plan.select if one is not None]
    if plan.held or plan.evict is not None or plan.quantize is not None:
        return "evicts or encodes tokens, and only plain pages move to the host"
    if not chosen:
        return "reads every stored token in every step"
    if any(one.unit != plan.page_size for one in chosen):
        return "selects other units than whole pages of the cache"
    if any(one.pooling == "none" for one in chosen):
        return "selects for every query head, and pages move for a KV head"
    if plan.num_page_groups > 1:
        return "has page tables of its own for some layers"
    offload = plan.roles.get("offload")
    if offload is not None and offload.fields.get("parts", "both") != "both":
        return "keeps keys on the device and only values on the host"
    return None


def layout(plan: CachePlan, slack: float = 0.25) -> Layout:
    """Lay out the frames of a plan; slack is the share of a selection that stays resident beyond it, for pages that come back.

    Raises ConfigError where the plan's pages cannot live on the host.
    """
    problem = why_not(plan)
    if problem is not None:
        raise ConfigError(f"policy '{plan.policy}' cannot be offloaded: it {problem}", "Leave --offload out, or choose freekv, quest or arkvale.")
    layers = tuple(layer for layer, one in enumerate(plan.select) if one is not None)
    chosen = [one for one in plan.select if one is not None]
    width, size = max(one.width for one in chosen), plan.page_size
    ring = max([LEAST_RING, *(_window_pages(one) for one in chosen)])
    page_bytes = 2 * plan.num_kv_heads * size * plan.head_dim * DTYPE_BYTES[plan.kv_dtype]
    return Layout(layers, width + ceil(width * slack), ring, width, size, page_bytes, plan.num_kv_heads)


def _window_pages(select: SelectPlan) -> int:
    """Return the most pages that the window touches."""
    return (select.window + select.unit - 2) // select.unit + 1

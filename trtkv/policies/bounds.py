"""Bounds of a page's keys and what a query can score against them at most."""

from __future__ import annotations

from trtkv.lazy import F, Tensor, torch


def page_boxes(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest value of every channel of every page, [Hk, M, D] each; the last page of keys [Hk, S, D] may be open."""
    missing = -keys.shape[1] % page
    low = torch.unflatten(F.pad(keys, (0, 0, 0, missing), value=float("inf")), 1, (-1, page)).amin(2)
    high = torch.unflatten(F.pad(keys, (0, 0, 0, missing), value=float("-inf")), 1, (-1, page)).amax(2)
    return low, high


def mean_boxes(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return boxes around the middle of every page's range whose half width is the mean distance from it ("cuboid-mean"), [Hk, M, D] each in fp32."""
    pages = torch.unflatten(keys.float(), 1, (-1, page))
    centre = (pages.amin(2) + pages.amax(2)) / 2
    reach = (pages - centre[:, :, None]).abs().mean(2)
    return centre - reach, centre + reach


def box_score(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the highest product that query [Hq, D] has with any point of the boxes [Hk, M, D]: [Hq, M] fp32."""
    grouped = torch.unflatten(query.float(), 0, (low.shape[0], -1))
    upper = grouped.clamp(min=0) @ high.float().transpose(1, 2) + grouped.clamp(max=0) @ low.float().transpose(1, 2)
    return upper.flatten(0, 1)


def ball_score(query: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Return the highest product that query [Hq, D] has with any point of the balls centre [Hk, M, D], radius [Hk, M]: [Hq, M] fp32."""
    grouped = torch.unflatten(query.float(), 0, (centre.shape[0], -1))
    upper = grouped @ centre.float().transpose(1, 2) + torch.einsum("hg,hm->hgm", grouped.norm(dim=-1), radius.float())
    return upper.flatten(0, 1)

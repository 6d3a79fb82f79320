"""Recall for one KV head of one sequence, by sets and sorting."""

from __future__ import annotations

from collections.abc import Sequence


def assign(pages: Sequence[int], newest: int, ring: int, held: list[int], stamps: list[int], clock: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Find a place for every listed page and say what has to be copied.

    pages ascend; the newest `ring` pages up to page `newest` lie in the ring: page p at place F + ring - 1 - (newest - p), which is no storage
    order but one in which the open page comes last. held [F] names the page of every frame (-1: none) and stamps [F] when it was last selected;
    both are brought up to date with clock. Pages that are in no frame take, in order, those that the list does not name: empty ones, then the
    least recently selected, of equal ones the lowest. Returns the places [n], and the copies (page, frame).
    """
    frames = len(held)
    place_of = {page: frame for frame, page in enumerate(held) if page >= 0}
    wanted = [page for page in pages if page <= newest - ring]
    kept = {place_of[page] for page in wanted if page in place_of}
    oldest = sorted((frame for frame in range(frames) if frame not in kept), key=lambda frame: (stamps[frame] if held[frame] >= 0 else -1, frame))
    missing = [page for page in wanted if page not in place_of]
    copies = list(zip(missing, sorted(oldest[: len(missing)]), strict=False))
    assert len(copies) == len(missing), f"{len(wanted)} pages listed for {frames} frames"
    for page, frame in copies:
        held[frame], place_of[page] = page, frame
    for page in wanted:
        stamps[place_of[page]] = clock
    return [place_of[page] if page <= newest - ring else frames + ring - 1 - (newest - page) for page in pages], copies

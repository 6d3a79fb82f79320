"""Sessions that several tests of caches run: fixed tokens in given steps, and captured steps without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from tests.tiny import Rig
from trtkv.runtime import graphs
from trtkv.runtime.rows import StepRow


def feed_steps(
    rig: Rig, texts: Tensor, prompts: Sequence[int], steps: Iterable[Sequence[tuple[int, int, int]]], after: Callable[[], object] | None = None
) -> tuple[Tensor, list[int]]:
    """Feed texts [slots, T] in steps of (slot, seen, new), prompts so long: logits, and the bytes stored behind each step."""
    logits, sizes = [], []
    for step in steps:
        rows = []
        for slot, seen, new in step:
            wanted = (new - 1,) if seen + new >= prompts[slot] else ()
            rows.append(StepRow(texts[slot, seen : seen + new].tolist(), seen, slot, rig.pages(slot), wanted, prompts[slot]))
        logits.append(rig.stepper.run(rows))
        sizes.append(rig.cache.stored_bytes())
        if after is not None:
            after()
    return torch.cat([x for x in logits if len(x)]), sizes


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a captured step run its operators again at every replay; the list counts the replays of every captured step."""
    counts: list[int] = []

    def capture(step: Callable[[], Tensor], device: torch.device, pool: object) -> tuple[Callable[[], None], Tensor]:
        number, logits = len(counts), torch.empty(0)
        counts.append(0)

        def replay() -> None:
            counts[number] += 1
            made = step()
            logits.resize_(made.shape).copy_(made)

        return replay, logits

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "new_pool", lambda: 0)
    return counts

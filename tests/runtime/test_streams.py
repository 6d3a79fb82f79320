"""Streams beside a step's: what waits for what, as it runs and captured."""

from __future__ import annotations

import pytest
import torch

from trtkv.runtime.streams import SideStream

LONG = 20_000_000  # cycles of a kernel that waits: some milliseconds, far longer than the launches after it


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_what_follows_waits_for_the_side_stream_and_a_join_for_both(captured: bool) -> None:
    """Each branch adds to what the one before it left, after a kernel that takes long; a branch that did not wait would read an older number."""
    device = torch.device("cuda")
    side, x, seen = SideStream(device), torch.zeros(1, device=device), torch.zeros(4, device=device)

    def step() -> None:
        x.add_(1)
        with side.behind():
            torch.cuda._sleep(LONG)
            seen[0] = x[0] * 10
        with side.after():
            torch.cuda._sleep(LONG)
            seen[1] = seen[0] + 1
        with side.behind():
            seen[2] = seen[0] + 2
        with side.after():
            seen[3] = seen[1] + seen[2]
        side.join()
        x.copy_(seen[3:])

    step()
    torch.cuda.synchronize()
    assert (x.tolist(), seen.tolist()) == ([23.0], [10.0, 11.0, 12.0, 23.0])
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        torch.cuda.synchronize()
        assert (x.tolist(), seen.tolist()) == ([483.0], [240.0, 241.0, 242.0, 483.0])

"""Times of repeated calls: CUDA-graph replay on a GPU, the wall clock on a CPU, with one interface.

A call gets a running number, so that it can read other buffers each time: with more bytes in rotation than the caches hold, every call finds
them cold, as a layer of a model does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UP = 2  # replays or calls that are not counted
FEWEST_LAUNCHES = 8  # of a graph, so that the events around it weigh little
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}

Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call, over `samples` samples: of a graph, a sample is the mean over its launches.

    how says what a sample is: "CUDA graph", "CUDA events" (with the reason why no graph could be captured) or "wall clock"; last is the number that
    the last call got.
    """

    median_us: float
    p90_us: float
    p99_us: float
    least_us: float
    samples: int
    how: str
    last: int = 0

    @staticmethod
    def of(samples_us: Sequence[float], how: str, last: int = 0) -> Times:
        """Summarize samples; percentiles are nearest ranks, so each is a time that was measured."""
        ordered = sorted(samples_us)
        median, p90, p99 = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99))
        return Times(median, p90, p99, ordered[0], len(ordered), how, last)


def measure(call: Call, launches: int, runs: int, device: torch.device) -> Times:
    """Time call(i), i = 0, 1, ..., `runs` times; launches is the number of different buffers that it reads in turn."""
    if device.type != "cuda":
        return _measure_wall(call, launches, runs)
    launches = max(launches, FEWEST_LAUNCHES)
    with torch.cuda.device(device):
        _warm(call)
        try:
            graph = capture(call, launches)
        except RuntimeError as error:
            torch.cuda.synchronize()
            return _measure_events(call, launches, runs, f"CUDA events, as no graph can be captured: {str(error).splitlines()[0]}")
        return Times.of([us / launches for us in _time_events(graph.replay, runs)], "CUDA graph", launches - 1)


def spread_percent(first: Times, second: Times) -> float:
    """Return by how much two runs of one thing differ: a difference between two things below it is noise."""
    low, high = sorted((first.median_us, second.median_us))
    return (high / low - 1) * 100


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second, read and written ones together, that a large copy reaches here: what memory can do at best."""
    size = COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # A copy in a captured graph may be left to the copy engines, which are slower than a kernel that reads and writes.
    calls: tuple[Call, ...] = (lambda i: target.copy_(source), lambda i: torch.neg(source, out=target))
    return 2 * source.nbytes / (min(measure(call, 1, 9, device).median_us for call in calls) * 1e-6)


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level cache that rotation has to exceed; a CPU's is not requested and taken as 32 MiB."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 32 << 20


def _warm(call: Call) -> None:
    """Compile and allocate outside a capture, on a stream as the capture uses one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(WARM_UP):
            call(i)
    torch.cuda.synchronize()


def capture(call: Call, launches: int) -> torch.cuda.CUDAGraph:
    """Capture call(0) to call(launches - 1), which must have run before; raises RuntimeError where a call waits for the device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(i)
    return graph


def _measure_events(call: Call, launches: int, runs: int, how: str) -> Times:
    def sweep() -> None:
        for i in range(launches):
            call(i)

    return Times.of([us / launches for us in _time_events(sweep, runs)], how, launches - 1)


def _time_events(work: Callable[[], object], runs: int) -> list[float]:
    samples = []
    for _ in range(runs + WARM_UP):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return samples[WARM_UP:]


def _measure_wall(call: Call, launches: int, runs: int) -> Times:
    samples = []
    for i in range(runs + WARM_UP):
        started = time.perf_counter()
        call(i % launches)
        samples.append((time.perf_counter() - started) * 1e6)
    return Times.of(samples[WARM_UP:], "wall clock", (runs + WARM_UP - 1) % launches)

"""Launching the sampler: every tensor is given, nothing is allocated or synchronized."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from plugins.device import nvrtc
from plugins.device.driver import arch
from plugins.device.nvrtc import Int, Kernel, Long, Pointer

_SOURCE = Path(__file__).parent / "sample.cu"
_SAMPLE, _FEED, _FETCH = (Pointer,) * 8 + (Long, Int), (Pointer,) * 4 + (Int,), (Pointer,) * 5 + (Int,) * 7
CLUSTER, CLUSTERS_FROM = 8, 90  # blocks of a row; clusters of blocks came with this compute capability
THREADS, FEED_THREADS = 1024, 256
_SMALL = ("-DCLUSTER=1", f"-DTHREADS={THREADS}", "-DSTAGED=0")  # of the kernels beside the sampler
_MOST_STAGED = 200 * 1024  # bytes of a row's share that a block keeps in shared memory


def sample(logits: Tensor, settings: Tensor, numbers: Tensor, slots: Tensor, counts: Tensor | None, last: Tensor, turn: Tensor, ring: Tensor) -> None:
    """Choose a token for every row of logits [B, V] fp32, contiguous: last [Z] gets it by slot, entry turn [1] of ring [R, 2, W] all of them.

    An entry of the ring holds ids and the bits of log probabilities.

    settings [B, FIELDS] fp32, numbers [B] fp64, slots [B], last, turn and ring int32, counts [Z, V] int32 as in `reference.py`. The ring may lie in
    pinned host memory, which the host may read once it has waited for the launch.
    """
    batch, vocab = logits.shape
    kernel, cluster, shared = sample_kernel(vocab, arch())
    pointers = [one.data_ptr() for one in (logits, settings, numbers, slots)]
    values = (*pointers, 0 if counts is None else counts.data_ptr(), last.data_ptr(), turn.data_ptr(), ring.data_ptr(), ring.stride(1), vocab)
    kernel.launch((batch * cluster, 1, 1), THREADS, shared, torch.cuda.current_stream().cuda_stream, values, cluster=cluster)


def feed(given: Tensor, slots: Tensor, last: Tensor, ids: Tensor) -> None:
    """Write ids [T]: the given ones, where those are negative what last [Z] holds for their slots [T]; all int32."""
    tokens = given.shape[0]
    values = (given.data_ptr(), slots.data_ptr(), last.data_ptr(), ids.data_ptr(), tokens)
    feed_kernel(arch()).launch((-(-tokens // FEED_THREADS), 1, 1), FEED_THREADS, 0, torch.cuda.current_stream().cuda_stream, values)


def fetch(staged: Tensor, block: Tensor, turn: Tensor, last: Tensor | None, table: Tensor, at: tuple[int, int, int], batch: int) -> None:
    """Copy the staged block [Q, bytes] that is next in turn [1] to block [bytes] and count turn on; staged may lie in pinned host memory.

    at are the places, in words, of ids [B], of slots [B], and of what table [Y, B, M] gains [2, B]: a column or -1, and the page that stands there
    from now on. Ids that are negative become what last [Z] holds for their slots. Everything int32.
    """
    pointers = [0 if one is None else one.data_ptr() for one in (staged, block, turn, last, table)]
    values = (*pointers, staged.shape[0], staged.shape[1] // 4, *at, batch, table.stride(1))
    fetch_kernel(arch()).launch((1, 1, 1), THREADS, 0, torch.cuda.current_stream().cuda_stream, values)


def sample_kernel(vocab: int, arch: str) -> tuple[Kernel, int, int]:
    """Load the sampler for a vocabulary; returns it with the blocks of a row and their dynamic shared memory in bytes."""
    cluster = CLUSTER if int(arch) >= CLUSTERS_FROM else 1
    share = -(-vocab // cluster) * 4
    shared = share if share <= _MOST_STAGED and cluster > 1 else 0
    defines = (f"-DCLUSTER={cluster}", f"-DTHREADS={THREADS}", f"-DSTAGED={int(shared > 0)}")
    return nvrtc.load(_SOURCE, "sample", _SAMPLE, defines, arch, _MOST_STAGED if shared else 0), cluster, shared


def feed_kernel(arch: str) -> Kernel:
    """Load the kernel that hands chosen tokens to the next step."""
    return nvrtc.load(_SOURCE, "feed", _FEED, _SMALL, arch, 0)


def fetch_kernel(arch: str) -> Kernel:
    """Load the kernel that brings a captured step its inputs."""
    return nvrtc.load(_SOURCE, "fetch", _FETCH, _SMALL, arch, 0)


def request(vocab: int, arch: str) -> None:
    """Load every kernel of an engine with this vocabulary."""
    sample_kernel(vocab, arch)
    feed_kernel(arch)
    fetch_kernel(arch)

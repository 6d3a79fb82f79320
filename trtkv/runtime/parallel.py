"""Engines of several parts (tensor parallelism): one process a part, each with its share of the KV heads and of the hidden layer.

The first process schedules and samples. It sends the others which sequences take part in a step; all run the same graph, which adds the parts up.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plugins.cache.pages import Pages
from trtkv.engine.manifest import Manifest, read_manifest
from trtkv.errors import ConfigError, EngineError, TrtkvError
from trtkv.runtime.choice import Choice
from trtkv.runtime.device_sampler import Chosen
from trtkv.runtime.loading import Engine, Loaded, Options, Part, Progress, find_device, open_engine
from trtkv.runtime.rows import StepRow
from trtkv.runtime.step import Stepper

PATIENCE = timedelta(minutes=30)  # of a part for the others: one may still be reading weights
LEAVE_S = 5.0
RESTART = "Open the engine again."


@dataclass(slots=True)
class Follower:
    """Another part's process and the pipe to it; known holds the page lists that it has."""

    process: BaseProcess
    pipe: Connection
    known: dict[int, Pages]


def open_parts(directory: Path, options: Options, progress: Progress = lambda stage, fraction: None) -> Engine:
    """Open an engine with all its parts; one of a single part opens in this process alone.

    Raises as `open_engine` does, and ConfigError where there are fewer GPUs than parts or one GPU is named.
    """
    manifest = read_manifest(directory)
    if manifest.tp == 1:
        return open_engine(directory, options, progress)
    devices = _devices(options.device, manifest)
    folder = tempfile.mkdtemp(prefix="trtkv-parts-")  # the parts meet here, and again whenever they need a new connection
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    context = multiprocessing.get_context("spawn")
    followers = []
    for index in range(1, manifest.tp):
        ours, theirs = context.Pipe()
        own = replace(options, device=devices[index], loaded=Loaded())
        process = context.Process(target=_follow, args=(directory, own, index, manifest.tp, f"{folder}/store", theirs), daemon=True)
        process.start()
        theirs.close()
        followers.append(Follower(process, ours, {}))
    try:
        part = _meet(manifest.tp, f"{folder}/store", devices[0], followers)
        engine = open_engine(directory, replace(options, device=devices[0]), progress, part=part)
        for follower in followers:
            _expect_ready(follower)
    except BaseException:
        _stop(followers)
        raise
    stepper = LeadingStepper(engine.stepper, followers, part.close)
    tell = _teller(stepper)
    engine.cache.on_release = lambda slot: tell("release", slot)
    engine.cache.overrides.on_change = lambda slot, own: tell("own", (slot, own))
    return replace(engine, stepper=stepper)


class LeadingStepper(Stepper):
    """Runs a step here and in every other part."""

    def __init__(self, stepper: Stepper, followers: list[Follower], leave: Callable[[], None]) -> None:
        """Lead followers with an opened part's stepper; leave ends what this part has in common with them."""
        self.executor, self.cache, self.limits = stepper.executor, stepper.cache, stepper.limits
        self._own, self._followers = stepper, followers
        self._end = weakref.finalize(self, _end, stepper, followers, leave)  # at the process's end at the latest
        threading.Thread(target=_watch, args=([one.process.sentinel for one in followers], leave), daemon=True).start()

    def run(self, rows: Sequence[StepRow]) -> Tensor:
        """Run one step as `Stepper.run` does; raises EngineError when another part has failed."""
        for follower in self._followers:
            self._send(follower, "run", [_without_known_pages(row, follower.known) for row in rows])
        try:
            return self._own.run(rows)
        except RuntimeError as error:
            # A collective breaks when a process at its other end has died.
            raise self._failure(str(error).splitlines()[0]) from None

    @property
    def chooses(self) -> bool:
        """Whether next tokens are chosen on the device: every part has the whole logits and chooses the same."""
        return self._own.chooses

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be queued before the tokens of the one before it are known."""
        return self._own.runs_ahead

    def launch(self, rows: Sequence[StepRow], choices: Sequence[Choice]) -> Chosen:
        """Run one step and choose its next tokens as `Stepper.launch` does; raises EngineError when another part has failed."""
        # A slot's count continues.
        counted = [replace(one, history=((), 0)) if one.history and one.continues else one for one in choices]
        for follower in self._followers:
            self._send(follower, "launch", ([_without_known_pages(row, follower.known) for row in rows], counted))
        try:
            return self._own.launch(rows, choices)
        except RuntimeError as error:
            raise self._failure(str(error).splitlines()[0]) from None

    def choose_again(self, masks: npt.NDArray[np.int32]) -> Chosen:
        """Choose the tokens of constrained rows as `Stepper.choose_again` does, in every part."""
        self.tell("again", masks)
        return self._own.choose_again(masks)

    def tell(self, kind: str, value: object) -> None:
        """Send every other part a message."""
        for follower in self._followers:
            self._send(follower, kind, value)

    def close(self) -> None:
        """End the other parts' processes."""
        self._end()

    def _send(self, follower: Follower, kind: str, value: object) -> None:
        try:
            if follower.pipe.poll():
                raise self._failure(str(follower.pipe.recv()))
            follower.pipe.send((kind, value))
        except (OSError, EOFError):
            raise self._failure("its process has ended") from None

    def _failure(self, reason: str) -> EngineError:
        for index, follower in enumerate(self._followers, 1):
            if follower.pipe.poll():
                try:
                    reason = str(follower.pipe.recv())
                except (OSError, EOFError):
                    reason = f"the process of part {index} has ended"
                break
        self.close()
        return EngineError(f"a part of the engine has failed: {reason}", RESTART)


def _teller(stepper: LeadingStepper) -> Callable[[str, object], None]:
    """Return what sends messages to the other parts; it does not hold a reference to the engine."""
    alive = weakref.WeakMethod(stepper.tell)

    def tell(kind: str, value: object) -> None:
        if (found := alive()) is not None:
            found(kind, value)

    return tell


def _end(own: Stepper, followers: list[Follower], leave: Callable[[], None]) -> None:
    """End the other parts and leave them; captured steps go first, because NCCL does not free a communicator while one refers to it."""
    own.cache.on_release, own.cache.overrides.on_change, own._graphs = None, None, None
    _stop(followers)
    leave()


def _watch(sentinels: Sequence[int], leave: Callable[[], None]) -> None:
    """Leave the others as soon as one of them has ended: on a GPU a collective would wait for it forever."""
    wait(sentinels)
    leave()


def _without_known_pages(row: StepRow, known: dict[int, Pages]) -> StepRow:
    """Leave out a page list that the other side has already: lists of long sequences have thousands of numbers."""
    if known.get(row.slot) is row.pages:
        return replace(row, pages=())
    known[row.slot] = row.pages
    return row


def _with_known_pages(row: StepRow, known: dict[int, Pages]) -> StepRow:
    if row.pages:
        known[row.slot] = row.pages
        return row
    return replace(row, pages=known.get(row.slot, ()))


def _follow(directory: Path, options: Options, index: int, count: int, store: str, pipe: Connection) -> None:
    """Run one part until the pipe closes or says stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    known: dict[int, Pages] = {}
    try:
        part = _join(index, count, store, options.device)
        engine: Engine | None = open_engine(directory, options, part=part)
        pipe.send("ready")
        while True:
            kind, value = pipe.recv()
            if kind == "stop" or engine is None:
                engine = None  # with its captured steps, as in _end
                part.close()
                return
            if kind == "release":
                engine.cache.release(value)
            elif kind == "own":
                engine.cache.overrides.set(*value)
            elif kind == "launch":
                rows, choices = value
                engine.stepper.launch([_with_known_pages(row, known) for row in rows], choices)
            elif kind == "again":
                engine.stepper.choose_again(value)
            else:
                engine.stepper.run([_with_known_pages(row, known) for row in value])
    except (EOFError, KeyboardInterrupt):
        return
    except BaseException as error:  # noqa: BLE001 (the leader raises its own error)
        text = f"{type(error).__name__}: {error}" if not isinstance(error, TrtkvError) else str(error)
        pipe.send(" ".join(text.split()))


def _join(index: int, count: int, store: str, device: str) -> Part:
    """Meet the other parts through a file and return what this one needs of them."""
    import torch.distributed as dist

    shared = dist.FileStore(store, count)  # type: ignore[attr-defined]
    where = find_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
        group: Any = dist.ProcessGroupNCCL(shared, index, count, PATIENCE)  # type: ignore[arg-type]
    else:
        group = dist.ProcessGroupGloo(shared, index, count, PATIENCE)

    def least(number: int) -> int:
        held = torch.tensor([number], dtype=torch.int64, device=where)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        group.allreduce([held], options).wait()
        return int(held.item())

    def gather(own: Tensor, out: Tensor) -> None:
        rows, width = own.shape
        parts = out.view(count, rows, width) if rows == 1 else own.new_empty(count, rows, width)
        if where.type == "cuda":
            group._allgather_base(parts, own).wait()
        else:
            group.allgather([list(parts)], [own]).wait()
        if rows != 1:
            out.view(rows, count, width).copy_(parts.transpose(0, 1))

    return Part(index, count, lambda tensor: group.allreduce([tensor]).wait(), gather, least, _leaving(group))


def _meet(count: int, store: str, device: str, followers: Sequence[Follower]) -> Part:
    """Join as the first part; another one that has failed meanwhile says why."""
    try:
        return _join(0, count, store, device)
    except RuntimeError:
        for follower in followers:
            if follower.pipe.poll(LEAVE_S):
                _expect_ready(follower)
        raise


def _leaving(group: Any) -> Callable[[], None]:
    """Return a function that leaves a group and waits for that, but not forever: what still holds the group is then aborted."""
    thread, lock = threading.Thread(target=getattr(group, "abort", lambda: None), daemon=True), threading.Lock()

    def leave() -> None:
        with lock:
            if thread.ident is None:
                thread.start()
        thread.join(LEAVE_S)

    return leave


def _devices(name: str, manifest: Manifest) -> list[str]:
    """Name the device of every part."""
    device = find_device(name)
    if device.type == "cpu":
        return ["cpu"] * manifest.tp
    if ":" in name:
        raise ConfigError(f"device '{name}' names one GPU, the engine has {manifest.tp} parts", "Write --device cuda.")
    if torch.cuda.device_count() < manifest.tp:
        raise ConfigError(
            f"the engine has {manifest.tp} parts, {torch.cuda.device_count()} GPUs are there",
            f"Build with --tp {torch.cuda.device_count()} or fewer.",
        )
    return [f"cuda:{index}" for index in range(manifest.tp)]


def _expect_ready(follower: Follower) -> None:
    try:
        answer = follower.pipe.recv()
    except (OSError, EOFError):
        answer = "its process has ended"
    if answer != "ready":
        raise EngineError(f"a part of the engine could not be opened: {answer}", "See trtkv doctor.")


def _stop(followers: Sequence[Follower]) -> None:
    for follower in followers:
        with contextlib.suppress(OSError, EOFError):
            follower.pipe.send(("stop", None))
        follower.pipe.close()
    for follower in followers:
        follower.process.join(5)
        if follower.process.is_alive():
            follower.process.terminate()

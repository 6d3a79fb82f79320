"""Works through cells, in this process or in several that share one results file."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

from trtkv.errors import CapacityError, TrtkvError
from trtkv.eval.grid import Cell
from trtkv.eval.opened import Setup
from trtkv.eval.results import Results
from trtkv.eval.runner import Runner
from trtkv.eval.samples import SampleMaker

WAIT_S = 0.2  # between polls of cells that other processes run
TELL_S = 0.5  # between words of one worker about an unfinished cell
Progress = Callable[[str, float], None]  # a cell's key and the fraction of it that is done


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a worker ended early: a user error in its two parts, or a trace."""

    problem: str = ""
    fix: str = ""
    trace: str = ""

    def error(self) -> Exception:
        """What to raise in the parent."""
        return RuntimeError(f"a worker failed:\n{self.trace}") if self.trace else TrtkvError(self.problem, self.fix)


Event = Failed | tuple[str, float]  # why a worker ended, or a cell's key and the fraction of it that is done


def run_cells(cells: Sequence[Cell], setup: Setup, directory: Path, jobs: int, progress: Progress, maker: SampleMaker | None = None) -> None:
    """Run the cells that the results in a directory lack; other processes may do the same at once, and no cell runs twice.

    Raises what a cell raises; cells finished before are saved. Ctrl-C loses the cells that were running, and nothing else.
    """
    jobs = min(jobs, len(cells))
    if jobs > 1:
        _run_in_processes(cells, setup, directory, jobs, progress)
    elif cells:
        work_through(cells, Runner(setup, maker), Results(directory), progress)


def work_through(cells: Sequence[Cell], runner: Runner, results: Results, progress: Progress) -> None:
    """Run every cell that is neither finished nor claimed, until all are finished by whomever."""
    pending = {cell.key: cell for cell in cells}
    while pending:
        found = False
        for key, cell in list(pending.items()):
            with results.claim(key) as mine:
                if mine:
                    results.add(runner.run(cell, partial(progress, key)))
                    found = True
            if key in results.finished():
                progress(key, 1.0)
                del pending[key]
        if pending and not found:
            time.sleep(WAIT_S)


def _run_in_processes(cells: Sequence[Cell], setup: Setup, directory: Path, jobs: int, progress: Progress) -> None:
    context = multiprocessing.get_context("spawn")
    events: Queue[Event] = context.Queue()
    workers = [
        context.Process(target=_worker, args=(_turned(cells, index, jobs), setup, directory, jobs, events), daemon=True) for index in range(jobs)
    ]
    # Ctrl-C reaches the whole process group: workers are born deaf to it and are ended here.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        _follow(workers, events, progress)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _follow(workers: Sequence[BaseProcess], events: Queue[Event], progress: Progress) -> None:
    """Pass on workers' messages until all have ended; raises what ended one early."""
    ended = False
    while True:
        try:
            event = events.get(timeout=WAIT_S)
        except queue.Empty:
            # Only once nothing more has come since a worker's end is known is its last word heard.
            failed = next((worker.exitcode for worker in workers if worker.exitcode), None)
            if ended and failed is not None:
                raise CapacityError(f"a worker was ended from outside (exit code {failed}), perhaps for lack of memory", "Lower --jobs.") from None
            if ended:
                return
            ended = failed is not None or not any(worker.is_alive() for worker in workers)
            continue
        if isinstance(event, Failed):
            raise event.error()
        progress(*event)


def _turned(cells: Sequence[Cell], index: int, jobs: int) -> list[Cell]:
    """Let every worker begin elsewhere, so that each uses an open engine for several cells."""
    start = len(cells) * index // jobs
    return [*cells[start:], *cells[:start]]


def _worker(cells: Sequence[Cell], setup: Setup, directory: Path, jobs: int, events: Queue[Event]) -> None:
    import torch

    torch.set_num_threads(max(1, num_cpus() // jobs))
    try:
        work_through(cells, Runner(setup), Results(directory), _Teller(events))
    except TrtkvError as error:
        events.put(Failed(error.problem, error.fix))
    except Exception:  # noqa: BLE001 - shown by the parent
        events.put(Failed(trace=traceback.format_exc()))


class _Teller:
    """Reports a cell's progress to the parent, not too often, and ends a worker whose parent has died."""

    def __init__(self, events: Queue[Event]) -> None:
        self._events, self._told = events, 0.0
        self._parent = multiprocessing.parent_process()

    def __call__(self, key: str, fraction: float) -> None:
        now = time.monotonic()
        if fraction < 1 and now - self._told < TELL_S:
            return
        if self._parent is not None and not self._parent.is_alive():
            raise SystemExit(1)
        self._told = now
        self._events.put((key, fraction))


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

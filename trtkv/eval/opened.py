"""Opens what a cell evaluates: an engine directory, or a graph made on the fly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trtkv import api
from trtkv.engine.directory import Request, build_engine
from trtkv.errors import BuildError, CapacityError
from trtkv.eval.subjects import Subject
from trtkv.runtime.llm import LLM
from trtkv.runtime.loading import Loaded


@dataclass(frozen=True, slots=True)
class Setup:
    """How to run: device and executor as for `trtkv run`, batch the sequences at once; nothing here changes an answer in fp32.

    max_tokens is the greatest length of the run: engines made on the fly take no more.
    """

    device: str = "auto"
    executor: str = "auto"
    batch: int = 4
    max_tokens: int = 2048


def open_subject(subject: Subject, setup: Setup, loaded: Loaded | None = None) -> LLM:
    """Open an engine directory, or a graph made on the fly, which the torch executor runs with weights that are loaded where they are the same.

    Raises what `trtkv build` and `trtkv run` raise, and CapacityError when an engine takes fewer sequences at once than setup.batch.
    """
    if subject.engine is not None:
        llm = LLM(subject.engine, weights=str(subject.source.path), device=setup.device, executor=setup.executor, dense_below=0)
        there = llm.engine.manifest.limits.max_batch_size
        if setup.batch > there:
            raise CapacityError(f"the engine '{subject.engine}' takes {there} sequences at once", f"Give --batch {there}.")
        return llm
    chunk = subject.chunk_tokens or setup.max_tokens
    limits = api.limits_for(subject.source.config, setup.max_tokens, setup.batch, chunk)
    on_gpu = setup.device.startswith("cuda") or (setup.device == "auto" and torch.cuda.is_available())
    sms = () if on_gpu else ("none",)  # kernels for the GPU at hand, and none where no GPU runs them
    with TemporaryDirectory(prefix="trtkv-eval-") as place:
        request = Request(subject.source, subject.source.config, subject.policy, limits, Path(place) / "engine", sms, backend="none")
        try:
            built = build_engine(request)
        except (BuildError, CapacityError) as error:
            if "--out" not in error.fix:
                raise
            # The directory is not the user's choice.
            raise CapacityError(error.problem, "Free some space, or set TMPDIR to a directory on another disk.") from None
        return LLM(built.path, device=setup.device, executor=setup.executor, dense_below=0, loaded=loaded)

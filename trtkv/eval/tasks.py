"""The task table: every task by name, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from trtkv.errors import UnknownName
from trtkv.eval.agreement import Agreement
from trtkv.eval.attention import AttentionError
from trtkv.eval.long_generation import LongGeneration
from trtkv.eval.longbench import LongBench, LongBenchV2
from trtkv.eval.needle import Needle, Passkey
from trtkv.eval.perplexity import Perplexity
from trtkv.eval.pg19 import Pg19
from trtkv.eval.ruler import RULER
from trtkv.eval.ruler_qa import RulerQA

if TYPE_CHECKING:
    from trtkv.eval.task import Task, TaskOptions


SIZES = (("", 5), ("-16", 16), ("-64", 64))  # pass keys by the end of their names, and their digits


def _made(task: Task) -> Callable[[TaskOptions], Task]:
    return lambda options: task


TASKS: Mapping[str, Callable[[TaskOptions], Task]] = {
    **{one.name: _made(one) for one in (*(Passkey(f"passkey{more}", digits) for more, digits in SIZES), Needle(), *RULER)},
    "ruler-qa-1": partial(RulerQA, "ruler-qa-1"),
    "ruler-qa-2": partial(RulerQA, "ruler-qa-2"),
    "perplexity": partial(Perplexity, name="perplexity"),
    "agreement": partial(Agreement, name="agreement"),
    "attention": partial(AttentionError, name="attention"),
    "long-generation": partial(LongGeneration, name="long-generation"),
    "longbench": LongBench,
    "longbench-v2": LongBenchV2,
    "pg19": Pg19,
}

# Names for several tasks at once.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "ruler": tuple(one.name for one in RULER),
}


def make_task(name: str, options: TaskOptions) -> Task:
    """Make a task by name; raises UnknownName, and ConfigError for a file that is missing or damaged."""
    if name not in TASKS:
        raise UnknownName("task", name, [*TASKS, *GROUPS])
    return TASKS[name](options)


def task_names(names: Iterable[str]) -> list[str]:
    """Return names with groups spelled out, without repetition; raises UnknownName."""
    found = list(dict.fromkeys(one for name in names for one in GROUPS.get(name, (name,))))
    for name in found:
        if name not in TASKS:
            raise UnknownName("task", name, [*TASKS, *GROUPS])
    return found

"""The task table: every task by name, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from trtkv.errors import UnknownName
from trtkv.eval.agreement import Agreement
from trtkv.eval.attention import AttentionError
from trtkv.eval.common_words import CommonWords
from trtkv.eval.frequent_words import FrequentWords
from trtkv.eval.long_generation import LongGeneration
from trtkv.eval.longbench import LongBench
from trtkv.eval.longbench_v2 import LongBenchV2
from trtkv.eval.needle import Needle
from trtkv.eval.niah import VARIANTS
from trtkv.eval.passkey import PasskeyTask
from trtkv.eval.perplexity import Perplexity
from trtkv.eval.pg19 import Pg19
from trtkv.eval.ruler_qa import RulerQA
from trtkv.eval.variable_tracking import VariableTracking

if TYPE_CHECKING:
    from trtkv.eval.task import Task, TaskOptions


def _variant(name: str, options: TaskOptions) -> Task:
    return VARIANTS[name]


TASKS: Mapping[str, Callable[[TaskOptions], Task]] = {
    "passkey": lambda options: PasskeyTask("passkey", digits=5),
    "passkey-16": lambda options: PasskeyTask("passkey-16", digits=16),
    "passkey-64": lambda options: PasskeyTask("passkey-64", digits=64),
    "needle": lambda options: Needle(),
    **{name: partial(_variant, name) for name in VARIANTS},
    "variable-tracking": lambda options: VariableTracking(),
    "common-words": lambda options: CommonWords(),
    "frequent-words": lambda options: FrequentWords(),
    "ruler-qa-1": partial(RulerQA, "ruler-qa-1"),
    "ruler-qa-2": partial(RulerQA, "ruler-qa-2"),
    "perplexity": partial(Perplexity, name="perplexity"),
    "agreement": partial(Agreement, name="agreement"),
    "attention": partial(AttentionError, name="attention"),
    "long-generation": partial(LongGeneration, name="long-generation"),
    "longbench": partial(LongBench, name="longbench"),
    "longbench-v2": LongBenchV2,
    "pg19": Pg19,
}

# Names for several tasks at once.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "ruler": (*VARIANTS, "variable-tracking", "common-words", "frequent-words"),
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

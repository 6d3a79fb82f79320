"""How commands speak: JSON or tables on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trtkv.sizes import readable

notes = Console(stderr=True, highlight=False, soft_wrap=True)


class Size(int):
    """Bytes, which tables show in binary units."""


def print_json(data: Any) -> None:
    """Print one JSON value on one line of standard output."""
    print(json.dumps(data, ensure_ascii=False), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
    """Print a table; numbers are aligned to the right."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) and not isinstance(row[index], bool) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print named values, one a line; names are a JSON object's, whose _bytes are shown as sizes and _s as seconds. What is empty is left out."""
    print_table(["", ""], [_fact(key, value) for key, value in facts.items() if value is not None and value != [] and value != ""])


def _fact(key: str, value: Any) -> list[str]:
    """Return a name and a value in words."""
    words, number = key.split("_"), isinstance(value, int | float)
    if "bytes" in words:
        words.remove("bytes")
        value = Size(value) if number else value
    elif number and words[-1] == "s":
        value = f"{value:.1f} s"
        words.pop()
    return [" ".join(words), ", ".join(value) if isinstance(value, list) else _cell(value) if number else str(value)]


def _cell(value: Any) -> str:
    if isinstance(value, Size):
        return readable(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if isinstance(value, float) else escape(str(value))


@contextmanager
def progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """Show one bar on standard error while the block runs; yields report(stage, fraction)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def report(stage: str, fraction: float) -> None:
            bar.update(task, description=f"{title}: {stage}", completed=fraction)

        yield report

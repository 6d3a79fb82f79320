"""`trtkv doctor`."""

from __future__ import annotations

from typing import Any

from cyclopts import App

from trtkv.cli.output import print_facts, print_json, print_table


def register(app: App) -> None:
    """Add the command."""
    app.command(doctor)


def doctor(*, json: bool = False) -> None:
    """Report what is installed, what can build and run here, and what to install for the rest.

    Args:
        json: Print one JSON object.
    """
    from trtkv.diagnose.doctor import diagnose

    found: dict[str, Any] = diagnose()
    if json:
        print_json(found)
        return
    print_table(["package", "version", "for"], [[one["name"], one["version"] or "missing", one["purpose"]] for one in found["packages"]])
    print()
    print_facts(found["machine"])
    print()
    print_table(["can", "here", "why, or what to do"], [[one["what"], "yes" if one["here"] else "no", one["note"]] for one in found["abilities"]])

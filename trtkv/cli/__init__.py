"""The command line: `trtkv build|run|serve|export-triton|eval|bench|pull|inspect|verify|plan|policies|models|doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import cyclopts
from rich.console import Console

import trtkv
from trtkv.cli import bench, build, doctor, export_triton, inspect, lists, pull, run, serve, verify
from trtkv.cli import eval as evaluation
from trtkv.errors import TrtkvError

USER_ERROR, USAGE, INTERRUPTED = 1, 2, 130

app = cyclopts.App(
    name="trtkv",
    help=trtkv.__doc__,
    version=trtkv.__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    default_parameter=cyclopts.Parameter(negative=()),
)
for module in (build, run, serve, export_triton, evaluation, bench, pull, inspect, verify, lists, doctor):
    module.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an error that the user can mend, 2 wrong usage, 130 interrupted."""
    try:
        app(list(arguments) if arguments is not None else None, exit_on_error=False, print_error=False, error_console=Console(stderr=True))
    except cyclopts.CycloptsError as error:
        _complain(f"{' '.join(str(error).split())} See trtkv --help.")
        sys.exit(USAGE)
    except TrtkvError as error:
        _complain(str(error))
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output closed it; the interpreter must not report that again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(USER_ERROR)


def _complain(text: str) -> None:
    print(f"trtkv: {' '.join(text.split())}", file=sys.stderr)

"""The command line: `trtkv build|run|serve|export-triton|eval|tune|bench|pull|quantize|inspect|verify|plan|policies|models|doctor`."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence

import cyclopts
from rich.console import Console

import trtkv
from trtkv.cli import bench, build, doctor, export_triton, inspect, lists, pull, quantize, run, serve, tune, verify, worker
from trtkv.cli import eval as evaluation
from trtkv.errors import TrtkvError

USER_ERROR, USAGE, INTERRUPTED = 1, 2, 130
DEBUG = "--debug"
DYNAMO = "--dynamo"  # makes serve a command of its own, whose options are others

app = cyclopts.App(
    name="trtkv",
    help=trtkv.__doc__,
    version=trtkv.__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    help_epilogue=f"With {DEBUG} every command shows the traceback of an error.",
    default_parameter=cyclopts.Parameter(negative=()),
)
for module in (build, run, serve, export_triton, evaluation, tune, bench, pull, quantize, inspect, verify, lists, doctor, worker):
    module.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = [word for word in words if word != DEBUG]
    if given[:1] == ["serve"] and DYNAMO in given:
        given = [worker.NAME, *(word for word in given[1:] if word != DYNAMO)]
    try:
        app(given, exit_on_error=False, print_error=False, error_console=Console(stderr=True))
    except BrokenPipeError:
        # The reader of the output closed it; the interpreter must not report that again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(USER_ERROR)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (whatever it is, a user reads one line)
        if DEBUG in words:
            traceback.print_exc()
        line, code = _told(error)
        print(f"trtkv: {' '.join(line.split())}", file=sys.stderr)
        sys.exit(code)


def _told(error: BaseException) -> tuple[str, int]:
    """Return the line that says what went wrong, and the exit code."""
    match error:
        case cyclopts.ValidationError(argument=cyclopts.Argument(tokens=[token, *_])):
            return f"{token.keyword} {token.value} is out of range. {error.exception_message}", USER_ERROR
        case cyclopts.CoercionError():
            return f"{error} See trtkv --help.", USER_ERROR
        case cyclopts.CycloptsError():
            return f"{error} See trtkv --help.", USAGE
        case TrtkvError():
            return str(error), USER_ERROR
        case KeyboardInterrupt():
            return "interrupted", INTERRUPTED
        case OSError(filename=str() as name, strerror=str() as reason):
            return f"'{name}': {reason}. Check the path, its permissions and the space on its disk.", USER_ERROR
        case OSError(errno=errno.ENOSPC | errno.EFBIG | errno.EDQUOT, strerror=str() as reason):
            return f"the output cannot be written: {reason}. Free some space, or write it elsewhere.", USER_ERROR
    return f"an unforeseen {type(error).__name__}: {error}. Report it with the output of trtkv doctor; {DEBUG} shows where it is.", USER_ERROR

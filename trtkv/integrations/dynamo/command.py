"""How a worker is started: Dynamo's own flags and variables, its log, its event loop."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtkv.errors import ConfigError

if TYPE_CHECKING:
    from trtkv.integrations.dynamo.settings import Settings

PACKAGES = {"dynamo": "ai-dynamo"}
INSTALL = "pip install 'trtkv[dynamo]' && pip install --no-deps ai-dynamo==1.6.1"


def check_installed() -> None:
    """Raise ConfigError where Dynamo is missing, or what it imports."""
    try:
        import dynamo.common.backend
        import dynamo.common.configuration.groups.runtime_args  # noqa: F401
        import uvloop  # noqa: F401
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ConfigError(f"a Dynamo worker needs the package {PACKAGES.get(package, package)}", f"Install it: {INSTALL}.") from None


def run_worker(settings: Settings, flags: Sequence[str]) -> None:
    """Serve an engine until SIGTERM; flags are Dynamo's. Raises ConfigError for those that it does not know."""
    import uvloop
    from dynamo.common.backend.worker import Worker as Driver

    from trtkv.integrations.dynamo.engine import Worker

    uvloop.run(Driver(Worker(settings), worker_config(settings, flags)).run())


def worker_config(settings: Settings, flags: Sequence[str]) -> Any:
    """Read Dynamo's flags and environment variables (DYN_NAMESPACE, DYN_DISCOVERY_BACKEND, DYN_TOOL_CALL_PARSER and others)."""
    from dynamo.common.backend.worker import WorkerConfig
    from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
    from dynamo.common.constants import DisaggregationMode
    from dynamo.common.utils.runtime import parse_endpoint

    parser = argparse.ArgumentParser(prog="trtkv serve --dynamo", add_help=False, exit_on_error=False, allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            own = DynamoRuntimeConfig.from_cli_args(parser.parse_args(list(flags)))
            own.validate()
    except (SystemExit, argparse.ArgumentError, ValueError) as error:
        lines = said.getvalue().strip().splitlines()
        reason = lines[-1].partition("error: ")[2] if lines else str(error)
        raise ConfigError(f"Dynamo does not take these flags: {reason}", "See trtkv serve --dynamo --help.") from None
    mode = settings.meeting.mode
    place = {"component": "prefill" if mode == "prefill" else "backend"}
    if own.endpoint is not None:
        place = dict(zip(("namespace", "component", "endpoint"), parse_endpoint(own.endpoint), strict=True))
    return WorkerConfig.from_runtime_config(
        own, model_name=str(settings.card), served_model_name=settings.name, disaggregation_mode=DisaggregationMode(mode), **place
    )

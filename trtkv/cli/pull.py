"""`trtkv pull`."""

from __future__ import annotations

from cyclopts import App

from trtkv.cli.output import print_json, progress


def register(app: App) -> None:
    """Add the command."""
    app.command(pull)


def pull(name: str, *, dtype: str | None = None, revision: str | None = None, force: bool = False, json: bool = False) -> None:
    """Fetch a checkpoint: a preset (trtkv models) or a Hugging Face id.

    Args:
        name: Preset name or hub id such as org/name.
        dtype: float32, float16 or bfloat16, for checkpoints that are converted (smollm2-135m, gemma3-270m): float32 by default.
        revision: Branch, tag or commit on the hub.
        force: Fetch again even if it exists.
        json: Print one JSON object.
    """
    from trtkv.checkpoint.pull import pull as fetch

    with progress(f"pull {name}") as report:
        path = fetch(name, **({"dtype": dtype} if dtype else {}), revision=revision, force=force, progress=report)
    if json:
        print_json({"model": name, "path": str(path)})
    else:
        print(path)

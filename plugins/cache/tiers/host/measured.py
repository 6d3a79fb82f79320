"""What was measured when an offloaded engine was opened, and what moves pages since."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Engine = Literal["kernel", "copies"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What moves pages of decode steps and runs of them, and the microseconds of each way that decided it.

    A step's trial is one launch for `sequences` sequences that miss `pages` pages of each head; the bulk trial moves `run_pages` pages of all heads.
    """

    step: Engine
    bulk: Engine
    step_kernel_us: float
    step_copies_us: float
    bulk_kernel_us: float
    bulk_copies_us: float
    sequences: int
    pages: int
    run_pages: int

    def to_json(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return {name: round(value, 1) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def line(self) -> str:
        """Say it in a line."""
        return (
            f"recall of steps by {self.step} ({self.pages} pages a head of {self.sequences} sequences: kernel {self.step_kernel_us:.0f} us, "
            f"copies {self.step_copies_us:.0f} us), of prompts by {self.bulk} ({self.run_pages} pages: kernel {self.bulk_kernel_us:.0f} us, "
            f"copies {self.bulk_copies_us:.0f} us)"
        )

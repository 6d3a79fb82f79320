"""Writes docs/performance.md from engines/results.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HEAD = """# Performance

Written by `python build_scripts/performance_doc.py` from `engines/results.jsonl`; do not edit.

## Retrieval, one layer of one decode step

`build_scripts/bench_retrieval.py` on {machine}, torch {torch}, CUDA {cuda}, {dtype}, {date}: CUDA-graph replay, every launch reads another layer's
buffers, medians in microseconds. *dense* is torch's scaled dot-product attention over the same tokens, *whole* is append, score, select and attend;
ratio is dense over whole. *bound* is the bytes that must move over 4.3 TB/s, what a copy reaches there. Every row was checked against torch.

**These kernels stand in `plugins/` (`kernel.py`, `*.cu`, `launch.py`) and are not called by the ops yet**: engines run the torch forms. The goals
are those that the project has set itself; ratios below a goal have missed it.

"""
COLUMNS = ("row", "policy", "pooling", "dense_us", "append_us", "score_us", "select_us", "attend_us", "whole_us", "ratio", "goal", "bound_us")
TITLES = ("row", "policy", "pooling", "dense", "append", "score", "select", "attend", "whole", "ratio", "goal", "bound")


def main() -> None:
    """Write the page."""
    rows = [json.loads(line) for line in (ROOT / "engines" / "results.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["benchmark"] == "retrieval" and row["correct"]]
    page = HEAD.format(**rows[0]) + table(rows)
    (ROOT / "docs" / "performance.md").write_text(page, encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """Write rows as a Markdown table."""
    lines = ["| " + " | ".join(TITLES) + " |", "|---|---|---|" + "---:|" * (len(TITLES) - 3)]
    for row in rows:
        cells = [("" if name == "goal" and not row[name] else str(row[name])) for name in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

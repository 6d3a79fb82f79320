"""The rows of docs/quality.md that compare encodings on the same prompts; `quality_codes.py` makes their records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from plugins.cache.bytes import ByteCount
from plugins.cache.formats import find_format
from trtkv.config import ModelConfig
from trtkv.policies.registry import parse_policy
from trtkv.presets import model_presets

Record = dict[str, Any]
Z = 1.96  # of a 95% interval


def encodings(rows: Sequence[Record], tasks: Sequence[str]) -> Iterator[list[str]]:
    """Yield a line an encoding: its name, bytes at the samples' length and of a further token of a larger model, right answers, loss."""
    for name in rows[0]["answers"]:
        size = fmean(row["answers"][name]["bytes"] / row["answers"]["full"]["bytes"] for row in rows)
        right = [[row["answers"][name]["exact"] for row in rows if row["task"] == task] for task in tasks]
        loss = fmean(row["answers"][name]["nll"] - row["answers"]["full"]["nll"] for row in rows)
        shares = (with_interval(sum(own), len(own)) for own in right)
        yield [" ".join(f"`{part}`" for part in name.split()), f"{size:.1%}", f"{of_a_token(name):.1%}", *shares, f"{loss:+.3f}"]


def kept(rows: Sequence[Record], tasks: Sequence[str]) -> str:
    """Set the goal beside how `kivi4` differs from full, sample by sample, with the standard error."""
    found, reached = [], True
    for task in tasks:
        apart = [row["answers"]["kivi4"]["exact"] - row["answers"]["full"]["exact"] for row in rows if row["task"] == task]
        reached &= fmean(apart) >= -0.01
        found.append(f"{task} {fmean(apart):+.3f} ± {stdev(apart) / math.sqrt(len(apart)):.3f} ({sum(map(abs, apart))} differ)")
    return f"`kivi4` within 1 point of `full` at 30% of the bytes, paired: {'; '.join(found)}. **{'Reached' if reached else 'Missed'}.**"


def with_interval(right: int, samples: int) -> str:
    """Write a share with Wilson's interval."""
    share, more = right / samples, Z * Z / samples
    middle, width = share + more / 2, Z * math.sqrt((share * (1 - share) + more / 4) / samples)
    low, high = (min(1.0, max(0.0, end / (1 + more))) for end in (middle - width, middle + width))
    return f"{share:.2f} ({low:.2f}-{high:.2f})"


def of_a_token(name: str, model: str = "qwen2.5-7b") -> float:
    """Return which share of full's bytes a further token of a long context takes."""
    config, (preset, *sets) = ModelConfig.from_hf(model_presets()[model]), name.split()
    plans = (parse_policy(preset, sets=sets).plan(config), parse_policy("full").plan(config))
    own, full = (ByteCount(plan, find_format(plan)).bytes_per_token for plan in plans)
    return own / full

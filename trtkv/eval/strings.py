"""How RULER scores an answer: by the strings that it contains (arXiv 2404.06654, section 3)."""

from __future__ import annotations

from collections.abc import Sequence


def recall(text: str, answers: Sequence[str]) -> dict[str, float]:
    """Return "score", the share of the answers that stand in the text whatever their case, and "exact", 1 when all do."""
    found = [answer.lower() in text.lower() for answer in answers]
    return {"score": sum(found) / len(found), "exact": float(all(found))}


def any_of(text: str, answers: Sequence[str]) -> dict[str, float]:
    """Return "score", 1 when one of the answers stands in the text whatever its case."""
    return {"score": float(any(answer.lower() in text.lower() for answer in answers))}


def listed(items: Sequence[str]) -> str:
    """Join items with commas and an "and"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"

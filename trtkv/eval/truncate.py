"""Cutting the middle out of a prompt that is too long, as LongBench does: instructions stand at both ends."""

from __future__ import annotations

from trtkv.eval.haystack import CountTokens


def drop_middle(context: str, question: str, limit_tokens: int, count_tokens: CountTokens) -> tuple[str, str]:
    """Return context and question whose concatenation has at most limit_tokens tokens: half of them from the start, half from the end.

    A question longer than its half loses its beginning.
    """
    prompt = context + question
    if count_tokens(prompt) <= limit_tokens:
        return context, question
    half = limit_tokens // 2
    head = prompt[: _longest(prompt, half, count_tokens, False)]
    tail = prompt[len(prompt) - _longest(prompt, half, count_tokens, True) :]
    # Where head and tail meet, a tokenizer may count one more than for both alone.
    while head and count_tokens(head + tail) > limit_tokens:
        head = head[:-1]
    kept = len(tail) - len(question)
    return (head + tail[:kept], question) if kept >= 0 else (head, tail)


def _longest(text: str, limit: int, count_tokens: CountTokens, from_end: bool) -> int:
    """Return how many characters of a text's start or end have at most so many tokens."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        part = text[len(text) - middle :] if from_end else text[:middle]
        low, high = (middle, high) if count_tokens(part) <= limit else (low, middle - 1)
    return low

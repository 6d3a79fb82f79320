"""LongBench v2 from its JSON or JSON lines: multiple choice with four options, accuracy by difficulty and length (arXiv 2412.15204).

The wording of prompts is this package's own. Where a `0shot.txt` with $DOC$, $Q$ and $C_A$ to $C_D$ lies beside the data, as in LongBench's `prompts`
folder, it is used instead: only then are scores comparable with published ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtkv.errors import ConfigError
from trtkv.eval.files import checksum, need_file, read_json, read_jsonl, read_text
from trtkv.eval.haystack import CountTokens
from trtkv.eval.longbench import draw
from trtkv.eval.metrics import choice
from trtkv.eval.task import AnswerTask, Sample, TaskOptions
from trtkv.eval.truncate import drop_middle

TEMPLATE = "0shot.txt"
LETTERS = "ABCD"
OWN = (
    "$DOC$\n\nA question about the text above, with four choices:\n$Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\n\n"
    'Answer in the form "The correct answer is (A)".\n\n'
)
FIELDS = ("context", "question", *(f"choice_{letter}" for letter in LETTERS), "answer")
MAX_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One question: fields holds the texts, difficulty (easy, hard) and length (short, medium, long) are the file's, None where it has none."""

    fields: dict[str, str]
    difficulty: str | None
    length: str | None


class LongBenchV2(AnswerTask):
    """Questions of a LongBench v2 file, drawn by the seed where there are more than samples: "score" is the accuracy.

    The figures "easy", "hard", "short", "medium" and "long" are the accuracies of those questions.
    """

    name = "longbench-v2"
    reads_data = True

    def __init__(self, options: TaskOptions) -> None:
        """Read the file; raises ConfigError with the line (or the question's number) where it is malformed."""
        self._file = need_file(options.data, self.name, "a LongBench v2 JSON or JSONL file")
        own = self._file.parent / TEMPLATE
        self._template = _template(own) if own.is_file() else OWN
        self._rows = [_row(where, raw) for where, raw in _raw_rows(self._file)]
        if not self._rows:
            raise ConfigError(f"'{self._file}' holds no question", "Give a LongBench v2 file.")
        self._asked: dict[Sample, Row] = {}

    @property
    def identity(self) -> str:
        """Checksums of the file and of its template."""
        return f"{checksum(self._file)} {checksum(self._file.parent / TEMPLATE) if self._template is not OWN else 'own wording'}"

    def samples(self, length_tokens: int, count: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Build prompts; the middle of those that are too long is dropped."""
        room = length_tokens - MAX_NEW_TOKENS
        if room < 16:
            raise ConfigError(f"{length_tokens} tokens do not hold an answer of '{self.name}' behind a prompt", "Give a greater --length.")
        made = []
        for row in draw(self._rows, count, seed):
            before, _, after = self._template.partition("$DOC$")
            context = _fill(before, row) + row.fields["context"].strip()
            context, question = drop_middle(context, _fill(after, row), room, count_tokens)
            made.append(Sample(context, question, (row.fields["answer"],), MAX_NEW_TOKENS))
            self._asked[made[-1]] = row
        return made

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Return 1 when the answer chooses the right letter, under "score" and under the names of difficulty and length."""
        row, right = self._asked[sample], float(choice(text) == sample.answers[0])
        return {"score": right, **{name: right for name in (row.difficulty, row.length) if name}}


def _fill(part: str, row: Row) -> str:
    """Replace the marks of a template's part, all at once, so that a text that holds one stays as it is."""
    marks = {"$Q$": "question", **{f"$C_{letter}$": f"choice_{letter}" for letter in LETTERS}}
    for mark, field in marks.items():
        head, found, tail = part.partition(mark)
        if found:
            return _fill(head, row) + row.fields[field].strip() + _fill(tail, row)
    return part


def _template(file: Path) -> str:
    text = read_text(file)
    missing = next((mark for mark in ("$DOC$", "$Q$", *(f"$C_{letter}$" for letter in LETTERS)) if mark not in text), None)
    if missing:
        raise ConfigError(f"'{file}' has no {missing}", "Take LongBench's own 0shot.txt, or remove it.")
    return text


def _raw_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every question with the words that say where it stands."""
    if file.suffix != ".json" and not read_text(file).lstrip().startswith("["):
        for number, raw in read_jsonl(file, FIELDS):
            yield f"'{file}' line {number}", raw
        return
    rows = read_json(file)
    if not isinstance(rows, list):
        raise ConfigError(f"'{file}' is no list of questions", "Give LongBench v2's data.json, or one object a line.")
    for number, raw in enumerate(rows, 1):
        missing = next((name for name in FIELDS if not isinstance(raw, dict) or name not in raw), None)
        if missing:
            raise ConfigError(f"'{file}' question {number} has no '{missing}'", f"Every question needs: {', '.join(FIELDS)}.")
        yield f"'{file}' question {number}", raw


def _row(where: str, raw: dict[str, Any]) -> Row:
    """Check one question; raises ConfigError."""
    wrong = next((name for name in FIELDS if not isinstance(raw[name], str)), None)
    if wrong:
        raise ConfigError(f"{where}: '{wrong}' is no text", "Mend or remove it.")
    if raw["answer"] not in tuple(LETTERS):
        raise ConfigError(f"{where}: the answer '{raw['answer'][:20]}' is none of A, B, C and D", "Mend or remove it.")
    known = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}
    about = {name: raw.get(name) if raw.get(name) in values else None for name, values in known.items()}
    return Row({name: raw[name] for name in FIELDS}, about["difficulty"], about["length"])

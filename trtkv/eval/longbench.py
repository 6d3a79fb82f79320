"""LongBench from its JSON lines: 21 datasets, each with its official metric, answer length and truncation (arXiv 2308.14508).

The wording of prompts is this package's own. Where a `dataset2prompt.json` with templates by dataset lies beside the data, as in LongBench's `config`
folder, those are used instead: only then are scores comparable with published ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtkv.errors import ConfigError
from trtkv.eval import metrics
from trtkv.eval.files import checksum, need_file, read_json, read_jsonl
from trtkv.eval.haystack import CountTokens
from trtkv.eval.task import AnswerTask, Sample, TaskOptions
from trtkv.eval.truncate import drop_middle

TEMPLATES = "dataset2prompt.json"
ASK = "{context}\n\nAnswer the question about the text above in a few words, without an explanation.\n\nQuestion: {input}\nAnswer:"
SUM_UP = "{context}\n\nSummarize the text above in one page.\n\nSummary:"
GO_ON = "{context}\n{input}"


@dataclass(frozen=True, slots=True)
class Dataset:
    """How a dataset is asked and scored: template with {context} and {input}, longest answer, and whether only the answer's first line counts."""

    metric: metrics.Metric
    max_new_tokens: int
    template: str = ASK
    first_line: bool = False


DATASETS: Mapping[str, Dataset] = {
    "narrativeqa": Dataset(metrics.qa_f1, 128),
    "qasper": Dataset(metrics.qa_f1, 128),
    "multifieldqa_en": Dataset(metrics.qa_f1, 64),
    "multifieldqa_zh": Dataset(metrics.qa_f1_zh, 64),
    "hotpotqa": Dataset(metrics.qa_f1, 32),
    "2wikimqa": Dataset(metrics.qa_f1, 32),
    "musique": Dataset(metrics.qa_f1, 32),
    "dureader": Dataset(metrics.rouge_l_zh, 128),
    "gov_report": Dataset(metrics.rouge_l, 512, SUM_UP),
    "qmsum": Dataset(metrics.rouge_l, 512, "{context}\n\nAnswer the query about the meeting above in a few sentences.\n\nQuery: {input}\nAnswer:"),
    "multi_news": Dataset(metrics.rouge_l, 512, SUM_UP),
    "vcsum": Dataset(metrics.rouge_l_zh, 512, SUM_UP),
    "trec": Dataset(metrics.classification, 64, GO_ON, first_line=True),
    "triviaqa": Dataset(metrics.qa_f1, 32, GO_ON, first_line=True),
    "samsum": Dataset(metrics.rouge_l, 128, GO_ON, first_line=True),
    "lsht": Dataset(metrics.classification, 64, GO_ON, first_line=True),
    "passage_count": Dataset(metrics.count, 32, "{context}\n\nHow many different paragraphs are there above? Give the number alone.\n\nAnswer:"),
    "passage_retrieval_en": Dataset(
        metrics.retrieval, 32, "{context}\n\n{input}\n\nWhich paragraph is this about? Answer in the form Paragraph 1.\n\nAnswer:"
    ),
    "passage_retrieval_zh": Dataset(metrics.retrieval, 32, "{context}\n\n{input}\n\nWhich paragraph is this about? Give its number.\n\nAnswer:"),
    "lcc": Dataset(metrics.code_similarity, 64, "{context}"),
    "repobench-p": Dataset(metrics.code_similarity, 64, "{context}{input}"),
}
BUCKETS = ((4000, "0-4k"), (8000, "4-8k"))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a data file; length is the context's in words (characters in Chinese), as the file gives it."""

    dataset: str
    context: str
    question: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    length: int | None


class LongBench(AnswerTask):
    """Rows of a LongBench file, drawn by the seed where there are more than samples: "score" is the dataset's own metric.

    The figure of a row's dataset carries its name, and its length bucket's that of LongBench-E where the file tells lengths.
    """

    reads_data = True

    def __init__(self, options: TaskOptions, name: str = "longbench") -> None:
        """Read the file; raises ConfigError with the line number for a line that is malformed."""
        self.name = name
        self._file = need_file(options.data, name, "a LongBench JSONL file")
        self._templates = _templates(self._file.parent / TEMPLATES)
        self._rows = [_row(self._file, number, raw) for number, raw in read_jsonl(self._file, ("context", "input", "answers"))]
        if not self._rows:
            raise ConfigError(f"'{self._file}' holds no sample", "Give a LongBench JSONL file.")
        self._asked: dict[Sample, Row] = {}

    @property
    def identity(self) -> str:
        """Checksums of the file and of its templates, and what divides Chinese answers into words."""
        wording = checksum(self._file.parent / TEMPLATES) if self._templates else "own wording"
        chinese = any(DATASETS[row.dataset].metric in (metrics.qa_f1_zh, metrics.rouge_l_zh) for row in self._rows)
        return f"{checksum(self._file)} {wording}" + (f" {metrics.segmentation()}" if chinese else "")

    def samples(self, length_tokens: int, count: int, seed: int, count_tokens: CountTokens) -> list[Sample]:
        """Build prompts; the middle of those that are too long is dropped."""
        made = []
        for row in draw(self._rows, count, seed):
            about = DATASETS[row.dataset]
            template = self._templates.get(row.dataset, about.template)
            room = length_tokens - about.max_new_tokens
            if room < 16:
                raise ConfigError(f"{length_tokens} tokens do not hold an answer of '{row.dataset}' behind a prompt", "Give a greater --length.")
            context, question = drop_middle(*fill(template, row.context, row.question), room, count_tokens)
            made.append(Sample(context, question, row.answers, about.max_new_tokens))
            self._asked[made[-1]] = row
        return made

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Return the best metric over the right answers, under "score" and under the names of dataset and length."""
        row = self._asked[sample]
        about = DATASETS[row.dataset]
        given = text.lstrip("\n").split("\n")[0] if about.first_line else text
        best = max((about.metric(given, wanted, row.classes) for wanted in row.answers), default=0.0)
        named = {"score": best, row.dataset: best}
        if row.length is not None:
            named[next((bucket for limit, bucket in BUCKETS if row.length < limit), "8k+")] = best
        return named


def draw(rows: list[Any], count: int, seed: int) -> list[Any]:
    """Return all rows, or so many of them drawn by the seed, in their order."""
    if count >= len(rows):
        return rows
    return [rows[index] for index in sorted(random.Random(f"rows {seed}").sample(range(len(rows)), count))]


def fill(template: str, context: str, question: str) -> tuple[str, str]:
    """Put context and question into a template: what ends with the context, and what follows it."""
    before, _, after = template.partition("{context}")
    return before.replace("{input}", question) + context, after.replace("{input}", question)


def _templates(file: Path) -> dict[str, str]:
    """Read templates by dataset, none where the file is not there; raises ConfigError for a template without a context."""
    if not file.is_file():
        return {}
    found = read_json(file)
    if not isinstance(found, dict) or not all(isinstance(one, str) and "{context}" in one for one in found.values()):
        raise ConfigError(f"'{file}' is no object of templates that hold {{context}}", "Take LongBench's own, or remove it.")
    return found


def _row(file: Path, number: int, raw: dict[str, Any]) -> Row:
    """Check one line; raises ConfigError with its number."""

    def wrong(what: str, fix: str) -> ConfigError:
        return ConfigError(f"'{file}' line {number}: {what}", fix)

    dataset = str(raw.get("dataset") or file.stem).removesuffix("_e")
    if dataset not in DATASETS:
        raise wrong(f"dataset '{dataset}' is not one of LongBench's", f"Known: {', '.join(DATASETS)}.")
    for name in ("context", "input"):
        if not isinstance(raw[name], str):
            raise wrong(f"'{name}' is {json.dumps(raw[name])[:40]}, not a text", "Mend or remove the line.")
    answers, classes = _texts(raw["answers"]), _texts(raw.get("all_classes") or [])
    if not answers or classes is None:
        raise wrong("'answers' must be a list of texts with at least one, 'all_classes' a list of texts or null", "Mend or remove the line.")
    if DATASETS[dataset].metric is metrics.classification and not classes:
        raise wrong("'all_classes' is missing, which a classification chooses from", "Mend or remove the line.")
    length = raw.get("length")
    return Row(dataset, raw["context"], raw["input"], answers, classes, length if isinstance(length, int) else None)


def _texts(value: Any) -> tuple[str, ...] | None:
    return tuple(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else None

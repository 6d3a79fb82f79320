from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtkv.errors import ConfigError
from trtkv.eval.longbench import DATASETS, LongBench, LongBenchV2, fill
from trtkv.eval.task import TaskOptions


def words(text: str) -> int:
    return len(text.split())


def row(**changes: Any) -> dict[str, Any]:
    return {
        "context": "some text",
        "input": "what?",
        "answers": ["yes", "a cat"],
        "length": 4500,
        "dataset": "hotpotqa",
        "all_classes": None,
        **changes,
    }


def question(**changes: Any) -> dict[str, Any]:
    fields = {f"choice_{letter}": f"choice {letter}" for letter in "ABCD"}
    about = {"difficulty": "easy", "length": "short", "answer": "B"}
    return {"_id": "1", "context": "some text", "question": "which?", **fields, **about, **changes}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows), encoding="utf-8")
    return path


def test_rows_become_prompts_and_scores(tmp_path: Path) -> None:
    task = LongBench(
        TaskOptions(write(tmp_path / "a.jsonl", [row(), row(dataset="trec_e", all_classes=["LOC", "HUM"], answers=["LOC"], length=9000)]))
    )
    qa, trec = task.samples(1000, 10, 0, words)
    assert "some text" in qa.context
    assert "what?" in qa.question
    assert (qa.max_new_tokens, trec.max_new_tokens) == (32, 64)
    assert task.score(qa, "The cat!") == {"score": 1.0, "hotpotqa": 1.0, "4-8k": 1.0}
    assert task.score(trec, "\nLOC\nHUM") == {"score": 1.0, "trec": 1.0, "8k+": 1.0}  # the first line counts
    assert task.score(trec, "LOC HUM") == {"score": 0.5, "trec": 0.5, "8k+": 0.5}


def test_the_file_names_the_dataset_where_rows_do_not(tmp_path: Path) -> None:
    bare = {"context": "def f():\n", "input": "", "answers": ["return 1"]}
    task = LongBench(TaskOptions(write(tmp_path / "lcc_e.jsonl", [bare])))
    (one,) = task.samples(200, 1, 0, words)
    assert one.prompt == "def f():\n"
    assert task.score(one, "return 1\n") == {"score": 1.0, "lcc": 1.0}


def test_long_prompts_lose_their_middle(tmp_path: Path) -> None:
    text = " ".join(f"w{number}" for number in range(5000))
    task = LongBench(TaskOptions(write(tmp_path / "hotpotqa.jsonl", [row(context=text)])))
    (one,) = task.samples(132, 1, 0, words)
    assert 90 <= words(one.prompt) <= 100
    assert one.prompt.startswith("w0 w1 ")
    assert one.prompt.rstrip().endswith("Answer:")
    assert one.question.strip().startswith("Answer the question")
    with pytest.raises(ConfigError, match="40 tokens do not hold"):
        task.samples(40, 1, 0, words)


def test_rows_are_drawn_by_the_seed(tmp_path: Path) -> None:
    task = LongBench(TaskOptions(write(tmp_path / "a.jsonl", [row(input=f"q{index}") for index in range(30)])))
    first, again, other = (tuple(one.question for one in task.samples(500, 5, seed, words)) for seed in (1, 1, 2))
    assert len(set(first)) == 5
    assert first == again != other
    assert len(task.samples(500, 99, 0, words)) == 30


def test_official_templates_are_used_where_they_lie_beside(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [row(), row(dataset="qasper")])
    own = LongBench(TaskOptions(file)).identity
    (tmp_path / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "Q {input}\n{context}\nA {input}"}), encoding="utf-8")
    task = LongBench(TaskOptions(file))
    templated, other = task.samples(500, 2, 0, words)
    assert (templated.context, templated.question) == ("Q what?\nsome text", "\nA what?")
    assert other.question.endswith("Answer:")
    assert task.identity != own
    (tmp_path / "dataset2prompt.json").write_text('{"hotpotqa": "no place"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="templates that hold"):
        LongBench(TaskOptions(file))


def test_every_dataset_has_a_template_with_its_context() -> None:
    assert len(DATASETS) == 21
    assert all("{context}" in one.template for one in DATASETS.values())
    assert fill("a {input} b {context} c {input}", "{input}", "Q") == ("a Q b {input}", " c Q")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([row(), "{"], "line 2: Invalid JSON"),
        ([row(), "[1]"], "line 2: Input should be an object"),
        ([row(), "", {"input": "", "answers": ["a"]}], "line 3: 'context' Field required"),
        ([row(dataset="other")], "line 1: dataset 'other' is not one of LongBench's"),
        ([row(context=3)], "line 1: 'context' Input should be a valid string"),
        ([row(answers=[])], "line 1: 'answers' List should have at least 1 item"),
        ([row(answers=["a", 1])], "line 1: 'answers' '1' Input should be a valid string"),
        ([row(dataset="trec")], "line 1: 'all_classes' is missing"),
        ([], "has no row"),
    ],
)
def test_malformed_rows_are_reported_with_their_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LongBench(TaskOptions(write(tmp_path / "a.jsonl", lines)))
    assert "\n" not in str(caught.value)


def test_files_that_are_missing(tmp_path: Path) -> None:
    for task in (LongBench, LongBenchV2):
        with pytest.raises(ConfigError, match="no file was given"):
            task(TaskOptions())
        with pytest.raises(ConfigError, match="does not exist"):
            task(TaskOptions(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_v2_scores_by_difficulty_and_length(tmp_path: Path, name: str) -> None:
    rows = [question(), question(difficulty="hard", length="long", answer="D", question="why?")]
    file = tmp_path / name
    file.write_text(json.dumps(rows), encoding="utf-8") if name.endswith("json") else write(file, rows)
    task = LongBenchV2(TaskOptions(file))
    easy, hard = task.samples(1000, 5, 0, words)
    assert easy.context == "some text"
    assert "(C) choice C" in easy.question
    assert task.score(easy, "The correct answer is (B).") == {"score": 1.0, "easy": 1.0, "short": 1.0}
    assert task.score(hard, "The correct answer is (B).") == {"score": 0.0, "hard": 0.0, "long": 0.0}


def test_v2_official_template(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", [question(question="$C_A$ or not?")])
    (tmp_path / "0shot.txt").write_text("Read $DOC$ and say $Q$: $C_A$, $C_B$, $C_C$, $C_D$", encoding="utf-8")
    (one,) = LongBenchV2(TaskOptions(file)).samples(1000, 1, 0, words)
    # A text that holds a mark stays as it is.
    assert one.prompt == "Read some text and say $C_A$ or not?: choice A, choice B, choice C, choice D"
    (tmp_path / "0shot.txt").write_text("$DOC$ $Q$", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has no \$C_A\$"):
        LongBenchV2(TaskOptions(file))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", json.dumps(question()) + "\n{]", "line 2: Invalid JSON"),
        ("a.jsonl", json.dumps(question(answer="E")), "line 1: 'answer' Input should be 'A', 'B'"),
        ("a.jsonl", json.dumps(question(context=None)), "line 1: 'context' Input should be a valid string"),
        ("a.json", json.dumps([question(), {"question": ""}]), "row 2: 'context' Field required"),
        ("a.json", json.dumps([question(answer="")]), "row 1: 'answer' Input should be"),
        ("a.json", "{}", "line 1: 'context' Field required"),
        ("a.json", "[", "no JSON: line 1"),
        ("a.json", "[]", "has no row"),
    ],
)
def test_v2_malformed_questions(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        LongBenchV2(TaskOptions(tmp_path / name))

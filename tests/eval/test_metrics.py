from __future__ import annotations

import re

import pytest

from trtkv.eval import metrics
from trtkv.eval.longbench import drop_middle

# Every expected value is worked out by hand from the definition.


@pytest.mark.parametrize(
    ("given", "wanted", "score"),
    [
        ("The cat.", "a cat", 1.0),
        ("a black cat", "the cat", 2 / 3),  # 1 of 2 given words, 1 of 1 wanted
        ("cat cat dog", "cat", 0.5),  # one common word: 2 * 1 / (3 + 1)
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("It's 3.5%", "its 35", 1.0),
    ],
)
def test_qa_f1(given: str, wanted: str, score: float) -> None:
    assert metrics.qa_f1(given, wanted) == pytest.approx(score)


def test_chinese_answers_without_a_dictionary_compare_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_jieba", lambda: None)
    assert metrics.segmentation() == "characters"
    assert metrics.qa_f1_zh("北京。", "北 京") == 1.0
    assert metrics.qa_f1_zh("北京市", "北京") == pytest.approx(2 * 2 / 5)
    assert metrics.qa_f1_zh("·北", "北") == pytest.approx(2 / 3)  # this mark is not among those that LongBench drops
    assert metrics.rouge_l_zh("我是人", "我是一个人") == pytest.approx(2 * 3 / 8)


class Words:
    """A dictionary of a few words in jieba's place."""

    def cut(self, text: str) -> list[str]:
        return re.findall("北京|一个|.", text)


def test_chinese_answers_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_jieba", Words)
    assert metrics.qa_f1_zh("北京市", "北京") == pytest.approx(2 / 3)  # 1 of 2 given, 1 of 1 wanted
    assert metrics.qa_f1_zh("北京。", "北 京") == 0.0  # a space divides words
    assert metrics.rouge_l_zh("我是人", "我是一个人") == pytest.approx(2 * 3 / 7)


@pytest.mark.parametrize(
    ("given", "wanted", "score"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("police killed the gunman", "police kill the gunman", 0.75),  # Lin 2004: subsequence "police the gunman", 3 of 4 and 3 of 4
        ("the gunman kill police", "police kill the gunman", 0.5),  # "the gunman", 2 of 4
        ("c d. a b", "a b c d", 1.0),  # the union of both sentences' subsequences
        ("a b", "c d", 0.0),
        ("", "a", 0.0),
        ("a", ".", 0.0),
        ("a. ", "a", 2 / 3),  # the blank after the full stop is a separate word
        ("a. ", "a.\n", 1.0),
        ("...", "a", 0.0),
    ],
)
def test_rouge_l(given: str, wanted: str, score: float) -> None:
    assert metrics.rouge_l(given, wanted) == pytest.approx(score)


def test_classification() -> None:
    classes = ("city", "country", "city state")
    assert metrics.classification("it is a city", "city", classes) == 1.0
    assert metrics.classification("a city or a country", "city", classes) == 0.5
    assert metrics.classification("a city state", "city state", classes) == 1.0  # "city" is part of the right name
    assert metrics.classification("a city state", "city", classes) == 0.5
    assert metrics.classification("a lake", "city", classes) == 0.0


def test_classification_skips_the_class_after_a_dropped_one() -> None:
    # Of "a", "a b" and "a b c", all inside the right name or the name itself, LongBench drops the first and passes over the second.
    assert metrics.classification("a b c", "a b c", ("a", "a b", "a b c")) == 0.5
    assert metrics.classification("a b c", "a b c", ("a", "x", "a b", "a b c")) == 0.5
    assert metrics.classification("a x b c", "b c", ("a", "x", "c", "b c")) == 1 / 3


def test_numbers() -> None:
    assert metrics.count("There are 7, maybe 8 or 7.", "7") == pytest.approx(2 / 3)
    assert metrics.count("17", "7") == 0.0
    assert metrics.count("none", "7") == 0.0
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert metrics.retrieval("Paragraph 1 or 2", "Paragraph 2") == 0.5
    assert metrics.retrieval("段落3", "段落3") == 1.0


def test_code_similarity() -> None:
    assert metrics.code_similarity("\n# a comment\nreturn x\nmore", "return x") == 1.0
    assert metrics.code_similarity("```\n// no\n", "return x") == 0.0
    assert metrics.edit_similarity("abcd", "abxd") == 0.75  # blocks "ab" and "d": three of four and four
    assert metrics.edit_similarity("abc", "ab") == 0.8
    assert metrics.edit_similarity("ab", "abcdefg") == 0.44  # 4 of 9
    assert metrics.edit_similarity("xaby", "abxy") == 0.75
    assert metrics.edit_similarity("abc", "cab") == 0.67
    assert metrics.edit_similarity("bxcxd", "bcdx") == 0.44  # the blocks are "b" and "x"; the subsequence "bcd" is longer
    assert metrics.edit_similarity("", "a") == 0.0


@pytest.mark.parametrize(
    ("given", "letter"),
    [
        ("The correct answer is (B), because A is wrong", "B"),
        ("**The correct answer is C**", "C"),
        ("The correct answer is C, not The correct answer is (D)", "D"),  # the bracketed form goes first
        ("the correct answer is (A)", None),
        ("The correct answer is (E)", None),
        ("B", None),
    ],
)
def test_choice(given: str, letter: str | None) -> None:
    assert metrics.choice(given) == letter


def test_common_subsequence_gives_indices() -> None:
    assert metrics.common_subsequence("xaybz", "ab") == [1, 3]
    assert metrics.common_subsequence("", "ab") == []


def words(text: str) -> int:
    return len(text.split())


def test_the_middle_is_dropped() -> None:
    text = " ".join(str(number) for number in range(100))
    assert drop_middle(text, " what?", 101, words) == (text, " what?")
    context, question = drop_middle(text, " what?", 10, words)
    assert question == " what?"
    assert (context + question).split()[:4] == ["0", "1", "2", "3"]
    assert (context + question).split()[-5:] == ["96", "97", "98", "99", "what?"]
    assert words(context + question) <= 10


def test_a_question_longer_than_its_half_loses_its_beginning() -> None:
    context, question = drop_middle("a b c d", " one two three four five six", 6, words)
    assert (context.split(), question.split()) == (["a", "b", "c"], ["four", "five", "six"])

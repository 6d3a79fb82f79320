"""The metrics of LongBench and LongBench v2, from their published definitions (arXiv 2308.14508, section 4; arXiv 2412.15204, section 3).

All are between 0 and 1 and the best over several right answers counts. ROUGE-L, edit similarity and F1 are a few lines each, so no library is needed.
Chinese answers are compared character by character: word segmentation needs a dictionary that this package does not ship.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
CHOICE = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))

# A metric takes the answer given, one right answer and the classes that a classification chooses from.
Metric = Callable[[str, str, Sequence[str]], float]


def qa_f1(given: str, wanted: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words of two answers, in lower case, without punctuation and articles (as in SQuAD)."""
    return token_f1(_english_words(given), _english_words(wanted))


def qa_f1_zh(given: str, wanted: str, classes: Sequence[str] = ()) -> float:
    """F1 of the characters of two answers, in lower case, without punctuation and spaces."""
    return token_f1(_characters(given), _characters(wanted))


def token_f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    """Harmonic mean of the shares of given and wanted tokens that both have, each as often as in the one that has it less often."""
    same = sum((Counter(given) & Counter(wanted)).values())
    return 2 * same / (len(given) + len(wanted)) if same else 0.0


def rouge_l(given: str, wanted: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L's F measure: the longest common subsequence of words, over each sentence of the right answer united (Lin, 2004).

    As LongBench's library counts it: sentences end at full stops, words are split at spaces, and repeated words of a text count once.
    """
    return _rouge_l([one.split() for one in given.split(".") if one.strip()], [one.split() for one in wanted.split(".") if one.strip()])


def rouge_l_zh(given: str, wanted: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L's F measure over characters."""
    return _rouge_l([list("".join(given.split()))], [list("".join(wanted.split()))])


def classification(given: str, wanted: str, classes: Sequence[str] = ()) -> float:
    """One over the number of classes that the answer names, if the right one is among them; a class inside the right one's name does not count."""
    named = [one for one in classes if one in given]
    named = [one for one in named if one == wanted or one not in wanted]
    return 1 / len(named) if wanted in named else 0.0


def retrieval(given: str, wanted: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in an answer that are the right paragraph's."""
    return count(given, "".join(re.findall(r"\d+", wanted)[:1]))


def count(given: str, wanted: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in an answer that are the right one."""
    numbers = re.findall(r"\d+", given)
    return numbers.count(wanted.strip()) / len(numbers) if numbers else 0.0


def code_similarity(given: str, wanted: str, classes: Sequence[str] = ()) -> float:
    """Edit similarity of the first line that is code, neither comment nor fence, to the right line."""
    lines = given.lstrip("\n").split("\n")
    return edit_similarity(next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), ""), wanted)


def edit_similarity(a: str, b: str) -> float:
    """Twice the longest common subsequence of characters over both lengths, rounded to a hundredth: 1 less the share of insertions and deletions."""
    if not a or not b:
        return 0.0
    return round(200 * len(common_subsequence(a, b)) / (len(a) + len(b))) / 100


def choice(given: str) -> str | None:
    """Return the letter A to D that an answer chooses, in LongBench v2's forms ("The correct answer is (A)"), None where it chooses none."""
    text = given.replace("*", "")
    found = next((match for pattern in CHOICE if (match := pattern.search(text))), None)
    return found[1] if found else None


def common_subsequence(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[int]:
    """Return the indices into a of one longest common subsequence of a and b, ascending."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        row, above = table[i + 1], table[i]
        for j, y in enumerate(b):
            row[j + 1] = above[j] + 1 if x == y else max(row[j], above[j + 1])
    found, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(i - 1)
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _rouge_l(given: list[list[str]], wanted: list[list[str]]) -> float:
    """F measure with beta near 1 over the words of all sentences, each counted once."""
    all_given, all_wanted = ({word for one in text for word in one} for text in (given, wanted))
    common = {one[index] for one in wanted for other in given for index in common_subsequence(one, other)}
    if not all_given or not all_wanted or not common:
        return 0.0
    return 2 * len(common) / (len(all_given) + len(all_wanted))


def _english_words(text: str) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return ARTICLES.sub(" ", plain).split()


def _characters(text: str) -> list[str]:
    return [letter for letter in text.lower() if not letter.isspace() and unicodedata.category(letter)[0] not in "PS"]

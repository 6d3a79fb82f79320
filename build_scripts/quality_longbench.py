"""Compares this package's LongBench metrics with LongBench's on random pairs of texts.

    git clone https://github.com/THUDM/LongBench
    pip install rouge fuzzywuzzy jieba
    python build_scripts/quality_longbench.py LongBench/LongBench/metrics.py

fuzzywuzzy without python-Levenshtein, as LongBench's requirements have it. Ends with an error where a score differs by more than rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from trtkv.eval import metrics

ROUNDING = 1e-6  # rouge adds 1e-8 to a denominator
SENTENCES = "the a an of Cat dog. runs, Blue sky. end. U.S. x 12 3 Paragraph (5) it's Sun sun river."
ENGLISH = (*re.findall(r"\S+", SENTENCES), "\n", "", "\n\n", "-")
CHINESE = "我们今天讨论了红楼梦《》，。的作者曹雪芹在北京ABC 12·℃！？“好”（是）段落3\n"  # noqa: RUF001
CODE = ("x = 1", "y = foo(bar)", "# note", "```python", "  return x // 2", "return self.value", "", "if a > b:", "print('a')")
CLASSES = ("State", "State of body", "Title", "Title of a person", "person", "a person", "Other", "Reason")
Make = Callable[[random.Random], tuple[str, str]]


def english(rng: random.Random, most: int) -> str:
    """Return up to so many words, some of which end sentences."""
    return " ".join(rng.choice(ENGLISH) for _ in range(rng.randrange(most)))


def chinese(rng: random.Random, most: int) -> str:
    """Return up to so many characters."""
    return "".join(rng.choice(CHINESE) for _ in range(rng.randrange(most)))


# Name here, name there, and how to make an answer and the right one.
PAIRS: tuple[tuple[str, str, Make], ...] = (
    ("qa_f1", "qa_f1_score", lambda rng: (english(rng, 12), english(rng, 6))),
    ("qa_f1_zh", "qa_f1_zh_score", lambda rng: (chinese(rng, 20), chinese(rng, 12))),
    ("rouge_l", "rouge_score", lambda rng: (english(rng, 40) + rng.choice(["", ". ", ".\n"]), english(rng, 30) + rng.choice(["", "."]))),
    ("rouge_l_zh", "rouge_zh_score", lambda rng: (chinese(rng, 40), chinese(rng, 30))),
    ("classification", "classification_score", lambda rng: (" ".join(rng.sample(CLASSES, rng.randrange(5))), rng.choice(CLASSES))),
    ("count", "count_score", lambda rng: (english(rng, 10), str(rng.randrange(1, 15)))),
    ("retrieval", "retrieval_score", lambda rng: (english(rng, 10), f"Paragraph {rng.randrange(1, 15)}")),
    ("retrieval", "retrieval_zh_score", lambda rng: (chinese(rng, 10), f"段落{rng.randrange(1, 15)}")),
    (
        "code_similarity",
        "code_sim_score",
        lambda rng: ("\n".join(rng.choice(CODE) for _ in range(rng.randrange(1, 5))), rng.choice(CODE[:2] + CODE[5:6])),
    ),
)


def main() -> None:
    """Print the pairs that differ, by metric."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("official", type=Path)
    parser.add_argument("--pairs", type=int, default=3000)
    options = parser.parse_args()
    official = load(options.official)
    print(f"Chinese by {metrics.segmentation()}")
    wrong = [compare(official, *one, options.pairs) for one in PAIRS]
    sys.exit(any(wrong))


def load(file: Path) -> ModuleType:
    """Import a file that is no part of a package."""
    spec = importlib.util.spec_from_file_location("official", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(official: ModuleType, ours: str, theirs: str, make: Make, pairs: int) -> int:
    """Return how many pairs score differently, and show the worst."""
    rng, found = random.Random(theirs), []
    for _ in range(pairs):
        given, wanted = make(rng)
        a = getattr(metrics, ours)(given, wanted, CLASSES)
        b = getattr(official, theirs)(given, wanted, all_classes=CLASSES)
        found.append((abs(a - b), given, wanted, a, b))
    wrong = [one for one in found if one[0] > ROUNDING]
    print(f"{theirs}: {len(wrong)} of {pairs} differ", *([max(wrong)] if wrong else []))
    return len(wrong)


if __name__ == "__main__":
    main()

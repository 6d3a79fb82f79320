"""Property tests draw the same examples in every run of `make test`, and others and more in `make explore`."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import MANY, USUAL, examples


def drawn() -> list[list[int]]:
    """Return what a property draws in `make test`."""
    found: list[list[int]] = []

    @settings(settings.get_profile("ci"))
    @given(st.lists(st.integers(0, 1 << 40)))
    def draw(numbers: list[int]) -> None:
        found.append(numbers)

    draw()
    return found


def test_draws_do_not_depend_on_what_is_imported(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    source = tmp_path_factory.mktemp("sources") / "numbers_of_a_module.py"
    source.write_text("\n".join(f"NUMBER_{index} = {index * index + 70_001}" for index in range(500)))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, source.stem, module)
    spec.loader.exec_module(module)
    assert drawn() == before


def test_profiles_draw_as_many_examples_as_they_say() -> None:
    times = settings().max_examples // USUAL
    assert examples(6).max_examples == 6 * times
    assert settings.get_profile("explore").max_examples == MANY
    assert settings.get_profile("ci").derandomize and not settings.get_profile("explore").derandomize

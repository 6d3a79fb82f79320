from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trtkv.errors import CapacityError
from trtkv.runtime.pages import PageAllocator, page_keys

POOL = 12


class Pool(RuleBasedStateMachine):
    """Owners take, publish, share and give back in any order; the pool never allocates a page that has an owner."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(POOL)
        self.owners: list[list[int]] = []
        self.published: dict[bytes, int] = {}

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        if count > self.pages.free:
            with pytest.raises(CapacityError):
                self.pages.take(count)
            return
        before = {page for one in self.owners for page in one}
        taken = self.pages.take(count)
        assert len(set(taken)) == count
        assert not before & set(taken)
        self.published = {key: page for key, page in self.published.items() if page not in taken}
        self.owners.append(taken)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        page = data.draw(st.sampled_from([page for one in self.owners for page in one]))
        key = bytes([name])
        self.pages.publish(page, key)
        if key not in self.published and page not in self.published.values():
            self.published[key] = page

    @rule(names=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def share(self, names: list[int]) -> None:
        keys = [bytes([name]) for name in names]
        known = next((at for at, key in enumerate(keys) if key not in self.published), len(keys))
        assert self.pages.share(keys) == [self.published[key] for key in keys[:known]]
        self.owners.append([self.published[key] for key in keys[:known]])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        self.pages.give(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @invariant()
    def every_page_is_free_or_owned(self) -> None:
        assert self.pages.free + len({page for one in self.owners for page in one}) == POOL


TestPool = Pool.TestCase


def test_the_page_unused_for_longest_is_reused_first() -> None:
    pages = PageAllocator(3)
    first, second, third = pages.take(3)
    for page, key in ((first, b"1"), (second, b"2"), (third, b"3")):
        pages.publish(page, key)
    pages.give([second])
    pages.give([first, third])
    pages.give(pages.share([b"2"]))
    assert pages.take(1) == [first]
    assert pages.share([b"1"]) == []
    assert pages.share([b"2"]) == [second]


def test_a_page_is_named_by_all_tokens_up_to_its_end() -> None:
    tokens = list(range(64))
    keys = page_keys(tokens, 16, 4)
    assert len(set(keys)) == 4
    assert page_keys(tokens, 16, 4, keys[:2]) == keys
    assert page_keys([99, *tokens[1:]], 16, 4)[3] != keys[3]
    assert page_keys(tokens[:32] + [99] * 32, 16, 2) == keys[:2]

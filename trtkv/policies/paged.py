"""Retrieve roles that read whole pages: tokens are summarized together and selected together."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trtkv.policies.base import Retrieve


class PagedRetrieve(Retrieve):
    """Read pages: one summary and one score for `page` consecutive tokens, counted from token 0.

    page: tokens of a page.
    """

    gives: ClassVar[frozenset[str]] = frozenset({"pages_chosen"})
    page: int = Field(32, ge=1)

    @property
    def unit(self) -> int:
        """The page."""
        return self.page

    @property
    def summary_group(self) -> int:
        """The page."""
        return self.page

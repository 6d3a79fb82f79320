"""Tokens in full precision and encoded ones of one sequence, in pages of one pool: what an evict role demotes moves from one kind to the other.

A page holds N tokens in full precision, or as many codes of a byte an element as fit into the same bytes. A layer has a list of pages of each kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plugins.cache.encodings.mixed.compactor import MixedCompactor
from plugins.cache.encodings.mixed.ledger import MixedLedger
from plugins.cache.encodings.mixed.pool import MixedPool
from plugins.cache.eviction.per_head.compactor import HeadCompactor
from plugins.cache.eviction.per_head.ledger import HeadLedger
from plugins.cache.eviction.per_head.pool import HeadPool
from trtkv.plan import CachePlan

if TYPE_CHECKING:
    from plugins.cache.session import Session


def make_pool(plan: CachePlan, num_pages: int, num_slots: int, device: torch.device) -> HeadPool:
    """Make the one pool of a plan whose rows, heads or layers with their codes, have pages of their own."""
    return (MixedPool if plan.mixed else HeadPool)(plan, num_pages, num_slots, device)


def make_ledger(plan: CachePlan) -> HeadLedger:
    """Make the ledger of such a plan."""
    return MixedLedger(plan) if plan.mixed else HeadLedger(plan)


def make_compactor(session: Session) -> HeadCompactor:
    """Make what evicts behind the steps of a session of such a plan."""
    return MixedCompactor(session) if session.plan.mixed else HeadCompactor(session)

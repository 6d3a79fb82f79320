"""The bytes that a layer's decode step must move, by arithmetic on its plan: every input read once, every output written once."""

from __future__ import annotations

from dataclasses import dataclass

from trtkv.bench.cases import Case
from trtkv.config import DTYPE_BYTES

SCORE_BYTES = 2  # a score lies between scorer and selector in fp16, is written once and read once


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one layer: index are the summaries that scoring reads, attended the keys and values that attention reads.

    qkv, query, stored and out are the new tokens': projections read, rotated queries, keys and values written, attention's result; summary is what
    the append writes for groups that it closes; selection is the list; scratch are scores between two launches, which a single one could spare.
    """

    index: int
    attended: int
    qkv: int
    query: int
    stored: int
    out: int
    summary: int
    selection: int
    scratch: int

    @property
    def append(self) -> int:
        """Rotate and store."""
        return self.qkv + self.query + self.stored + self.summary

    @property
    def select(self) -> int:
        """Score and choose."""
        return self.query + self.index + self.selection

    @property
    def attend(self) -> int:
        """Attend to the selection."""
        return self.query + self.selection + self.attended + self.out

    @property
    def retrieve(self) -> int:
        """Least bytes of the whole step: what passes between its ops need not leave the chip."""
        return self.qkv + self.stored + self.summary + self.index + self.attended + self.out

    def least(self, op: str) -> int:
        """Least bytes of an op."""
        return int(getattr(self, op))

    def moved(self, op: str) -> int:
        """Bytes of an op as separate launches move them: queries and selection in between written and read, scores as well."""
        if op == "retrieve":
            return self.append + self.select + self.attend + self.scratch
        return self.least(op) + (self.scratch if op == "select" else 0)


def count_bytes(case: Case, *, separate: bool = False) -> Bytes:
    """Count a case's bytes; separate says that scores pass through memory from one launch to the next.

    Softmaxed scores pass it for every query head, others once a KV head.
    """
    model, plan, tokens = case.model, case.plan(), case.batch * case.chunk
    select, size = plan.select[0], DTYPE_BYTES[case.model.dtype]
    head = model.head_dim * size
    selecting = select is not None and case.chunk == 1 and case.stored > select.budget
    read = select.reads(case.stored) if select is not None and selecting else case.stored
    index, summary = 0, 0
    for spec in plan.buffers:
        if spec.name in ("keys", "values") or not spec.paged:
            continue
        entry = spec.row_bytes * spec.tokens_per_entry // plan.page_size
        group = max(spec.tokens_per_entry, select.group if select else 1)
        closed = case.stored // group * group
        index += case.batch * closed // spec.tokens_per_entry * entry
        opened = (case.stored - case.chunk) // group * group
        summary += case.batch * (closed - opened) // spec.tokens_per_entry * entry
    units = case.stored // select.unit if select else 0
    score_heads = model.num_q_heads // model.num_kv_heads if select and select.pooling.startswith("softmax") else 1
    lists = model.num_q_heads if select and select.pooling == "none" else model.num_kv_heads
    return Bytes(
        index=index if selecting else 0,
        attended=2 * case.rows * read * head,
        qkv=tokens * model.qkv_size * size,
        query=tokens * model.num_q_heads * head,
        stored=2 * tokens * model.num_kv_heads * head,
        out=tokens * model.num_q_heads * head,
        summary=summary,
        selection=4 * case.batch * lists * (select.width + 1) if select and selecting else 0,
        scratch=2 * SCORE_BYTES * case.rows * units * score_heads if selecting and separate else 0,
    )

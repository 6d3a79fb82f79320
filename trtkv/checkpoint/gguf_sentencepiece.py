"""Rebuilds a SentencePiece tokenizer from a GGUF's pieces and scores, as a `tokenizer.json` of byte-pair merges.

SentencePiece joins the two neighbours whose piece scores highest. The same follows from merges listed by the scores of what they make, of every way
to cut a piece into two others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, CONTROL, USER = 1, 3, 4  # what a piece is, as llama.cpp numbers it
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space inside of pieces


def sentencepiece(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, bos: int | None, unknown: int | None) -> Tokenizer:
    """Make the tokenizer of pieces by id; bos is the id that begins every text, unknown that of characters without bytes, None where there is none.

    Pieces that a user has defined are found in a text first, and never joined with others.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocab = {piece: index for index, piece in enumerate(pieces)}
    unk = None if unknown is None else pieces[unknown]
    made = Tokenizer(models.BPE(vocab=vocab, merges=list(_merges(pieces, scores, kinds, vocab)), unk_token=unk, fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    added = [
        AddedToken(piece, special=kind == CONTROL, normalized=False) for piece, kind in zip(pieces, kinds, strict=True) if kind in (CONTROL, USER)
    ]
    made.add_tokens(added)
    if bos is not None:
        made.post_processor = processors.TemplateProcessing(single=f"{pieces[bos]} $A", special_tokens=[(pieces[bos], bos)])
    return made


def _merges(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    normal = [index for index, kind in enumerate(kinds) if kind == NORMAL and len(pieces[index]) > 1]
    for index in sorted(normal, key=lambda one: -scores[one]):
        piece = pieces[index]
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        yield from sorted((cut for cut in cuts if cut[0] in vocab and cut[1] in vocab), key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))

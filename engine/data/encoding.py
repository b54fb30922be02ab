"""Encodes documents of any length in bounded memory; ids equal those of the whole text, however it is chunked.

A long document is encoded in windows that overlap. Ids near the edge of a window may be others than those of the whole
text: tokenizers put a space before a text, split words depending on later text, or join letters across the edge. So two
windows are joined where both give the same tokens at the same characters for a while; windows that do not agree become
one.

Unigram models are joined only where a word begins. Inside a word several readings may have the same score ("a aa" and
"aa a"), and which one wins depends on rounding, hence on all letters of the word before: equal tokens prove nothing.

    document   |...........................................|
    windows    [------------------]                            the first
                            [-------------------]              the next one repeats its last OVERLAP_CHARS
                               ====|====                       AGREED_TOKENS equal tokens: the seam is amid
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.data.sources import TextChunk
from engine.data.tokenizers import Ids, Tokenizer

Mask = npt.NDArray[np.bool_]

OVERLAP_CHARS = 8192
AGREED_TOKENS = 32
# Equal tokens prove little where a text repeats itself.
_DISTINCT_TOKENS = 4
_GROUP_BYTES = 4 << 20  # bytes of windows that are encoded together, on all cores
_GROUP_WINDOWS = 4096


@dataclass(frozen=True)
class Encoded:
    """Consecutive tokens of a document.

    Attributes:
        ids: [tokens] int64.
        is_prompt: Which of them get no label, [tokens] bool.
        text_bytes: Bytes of their text.
        begins: Whether these are the first tokens of the document.
    """

    ids: Ids
    is_prompt: Mask
    text_bytes: int
    begins: bool


@dataclass(frozen=True)
class _Window:
    """Consecutive text of a document, from its character `start` on.

    Attributes:
        is_last: Whether the document ends with it.
        first: Tokens before this one were yielded already.
        ids, offsets, word_starts: See `TokenSpans`; characters are counted from the start of the document. offsets are
            None if not needed.
        wanted: Length in characters at which the window is encoded again; until then the tokens are those of its
            beginning. 0: not pending.
    """

    chunk: TextChunk
    start: int
    is_last: bool
    text_bytes: int
    first: int = 0
    ids: Ids | None = None
    offsets: Ids | None = None
    word_starts: Mask | None = None
    wanted: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.chunk.text)


def encode_documents(
    chunks: Iterable[TextChunk],
    tokenizer: Tokenizer,
    bos_ids: Sequence[int] = (),
    *,
    is_chat: bool = False,
    overlap: int = OVERLAP_CHARS,
) -> Iterator[Encoded]:
    """Yield the tokens of consecutive documents, complete ones or parts, in order.

    Args:
        chunks: The text; a chunk with `begins` starts a document.
        tokenizer: The result equals its ids of the whole document.
        bos_ids: Ids at the start of every document that is no conversation.
        is_chat: Documents are conversations: special tokens in the text are recognised, the template adds the start.
        overlap: Characters that consecutive windows share.

    Raises:
        DataError: The ids of a text depend on text far after it.
    """
    start = np.asarray(() if is_chat else bos_ids, dtype=np.int64)
    for window, after in _spliced(_windows(chunks, 0 if tokenizer.is_local else overlap), tokenizer, is_chat):
        assert window.ids is not None
        ids, prompt = window.ids[window.first : after], _is_prompt(window)[window.first : after]
        if window.chunk.begins:
            ids = np.concatenate((start, ids))
            prompt = np.concatenate((np.full(start.size, window.chunk.learned is not None), prompt))
        yield Encoded(ids, prompt, window.text_bytes, window.chunk.begins)


def _is_prompt(window: _Window) -> Mask:
    """Return which tokens contain no labelled character, [tokens] bool.

    One that stands for no character at all, such as a space put before a text, goes with the character it precedes.
    """
    assert window.ids is not None
    learned = window.chunk.learned
    if learned is None or window.offsets is None:
        return np.full(window.ids.size, learned is not None)
    size = len(window.chunk.text)
    edges = np.zeros(size + 2, dtype=np.int64)
    for first, after in learned:
        edges[first + 1 : after + 1] = 1
    count = np.cumsum(edges)
    first, after = (window.offsets - window.start).T
    return np.asarray(count[np.maximum(after, np.minimum(first + 1, size))] <= count[first])


def _windows(chunks: Iterable[TextChunk], overlap: int) -> Iterator[_Window]:
    """Yield windows: chunks preceded by the end of the text before them, not encoded yet."""
    waiting: _Window | None = None
    fresh = 0  # characters of `waiting` that no earlier window has
    for chunk in chunks:
        size = len(chunk.text)
        if waiting is None or chunk.begins:
            if waiting is not None:
                yield waiting
            waiting, fresh = _Window(chunk, 0, is_last=True, text_bytes=len(chunk.data)), size
        elif fresh < overlap:  # a window with little new text is extended: equal tokens of near ends prove nothing
            joined = waiting.chunk.followed_by(chunk)
            waiting = replace(waiting, chunk=joined, text_bytes=waiting.text_bytes + len(chunk.data))
            fresh += size
        else:
            yield replace(waiting, is_last=False)
            repeated = min(overlap, len(waiting.chunk.text))
            start = waiting.end - repeated
            end = waiting.chunk.part(len(waiting.chunk.text) - repeated, len(waiting.chunk.text))
            joined = replace(end, begins=False).followed_by(chunk)
            waiting, fresh = _Window(joined, start, is_last=True, text_bytes=len(chunk.data)), size
    if waiting is not None:
        yield waiting


def _spliced(windows: Iterable[_Window], tokenizer: Tokenizer, is_chat: bool) -> Iterator[tuple[_Window, int | None]]:
    """Yield the windows with ids, and the token of each at which the next one continues, None for its end."""
    previous: _Window | None = None
    for window in _encoded(windows, tokenizer, is_chat):
        if window.is_last and (previous is None or tokenizer.is_local or window.chunk.begins):
            yield window, None
            continue
        if tokenizer.is_local:
            yield window, None
        elif previous is None or window.chunk.begins:
            previous = window
        elif not previous.wanted and (seam := _seam(previous, window)) is not None:
            yield previous, seam[0]
            previous = replace(window, first=seam[1])
        else:
            previous = _widened(previous, window, tokenizer, is_chat)
        if previous is not None and window.is_last:
            yield previous, None
            previous = None


def _encoded(windows: Iterable[_Window], tokenizer: Tokenizer, is_chat: bool) -> Iterator[_Window]:
    group: list[_Window] = []
    held_bytes = 0
    for window in windows:
        group.append(window)
        held_bytes += window.text_bytes
        if held_bytes >= _GROUP_BYTES or len(group) >= _GROUP_WINDOWS:
            yield from _encode_group(group, tokenizer, is_chat)
            group, held_bytes = [], 0
    yield from _encode_group(group, tokenizer, is_chat)


def _encode_group(group: Sequence[_Window], tokenizer: Tokenizer, is_chat: bool) -> Iterator[_Window]:
    is_plain = [
        not is_chat and not window.chunk.learned and (tokenizer.is_local or (window.chunk.begins and window.is_last))
        for window in group
    ]
    plain = iter(tokenizer.encode([window.chunk.text for window, fast in zip(group, is_plain, strict=True) if fast]))
    slow = [window.chunk.text for window, fast in zip(group, is_plain, strict=True) if not fast]
    placed = iter(tokenizer.encode_with_offsets(slow, finds_special=is_chat))
    for window, fast in zip(group, is_plain, strict=True):
        if fast:
            yield replace(window, ids=next(plain))
        else:
            spans = next(placed)
            offsets = spans.offsets + window.start
            yield replace(window, ids=spans.ids, offsets=offsets, word_starts=spans.word_starts)


def _seam(previous: _Window, window: _Window) -> tuple[int, int] | None:
    """Return a token of `previous` and the same token of `window` within a run of equal tokens, or None."""
    assert previous.offsets is not None
    assert window.offsets is not None
    tail = max(previous.first, int(np.searchsorted(previous.offsets[:, 0], window.start)))
    head = int(np.searchsorted(window.offsets[:, 0], previous.end))
    ends = _tokens(previous)[tail:], _tokens(window)[:head]
    # Match tokens by their first character, if no other token of the window begins there.
    begins = [np.unique(tokens[:, 1], return_index=True) for tokens in ends]
    _, ours, theirs = np.intersect1d(begins[0][0], begins[1][0], assume_unique=True, return_indices=True)
    if not ours.size:
        return None
    shifts, counts = np.unique(begins[0][1][ours] - begins[1][1][theirs], return_counts=True)
    shift = int(shifts[counts.argmax()])
    low, high = max(shift, 0), min(len(ends[0]), len(ends[1]) + shift)
    is_equal = (ends[0][low:high] == ends[1][low - shift : high - shift]).all(axis=1)
    edges = np.flatnonzero(np.diff(is_equal, prepend=False, append=False)).reshape(-1, 2) + low
    if not len(edges):
        return None
    first, after = edges[np.diff(edges, axis=1).argmax()].tolist()
    texts = {previous.chunk.text[begin:end] for begin, end in (ends[0][first:after, 1:] - previous.start).tolist()}
    if after - first < AGREED_TOKENS or len(texts) < _DISTINCT_TOKENS:
        return None
    seams = np.arange(first, after)
    if previous.word_starts is not None and window.word_starts is not None:
        seams = seams[previous.word_starts[tail + seams] & window.word_starts[seams - shift]]
    if not len(seams):
        return None
    seam = int(seams[len(seams) // 2])
    return tail + seam, seam - shift


def _tokens(window: _Window) -> Ids:
    """Return id, first character and the one after the last of each token, [tokens, 3] int64."""
    assert window.ids is not None
    assert window.offsets is not None
    return np.column_stack((window.ids, window.offsets))


def _widened(previous: _Window, window: _Window, tokenizer: Tokenizer, is_chat: bool) -> _Window:
    """Join both windows; encode the result once it is twice as long as before, which keeps the total time linear."""
    size = len(window.chunk.text)
    chunk = previous.chunk.followed_by(window.chunk.part(min(previous.end - window.start, size), size))
    wanted = previous.wanted or 2 * len(previous.chunk.text)
    wider = replace(
        previous, chunk=chunk, is_last=window.is_last, text_bytes=previous.text_bytes + window.text_bytes, wanted=wanted
    )
    if len(chunk.text) < wanted and not window.is_last:
        return wider
    [spans] = tokenizer.encode_with_offsets([chunk.text], finds_special=is_chat)
    offsets = spans.offsets + previous.start
    found = replace(wider, ids=spans.ids, offsets=offsets, word_starts=spans.word_starts, wanted=0)
    if not np.array_equal(_tokens(found)[: previous.first], _tokens(previous)[: previous.first]):
        raise DataError(
            f"tokenizer {tokenizer.name} gives a text of {len(chunk.text):,} characters ids that depend on its end, so "
            "this document cannot be encoded in parts. Cut it into documents, or give another data.tokenizer."
        )
    return found

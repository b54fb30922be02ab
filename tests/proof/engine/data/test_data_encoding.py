"""Encoding: ids of a document are those of the whole text, wherever it comes in chunks and windows end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.data_helpers import quick
from testkit.tokenizer_kinds import KINDS

from engine.data.encoding import encode_documents
from engine.data.sources import TextChunk
from engine.data.tokenizers import FileTokenizer

TOKENIZERS = {name: FileTokenizer(make(), name) for name, make in KINDS.items()}
PARTS = [
    *(
        "hello there world, it's 1234 numbers. ",
        "größe naïve e\u0301 ",
        "漢字 ",
        "😀👩‍👩‍👧",
        "\r\n",
        "\n\n",
        "   ",
        "\t",
    ),
    *("aaaaaaa", "a" * 150, " " * 70, "1" * 40, "<|im_end|>", "</s>", "<tool>", "    return x\n", "x", "ﬁ", "\u00a0"),
]
texts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=60).map("".join)


def pieces_of(text: str, cuts: Sequence[int]) -> list[TextChunk]:
    """`text` cut into chunks after so many characters each, again and again."""
    chunks, start = [], 0
    while start < len(text):
        size = cuts[len(chunks) % len(cuts)]
        chunks.append(TextChunk(text[start : start + size], begins=start == 0))
        start += size
    return chunks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_chat", [False, True])
@given(text=texts, cuts=st.lists(st.integers(1, 400), min_size=1, max_size=4), overlap=st.sampled_from([40, 150, 300]))
@quick
def test_ids_are_those_of_the_whole_text(kind: str, is_chat: bool, text: str, cuts: list[int], overlap: int) -> None:
    tokenizer = TOKENIZERS[kind]
    whole = tokenizer.encode_with_offsets([text], finds_special=is_chat)[0].ids
    parts = list(encode_documents(pieces_of(text, cuts), tokenizer, is_chat=is_chat, overlap=overlap))
    assert np.concatenate([part.ids for part in parts]).tolist() == whole.tolist()


@pytest.mark.parametrize("letters", range(60, 132, 3))
def test_readings_of_equal_score_are_those_of_the_whole_word(letters: int) -> None:
    """Of "aaa" a unigram model has readings of equal score, and rounding decides by what comes before."""
    tokenizer = TOKENIZERS["unigram"]
    text = "a" * letters + "\N{GRINNING FACE}\N{WOMAN}\u200d\N{WOMAN}\u200d\N{GIRL}" + "1" * 40 + "a" * 163
    whole = tokenizer.encode_with_offsets([text], finds_special=True)[0].ids
    parts = list(encode_documents(pieces_of(text, [66]), tokenizer, is_chat=True, overlap=150))
    assert np.concatenate([part.ids for part in parts]).tolist() == whole.tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@quick
def test_offsets_are_those_of_the_library(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    library = tokenizer.inner.encode(text, add_special_tokens=False)
    ids, offsets, _ = tokenizer.encode_with_offsets([text], finds_special=False)[0]
    assert ids.tolist() == library.ids
    assert [*map(tuple, offsets.tolist())] == library.offsets

"""Needle in a haystack: texts with a hidden sentence and a question about it, as long as a training sequence.

    haystack ... | The secret number of amber is 48217. | ... haystack | The secret number of amber is | 48217
                   needle, at its depth                                  question                        answer

Haystacks are text of the validation split, starting at evenly spaced positions; a split that is too short is read again
from its start. A sample is one haystack, one key word and one number. It gives a task for every depth of the needle,
and a control without the needle, which has more haystack instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.config.errors import ConfigError, DataError
from engine.config.settings import RunConfig
from engine.data.prepare import PreparedData
from engine.data.sampler import IGNORE_INDEX
from engine.data.shards import TokenShards
from engine.data.tokenizers import Ids, Tokenizer

_END = "."
_KEYS = (
    *("amber", "anchor", "apple", "arrow", "autumn", "basket", "beacon", "birch", "bridge", "bronze", "candle"),
    *("canyon", "carpet", "castle", "cedar", "clover", "copper", "coral", "cotton", "crystal", "desert", "eagle"),
    *("ember", "falcon", "feather", "fern", "forest", "garden", "ginger", "glacier", "granite", "harbor", "hazel"),
    *("island", "ivory", "jasmine", "jungle", "kettle", "ladder", "lantern", "lemon", "lily", "linen", "maple"),
    *("marble", "meadow", "mirror", "mountain", "needle", "oak", "ocean", "olive", "orange", "pearl", "pepper"),
    *("planet", "prairie", "raven", "ribbon", "river", "saddle", "silver", "sparrow", "spring", "summer", "temple"),
    *("thunder", "timber", "tulip", "tunnel", "valley", "velvet", "violet", "walnut", "willow", "window", "winter"),
)
_FIRST_NUMBER, _NUMBERS = 10_000, 90_000
_READ_TOKENS = 1 << 20


@dataclass(frozen=True)
class Needle:
    """Token ids of a needle: the question, the number, and the end of the sentence."""

    question: Ids
    answer: Ids
    end: Ids

    @property
    def sentence(self) -> Ids:
        """The whole sentence as it is hidden."""
        return np.concatenate([self.question, self.answer, self.end])


@dataclass(frozen=True)
class NeedleTask:
    """One sequence: tokens and labels, [seq_len] int64; all labels but those of the answer are -100."""

    tokens: Ids
    labels: Ids


@dataclass(frozen=True)
class NeedleTasks:
    """All tasks of an evaluation, built on demand; task number = sample * (depths + 1) + depth, the control last.

    The same arguments give the same tasks on every rank and machine.
    """

    shards: TokenShards
    tokenizer: Tokenizer
    seq_len: int
    depths: int
    samples: int
    seed: int

    def __len__(self) -> int:
        return self.samples * (self.depths + 1)

    @cached_property
    def needles(self) -> tuple[Needle, ...]:
        """The needle of every sample. Raises DataError for a tokenizer that cannot spell a number."""
        return tuple(make_needle(self.tokenizer, *needle_text(self.seed, index)) for index in range(self.samples))

    def task(self, number: int) -> NeedleTask:
        """Build task `number` of len(self)."""
        sample, place = divmod(number, self.depths + 1)
        needle = self.needles[sample]
        first = np.array(self.shards.manifest.bos_ids, dtype=np.int64)
        is_control = place == self.depths
        hidden = needle.sentence[: 0 if is_control else None]
        cut = 0 if is_control else self.position(sample, place) - first.size
        count = self._haystack_tokens(needle) - hidden.size
        text = haystack(self.shards, sample * self.shards.token_count // self.samples, count)
        ids = np.concatenate([first, text[:cut], hidden, text[cut:], needle.question, needle.answer])
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        labels[-needle.answer.size :] = needle.answer
        return NeedleTask(ids[:-1], labels)

    def position(self, sample: int, depth: int) -> int:
        """Return the first token of a sample's needle, from 0."""
        needle = self.needles[sample]
        room = self._haystack_tokens(needle) - needle.sentence.size
        return len(self.shards.manifest.bos_ids) + round(self.share(depth) * room)

    def share(self, depth: int) -> float:
        """Return the position of a depth in the haystack: 0 at its start, farthest from the question, 1 at its end."""
        return depth / (self.depths - 1) if self.depths > 1 else 0.0

    def _haystack_tokens(self, needle: Needle) -> int:
        """Return the tokens of text before the question; the last token of the answer is a label only."""
        return self.seq_len + 1 - len(self.shards.manifest.bos_ids) - needle.question.size - needle.answer.size


def needle_tasks(config: RunConfig, data: PreparedData) -> NeedleTasks | None:
    """Return the configured tasks, or None; cheap, so that errors are found before training.

    Raises ConfigError if a sequence is too short for them, DataError if the tokens have no usable tokenizer.
    """
    train = config.train
    if not train.eval_needle_depths:
        return None
    tasks = NeedleTasks(
        data.validation,
        data.load_tokenizer(),
        train.seq_len,
        train.eval_needle_depths,
        train.eval_needle_samples,
        config.seed,
    )
    least = max(needle.sentence.size + needle.question.size + needle.answer.size for needle in tasks.needles)
    least += len(tasks.shards.manifest.bos_ids)
    if train.seq_len < least:
        raise ConfigError(
            f"train.eval_needle_depths: sentence, question and answer take up to {least} tokens of this tokenizer, but "
            f"train.seq_len={train.seq_len}; set train.seq_len={least} or more, or train.eval_needle_depths=0"
        )
    return tasks


def needle_text(seed: int, sample: int) -> tuple[str, str]:
    """Return question and answer of a sample, by a hash, so equal on every machine."""
    digest = hashlib.sha256(f"needle {seed} {sample}".encode()).digest()
    key = _KEYS[int.from_bytes(digest[:8]) % len(_KEYS)]
    number = _FIRST_NUMBER + int.from_bytes(digest[8:16]) % _NUMBERS
    return f" The secret number of {key} is", f" {number}"


def make_needle(tokenizer: Tokenizer, question: str, answer: str) -> Needle:
    """Encode a needle so that the question has the same ids within the needle and at the end of the text.

    Raises DataError if the answer's ids do not decode to it: then no model could give it.
    """
    texts = [question, question + answer, question + answer + _END]
    first, second, whole = tokenizer.encode(texts)
    needle = Needle(first, second[first.size :], whole[second.size :])
    if not (needle.answer.size and needle.end.size and np.array_equal(needle.sentence, whole)):
        needle = Needle(*tokenizer.encode([question, answer, _END]))  # ids depend on later text: split the text instead
    spelled = "".join(tokenizer.decode(needle.answer).split())
    if spelled != answer.strip():
        raise DataError(
            f"train.eval_needle_depths: tokenizer {tokenizer.name} spells the number {answer.strip()!r} as "
            f"{spelled[:40]!r}, so no model could repeat it; set train.eval_needle_depths=0"
        )
    return needle


def haystack(shards: TokenShards, start: int, count: int) -> Ids:
    """Return `count` ids of text from `start` on, int64, wrapping around at the end of the shards.

    Ids that begin or end documents are skipped: models trained with attention within documents ignore text before them.
    """
    parts: list[Ids] = []
    edges = [*shards.manifest.bos_ids, -1 if shards.manifest.eod_id is None else shards.manifest.eod_id]
    missing, position, seen = count, start % shards.token_count, 0
    while missing:
        ids = shards.read(position, min(_READ_TOKENS, shards.token_count - position))
        text = ids[~np.isin(ids, edges)]
        parts.append(text[:missing])
        missing -= parts[-1].size
        position, seen = (position + ids.size) % shards.token_count, seen + ids.size
        if seen >= shards.token_count and missing == count:
            raise DataError(
                f"{shards.folder}: the validation split holds no text to hide a sentence in. Give more text."
            )
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])

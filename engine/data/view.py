"""Shows the input of training: the samples of a step with text, labels, documents and padding.

Tokens and labels are those of the training step: `training_batches` builds the sampler of the trainer with the same
arguments, and everything here is read from its batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.config.settings import RunConfig
from engine.data.prepare import PreparedData, TrainingData
from engine.data.sampler import IGNORE_INDEX, Batch, Sampler, sequential_batches
from engine.data.shards import TokenShards
from engine.data.tokenizers import Ids, Tokenizer


def training_sampler(data: TrainingData, config: RunConfig) -> Sampler:
    """Build the sampler that the trainer of `config` uses. Raises DataError if a corpus has no complete sample."""
    return data.sampler(
        config.train.seq_len,
        config.seed,
        grad_accum_steps=config.train.grad_accum_steps,
        documents_apart=config.attention.documents,
    )


def validation_batches(data: PreparedData, config: RunConfig, dp: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
    """Yield the batches of a validation of `config` on data-parallel rank `dp` = (rank, ranks)."""
    return sequential_batches(
        data.validation,
        config.train.seq_len,
        batch_size=config.train.micro_batch_size,
        dp=dp,
        max_samples=config.train.eval_samples,
        documents_apart=config.attention.documents,
    )


def samples_per_step(config: RunConfig) -> int:
    """Return the sequences of one optimizer step over all ranks and micro-steps."""
    ranks = config.parallel.dp_replicate_size * config.parallel.dp_shard_size
    return ranks * config.train.micro_batch_size * config.train.grad_accum_steps


@dataclass(frozen=True, eq=False)
class SampleView:
    """One sample as a model sees it.

    number: in the stream (training) or in the split (validation). ids, is_learned: int64 and bool [seq_len + 1]: the
    seq_len tokens that the model reads and the one after them, which only the last label may want; is_learned[t]:
    whether token t is the label of the token before it. documents: offsets below seq_len at which a document starts
    or, the first, is read from. padding: tokens at the end of the sample that stand for nothing. is_cut: whether the
    sample ends inside a document; null where the token set has no index of documents.
    """

    number: int
    ids: Ids
    is_learned: npt.NDArray[np.bool_]
    documents: Ids
    begins_document: bool | None
    is_cut: bool | None
    padding: int

    @property
    def seq_len(self) -> int:
        """Number of tokens."""
        return self.ids.size - 1

    @property
    def learned_tokens(self) -> int:
        """Number of labels."""
        return int(self.is_learned.sum())

    @property
    def learned_ranges(self) -> list[tuple[int, int]]:
        """Ranges [first, after) of labels, ascending."""
        edges = np.flatnonzero(np.diff(self.is_learned, prepend=False, append=False)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))


def training_views(data: TrainingData, config: RunConfig, step: int, count: int) -> list[SampleView]:
    """Return `count` samples of the stream from the first one of `step` (from 0) on."""
    sampler, first = training_sampler(data, config), step * samples_per_step(config)
    views = []
    sampler.start_at(0, first)
    for row in range(count):
        batch = sampler.batch(0, 0, row, max(count, 1), 1)  # row number `row` of the stream after `first`
        shards, sample = sampler.locate(first + row)
        views.append(_view(first + row, batch, 0, shards, sample))
    return views


def validation_views(data: PreparedData, config: RunConfig, count: int) -> list[SampleView]:
    """Return the first `count` samples of a validation, or all if it has fewer."""
    views: list[SampleView] = []
    for batch in validation_batches(data, config):
        for row in range(len(batch.tokens)):
            is_inside = len(views) * config.train.seq_len < data.validation.token_count - 1
            if len(views) == count or not is_inside:
                return views
            views.append(_view(len(views), batch, row, data.validation, len(views)))
    return views


def _view(number: int, batch: Batch, row: int, shards: TokenShards, sample: int) -> SampleView:
    tokens, labels = batch.tokens[row], batch.labels[row]
    start, count = sample * tokens.size, tokens.size
    held = min(count, shards.token_count - 1 - start)
    after = shards.read(start + held, 1)
    edges = shards.document_edges(start, held)
    return SampleView(
        number=number,
        ids=np.concatenate((tokens, after if held == count else tokens[-1:])),
        is_learned=np.concatenate(([False], labels != IGNORE_INDEX)),
        documents=batch.documents[row],
        begins_document=None if edges is None else bool(edges[0] == start),
        is_cut=None if edges is None else bool(edges[-1] > start + held),
        padding=count - held,
    )


def decoded(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> str:
    """Decode `ids` with special tokens, as they follow the tokens `before`; incomplete characters are U+FFFD.

    Many decoders drop a blank in front of a text, so `ids` are decoded behind their predecessors.
    """
    if not before:
        return tokenizer.decode(ids, skip_special=False)
    prefix = tokenizer.decode(before, skip_special=False)
    whole = tokenizer.decode([*before, *ids], skip_special=False)
    return whole[len(prefix) :] if whole.startswith(prefix) else tokenizer.decode(ids, skip_special=False)


def warnings_of(views: Sequence[SampleView]) -> Iterable[str]:
    """Return warnings to show before a launch, one sentence each."""
    tokens, learned = sum(view.seq_len for view in views), sum(view.learned_tokens for view in views)
    empty = sum(not view.learned_tokens for view in views)
    cut = sum(view.is_cut is True for view in views)
    if tokens and learned / tokens < 0.0005:
        yield f"{learned / tokens:.1%} of tokens are learned"
    if empty:
        yield f"{empty} of {len(views)} samples have no labels"
    if cut:
        yield f"{cut} of {len(views)} samples end inside a document: its text is cut there"

"""What a run trains on: the corpus of its configuration, and prepared ones that are mixed in by weight."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.lengths import LengthRule, by_length
from engine.data.prepare import PreparedData, open_prepared
from engine.data.sampler import Sampler, Samples
from engine.data.shards import EchoedShards
from engine.runs.files import hash_json


@dataclass(frozen=True)
class TrainingData:
    """The corpus `main`, which validation is of, and `others`; weights of all of them, or none without others.

    lengths: how each corpus is divided by the lengths of its documents, if it is.
    """

    main: PreparedData
    others: tuple[PreparedData, ...] = ()
    weights: tuple[float, ...] = ()
    lengths: LengthRule = field(default_factory=LengthRule)

    @property
    def content_hash(self) -> str:
        """Equal on all ranks that have the same tokens in the same shares."""
        if not self.others and not self.lengths:
            return self.main.content_hash
        hashes = [data.content_hash for data in (self.main, *self.others)]
        lengths = {"buckets": list(self.lengths.buckets), "shares": list(self.lengths.weights)} if self.lengths else {}
        return str(hash_json({"hashes": hashes, "weights": list(self.weights), **lengths}))

    @property
    def vocab_size(self) -> int:
        """Ids are below this, in all of them."""
        return max(data.vocab_size for data in (self.main, *self.others))

    def sampler(self, seq_len: int, seed: int, *, grad_accum_steps: int, documents_apart: bool = False) -> Sampler:
        """Batches of the mixture. Raises DataError when a corpus, or a class of one, has less than one sample."""
        sources = [Samples(data.train, seq_len, seed) for data in (self.main, *self.others)]
        weights = list(self.weights)
        if self.lengths:
            parts = [by_length(corpus, self.lengths) for corpus in sources]
            sources = [one for classes, _ in parts for one in classes]
            shares = zip(weights or [1.0], parts, strict=True)
            weights = [weight * share for weight, (_, own) in shares for share in own]
        return Sampler(sources, weights, seed, grad_accum_steps=grad_accum_steps, documents_apart=documents_apart)


def open_training_data(config: DataConfig) -> TrainingData:
    """The prepared corpus of `config` and those of `mix_paths`, whose tokenizers must be the same; every rank may call.

    Raises DataError when one is not prepared, or was made with another tokenizer.
    """
    main = open_prepared(config)
    if config.echo_tokens is not None:
        train, validation = (EchoedShards(one, config.echo_tokens) for one in (main.train, main.validation))
        known = hash_json([main.content_hash, config.echo_tokens])
        main = replace(main, train=train, validation=validation, content_hash=known)
    others = []
    for path in config.mix_paths:
        other = open_prepared(DataConfig(format="shards", paths=(path,)))
        theirs, ours = _tokens_of(other), _tokens_of(main)
        if theirs != ours:
            raise DataError(
                f"data.mix_paths: {Path(path)} has tokens of {theirs}, {main.path} of {ours}. Prepare both with the "
                "same data.tokenizer and data.bos."
            )
        others.append(other)
    lengths = LengthRule(config.length_buckets, config.length_weights)
    return TrainingData(main, tuple(others), config.mix_weights, lengths)


def _tokens_of(data: PreparedData) -> str:
    """What must be the same in corpora that are mixed."""
    begins = f" and beginning {list(data.train.bos_ids)}" if data.train.bos_ids else ""
    return f"{data.tokenizer} with end of document {data.eod_id}{begins}"

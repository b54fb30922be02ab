"""Rules for data settings and for weights that a run loads, evaluates and saves; `engine.data.rules` reads files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from engine.config.settings import DataConfig, RunConfig

if TYPE_CHECKING:
    pass

_WEIGHT_TOLERANCE = 1e-6  # rounding error of a sum such as 0.1 + 0.2 + 0.7


def data_rules(config: RunConfig) -> Iterator[str]:
    """Yield one sentence per violated rule of data settings."""
    yield from _vocabulary(config)
    yield from _sources(config.data)
    yield from _conversations(config.data)
    yield from _bos(config.data)
    yield from _lengths(config.data)
    if config.data.echo_tokens is not None:
        yield from _echo(config)


def weight_rules(config: RunConfig) -> Iterator[str]:
    """Yield one sentence per violated rule of initial and saved weights."""
    yield from _guard(config)
    yield from _evaluation(config)
    yield from _other_tokens(config)
    if config.cluster.runs_elsewhere:
        yield from _paths_elsewhere(config)


def _vocabulary(config: RunConfig) -> Iterator[str]:
    """Check that the model has a row for every id of the tokenizer; a tokenizer.json is not opened here."""
    rows = config.model.vocab_size
    needs = {"bytes": 256, "bpe": config.data.bpe_vocab_size}.get(config.data.tokenizer)
    if needs is not None and config.data.format != "shards" and rows < needs:
        smaller = " or a smaller data.bpe_vocab_size" if config.data.tokenizer == "bpe" else ""
        yield (
            f"model.vocab_size: got {rows}, but data.tokenizer={config.data.tokenizer} gives {needs} different tokens; "
            f"set model.vocab_size={needs} or more{smaller}"
        )


def _sources(data: DataConfig) -> Iterator[str]:
    paths, weights = data.mix_paths, data.mix_weights
    if data.format == "stdlib" and data.paths:
        yield (
            f"data.paths: data.format=stdlib reads no files, but {list(data.paths)} was given; choose their format: "
            "data=text, data=jsonl, data=parquet or data=shards"
        )
    if data.format != "stdlib" and not data.paths:
        yield (
            f"data.paths: data.format={data.format} reads files, but none was given; add data.paths=[FILE,FOLDER,GLOB]"
        )
    if data.format == "shards" and len(data.paths) > 1:
        yield (
            f"data.paths has {len(data.paths)} entries; data.format=shards takes one: a prepared folder, a folder with "
            "manifest.json, or a token file with its manifest (which may list many files)"
        )
    for key in ("prompt_field", "messages_field"):
        if getattr(data, key) is not None and data.format != "jsonl":
            yield (
                f"data.{key} names a key of JSON lines, but data.format={data.format}; set data=jsonl or "
                f"data.{key}=null"
            )
    if len(weights) != (len(paths) + 1 if paths else 0) or any(weight <= 0 for weight in weights):
        yield (
            f"data.mix_weights: got {list(weights)}, expected one positive number for data.paths and one for each of "
            f"the {len(paths)} data.mix_paths"
        )


def _conversations(data: DataConfig) -> Iterator[str]:
    if data.messages_field is None:
        if data.chat_template is not None:
            yield (
                f"data.chat_template={data.chat_template} renders conversations, but data.messages_field is null; name "
                "their key (often data.messages_field=messages), or leave the template out"
            )
        return
    if data.prompt_field is not None:
        yield (
            f"data.messages_field={data.messages_field} and data.prompt_field={data.prompt_field}: a line is a "
            "conversation or a prompt and its text; leave one of them out"
        )
    if data.chat_template is None and data.tokenizer_path is None:
        yield (
            f"data.chat_template: data.tokenizer={data.tokenizer} has no chat template beside it; set "
            "data.chat_template=chatml, or give a .jinja file"
        )


def _bos(data: DataConfig) -> Iterator[str]:
    """Reject settings of data.bos that would have no effect."""
    if data.format == "shards" and data.bos != "auto":
        yield f"data.bos={data.bos}: data.format=shards takes tokens as they are; leave data.bos=auto"


def _lengths(data: DataConfig) -> Iterator[str]:
    buckets, weights = data.length_buckets, data.length_weights
    if any(length < 2 for length in buckets) or any(low >= high for low, high in pairwise(buckets)):
        yield (
            f"data.length_buckets: got {list(buckets)}, expected lengths of documents in tokens, each greater than the "
            "one before, such as [4096,32768]"
        )
    if len(weights) != (len(buckets) + 1 if buckets else 0):
        yield (
            f"data.length_weights: got {len(weights)} numbers, expected {len(buckets) + 1 if buckets else 0}: one more "
            f"than the {len(buckets)} data.length_buckets, and none without them"
        )
    # Written so that NaN fails as well.
    elif weights and not (min(weights) >= 0 and abs(sum(weights) - 1) <= _WEIGHT_TOLERANCE):
        yield f"data.length_weights: got {list(weights)}, expected shares of 0 or more that add up to 1"


def _echo(config: RunConfig) -> Iterator[str]:
    """Repeated tokens cross document boundaries, so no other setting may depend on these."""
    if config.attention.documents:
        yield "attention.documents=true masks the tokens that data.echo_tokens repeats; set one of them to its default"
    if config.data.length_buckets:
        yield "data.length_buckets needs whole documents, and data.echo_tokens cuts them; leave one of them out"


def _guard(config: RunConfig) -> Iterator[str]:
    guard, checkpoint = config.train.guard, config.train.checkpoint
    if "rewind" in guard.reactions and not (checkpoint.is_periodic or config.train.evaluate_only):
        yield (
            "train.guard: rewind goes back to a checkpoint, but none is saved; set train.checkpoint.every_steps or "
            "train.checkpoint.every_minutes"
        )


def _evaluation(config: RunConfig) -> Iterator[str]:
    train = config.train
    if train.evaluate_only and train.checkpoint.resume_from is None and config.model.init_from is None:
        yield (
            "train.evaluate_only=true evaluates weights that are there, but none are named; set "
            "train.checkpoint.resume_from or model.init_from, or use `burst eval RUN`"
        )


def _other_tokens(config: RunConfig) -> Iterator[str]:
    """Token ids of a newly trained tokenizer have no meaning for existing weights."""
    if config.model.init_from is not None and config.data.tokenizer == "bpe" and config.data.format != "shards":
        yield (
            f"data.tokenizer=bpe is trained on this corpus, so the weights of model.init_from={config.model.init_from} "
            "know none of its tokens; set data.tokenizer to the tokenizer.json that they were trained with, often "
            f"{config.model.init_from}/tokenizer.json"
        )


def _paths_elsewhere(config: RunConfig) -> Iterator[str]:
    """Require absolute paths for ranks on other machines, whose working directory differs from this one.

    train.checkpoint.resume_from may name a run; its path is then found at launch.
    """
    settings = config.train.checkpoint
    named = {
        "train.checkpoint.folder": settings.folder,
        "model.init_from": config.model.init_from,
        **{f"data.mix_paths[{index}]": path for index, path in enumerate(config.data.mix_paths)},
    }
    for key, path in named.items():
        if path is not None and not path.startswith(("/", "~/")):
            yield f"{key}: got {path!r}, expected a path on the nodes that begins with / or ~/"

"""Rules of conversations and of classes of documents by their length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from engine.config import DataConfig, RunConfig
from engine.config_machines import runs_elsewhere
from engine.config_schema import Problem

_WEIGHT_TOLERANCE = 1e-6  # of a sum: what 0.1 + 0.2 + 0.7 may lack


def data_problems(config: RunConfig) -> Iterator[Problem]:
    """One problem per broken rule."""
    if config.data.messages_field is not None:
        yield from _chats(config.data)
    yield from _chat_template(config)
    yield from _lengths(config.data)
    yield from _bos(config.data)
    if config.data.format == "shards" and len(config.data.paths) > 1:
        yield Problem(
            ("data.paths", "data.format"),
            f"data.paths has {len(config.data.paths)} entries; data.format=shards takes one: a prepared folder, a "
            "folder with manifest.json, or a token file with its manifest (which may list many files)",
        )
    if config.data.echo_tokens is not None:
        yield from _echo(config)


def _chats(data: DataConfig) -> Iterator[Problem]:
    if data.format != "jsonl":
        yield Problem(
            ("data.messages_field", "data.format"),
            f"data.messages_field names a key of JSON lines, but data.format={data.format}; set data=jsonl or "
            "data.messages_field=null",
        )
    if data.prompt_field is not None:
        yield Problem(
            ("data.messages_field", "data.prompt_field"),
            f"data.messages_field={data.messages_field} and data.prompt_field={data.prompt_field}: a line is a "
            "conversation or a prompt and its text; leave one of them out",
        )
    if data.chat_template is None and data.tokenizer in ("bytes", "bpe"):
        yield Problem(
            ("data.chat_template", "data.tokenizer"),
            f"data.chat_template: data.tokenizer={data.tokenizer} has no chat template beside it; set "
            "data.chat_template=chatml, or give a .jinja file",
        )


def _chat_template(config: RunConfig) -> Iterator[Problem]:
    template = config.data.chat_template
    if template is None:
        return
    if config.data.messages_field is None:
        yield Problem(
            ("data.chat_template", "data.messages_field"),
            f"data.chat_template={template} renders conversations, but data.messages_field is null; name the key they "
            "stand under (often data.messages_field=messages), or leave the template out",
        )
    elif template != "chatml" and not runs_elsewhere(config.cluster) and not Path(template).expanduser().is_file():
        yield Problem(
            ("data.chat_template",),
            f"data.chat_template: got {template!r}, expected null, chatml or the path of a .jinja file that exists "
            f"(looked from {Path.cwd()})",
        )


def _bos(data: DataConfig) -> Iterator[Problem]:
    """What would be accepted and do nothing."""
    reason = None
    if data.format == "shards" and data.bos != "auto":
        reason = "data.format=shards takes tokens as they are"
    elif data.bos == "on" and data.tokenizer in ("bytes", "bpe"):
        reason = f"data.tokenizer={data.tokenizer} has no token that begins a document"
    elif data.bos == "on" and data.messages_field is not None:
        reason = "conversations begin as the chat template has it"
    if reason is not None:
        yield Problem(
            ("data.bos", "data.format", "data.tokenizer", "data.messages_field"),
            f"data.bos={data.bos}: {reason}; leave data.bos=auto",
        )


def _lengths(data: DataConfig) -> Iterator[Problem]:
    buckets, weights = data.length_buckets, data.length_weights
    if any(length < 2 for length in buckets) or any(low >= high for low, high in pairwise(buckets)):
        yield Problem(
            ("data.length_buckets",),
            f"data.length_buckets: got {list(buckets)}, expected lengths of documents in tokens, each greater than the "
            "one before, such as [4096,32768]",
        )
    if len(weights) != (len(buckets) + 1 if buckets else 0):
        yield Problem(
            ("data.length_buckets", "data.length_weights"),
            f"data.length_weights: got {len(weights)} numbers, expected {len(buckets) + 1 if buckets else 0}: one more "
            f"than the {len(buckets)} data.length_buckets, and none without them",
        )
    # Written such that NaN fails, too.
    elif weights and not (min(weights) >= 0 and abs(sum(weights) - 1) <= _WEIGHT_TOLERANCE):
        yield Problem(
            ("data.length_weights",),
            f"data.length_weights: got {list(weights)}, expected shares of 0 or more that add up to 1",
        )


def _echo(config: RunConfig) -> Iterator[Problem]:
    """What comes twice is cut and crosses documents, so nothing may depend on where they begin."""
    if config.attention.documents:
        yield Problem(
            ("data.echo_tokens", "attention.documents"),
            "attention.documents=true hides what data.echo_tokens repeats; set one of them to its default",
        )
    if config.data.length_buckets:
        yield Problem(
            ("data.echo_tokens", "data.length_buckets"),
            "data.length_buckets needs whole documents, and data.echo_tokens cuts them; leave one of them out",
        )

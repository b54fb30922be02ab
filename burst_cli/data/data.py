"""`burst data prepare` and `burst data show`: the corpus of a configuration as tokens, and as training takes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.data.progress import show_progress
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument
from burst_cli.render import listing
from engine.config.errors import DataError
from engine.data.prepare import PreparedData, open_training_data, prepare, skipped_rows
from engine.data.sampler import LengthClass, Samples, length_classes
from engine.data.shards import TokenShards
from engine.data.view import samples_per_step, training_views, validation_views, warnings_of
from engine.pretrained.folder import open_tokenizer
from engine.pretrained.resolve import version_note
from engine.runs.figures import DASH, binary_bytes, percent, plain, seconds

app = new_verb()
_BAD_ROWS_SHOWN = 5


@app.callback()
def _data() -> None:
    """Prepare training data, and show samples as training takes them."""


@app.command("prepare")
def prepare_data(
    overrides: OverridesArgument = None, config_dir: ConfigDirOption = None, as_json: JsonOption = False
) -> None:
    """Tokenise the corpus of a configuration and show what came out.

    Composes the same configuration as `burst launch`. Data that is already prepared is found again, not made again.
    With data.length_buckets it also shows how many samples of train.seq_len tokens each length of document has.
    """
    # Hydra is slow to import, and `burst data --help` does not need it.
    from burst_cli.compose import compose

    config = compose(overrides or [], config_dir or []).config
    start_s = time.monotonic()
    with show_progress(render.stderr()) as progress:
        prepared = prepare(config.data, progress=progress)
    elapsed_s = time.monotonic() - start_s
    classes: list[LengthClass] = []
    if config.data.length_buckets:
        classes = length_classes(Samples(prepared.train, config.train.seq_len, config.seed), config.data)
    lengths = _describe_classes(classes, config.train.seq_len)
    if as_json:
        facts = {"format": config.data.format, "length_classes": lengths or None, "elapsed_s": elapsed_s}
        render.emit_json(describe(prepared) | facts)
    else:
        _print_table(describe(prepared), elapsed_s)
        path = config.data.tokenizer_path
        if path is not None and (note := version_note(open_tokenizer(path.absolute()))) is not None:
            render.say(render.stderr(), f"{path}: {note}")
        if classes:
            _print_classes([one.name for one in classes], lengths, config.train.seq_len)
    for one in classes:
        if one.weight > 0 and not one.samples.size:
            text = f"no sample is of documents of {one.name} tokens, but data.length_weights gives them {one.weight:g}"
            render.say(render.stderr(), render.told("warning", f"{text}; a launch refuses that"))


@app.command("show")
def show_data(
    overrides: OverridesArgument = None,
    config_dir: ConfigDirOption = None,
    step: Annotated[int, typer.Option(min=1, help="Optimizer step whose samples are shown, from 1.")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="How many samples, from the first of the step on.")] = 2,
    split: Annotated[Literal["train", "validation"], typer.Option(help="Which samples.")] = "train",
    tokens: Annotated[bool, typer.Option("--tokens", help="One row per token: position, id, label, text.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Long samples whole, not only around labels.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show samples exactly as training takes them, with what is learned.

    Composes the same configuration as `burst launch` and prepares its data if needed. Learned tokens are coloured, or
    stand in [[ ]] where there are no colours; all others are read and have no label.
    """
    from burst_cli.compose import compose
    from burst_cli.data.show import Shown, describe_samples, print_legend, print_sample, print_tokens

    config = compose(overrides or [], config_dir or []).config
    with show_progress(render.stderr()) as progress:
        prepare(config.data, progress=progress)
    data = open_training_data(config.data)
    if split == "train":
        views = training_views(data, config, step - 1, samples)
    else:
        views = validation_views(data.main, config, samples)
    try:
        tokenizer = data.main.load_tokenizer()
    except DataError:  # of shards that came without one: ids are shown in the place of text
        tokenizer = None
    if as_json:
        facts = {"path": data.main.path, "split": split, "step": step if split == "train" else None}
        about = {"seq_len": config.train.seq_len, "samples_per_step": samples_per_step(config)}
        render.emit_json(facts | about | describe_samples(views, tokenizer))
        return
    console = render.stdout()
    how = Shown.on(console, tokenizer, is_full=full)
    for view in views:
        (print_tokens if tokens else print_sample)(console, view, how)
    print_legend(console, views, how)
    for text in warnings_of(views):
        render.say(render.stderr(), render.told("warning", text))


def describe(prepared: PreparedData) -> dict[str, Any]:
    """The prepared data as plain values; null where shards made elsewhere do not tell."""
    manifest = prepared.train.manifest
    return {
        "path": prepared.path,
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "content_hash": prepared.content_hash,
        "source": manifest.source,
        "skipped_rows": skipped_rows(prepared.path),
        "splits": {"train": _describe_split(prepared.train), "validation": _describe_split(prepared.validation)},
    }


def _describe_split(shards: TokenShards) -> dict[str, Any]:
    size, tokens = shards.text_bytes, shards.token_count
    return {
        "documents": shards.document_count,
        "text_bytes": size,
        "tokens": tokens,
        "bytes_per_token": None if size is None else size / tokens,
        "shards": len(shards.manifest.files),
    }


def _print_table(document: dict[str, Any], elapsed_s: float) -> None:
    rows = [
        (
            name,
            DASH if split["documents"] is None else f"{split['documents']:,}",
            binary_bytes(split["text_bytes"]),
            f"{split['tokens']:,}",
            plain(split["bytes_per_token"], 2),
            str(split["shards"]),
        )
        for name, split in document["splits"].items()
    ]
    headings = ("split", "documents", "text", "tokens", "bytes per token", "shards")
    facts = [
        f"source     {document['source'] or 'not recorded'}",
        f"tokenizer  {document['tokenizer'] or 'not recorded'}, vocabulary of {document['vocab_size']:,}",
        f"folder     {document['path']}",
        f"ready in   {seconds(elapsed_s)}",
    ]
    if (skipped := document["skipped_rows"]) is not None:
        facts.append(f"bad rows   {skipped['count']:,} left out (data.on_bad_row=skip)")
        facts += [f"  - {problem}" for problem in skipped["first"][:_BAD_ROWS_SHOWN]]
        if skipped["count"] > _BAD_ROWS_SHOWN:
            facts.append(f"  and {skipped['count'] - _BAD_ROWS_SHOWN:,} more; prepared.json has the first")
    render.say(render.stdout(), listing(headings, rows, headings[1:]), *facts)


def _describe_classes(classes: Sequence[LengthClass], seq_len: int) -> list[dict[str, Any]]:
    total = sum(one.samples.size for one in classes)
    described = []
    for one in classes:
        size, edges = one.samples.size, {"at_least": one.at_least, "below": one.below}
        counted = {"samples": size, "tokens": size * seq_len, "share": size / total, "weight": one.weight}
        described.append(edges | counted)
    return described


def _print_classes(names: Sequence[str], classes: Sequence[dict[str, Any]], seq_len: int) -> None:
    """How many samples each length of document has, and how much more often they are seen than without weights."""
    headings = ("tokens of a document", "samples", "tokens", "share", "weight", "seen")
    rows = []
    for name, one in zip(names, classes, strict=True):
        seen = f"x {one['weight'] / one['share']:.3g}" if one["samples"] else DASH
        counts = (f"{one['samples']:,}", f"{one['tokens']:,}", percent(one["share"]), percent(one["weight"]))
        rows.append((name, *counts, seen))
    title = f"\nsamples of {seq_len:,} training tokens, by the document that has most of each"
    render.say(render.stdout(), title, listing(headings, rows, headings[1:]))

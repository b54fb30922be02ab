"""`burst model`: a folder of Hugging Face as the section `model` of a configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
import yaml

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.model_source import open_source
from burst_cli.options import JsonOption
from burst_cli.overrides import user_conf_dir
from engine.config.errors import ConfigError, RunError
from engine.config.settings import Implementation
from engine.runs.files import replace_file

app = new_verb()
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@app.command()
def model(
    folder: Annotated[Path, typer.Argument(help="A folder with config.json and, to begin with them, *.safetensors.")],
    save: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help="Write it, so that model=NAME is this model.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what --save NAME has written before.")] = False,
    implementation: Annotated[
        Implementation | None,
        typer.Option(
            help="burst: the decoder of this engine; hf: transformers' own code. Default: burst for the families that "
            "it has, else hf."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model of Hugging Face as a configuration to train it with.

    Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3 have a decoder of this engine; every
    other family of decoders runs by transformers' own code. The weights are looked
    for, not read; without them the shape is shown all the same.

    \b
    burst model ~/models/Llama-3.1-8B --save mine     # writes ~/.config/burst/conf/model/mine.yaml
    burst launch exp=llama8b_1m model=mine data.tokenizer=$HOME/models/Llama-3.1-8B
    burst launch exp=small --from ~/models/Llama-3.1-8B      # all of it in one word

    Exit codes: 0 done, 1 the file cannot be written, 2 the folder holds no model that can be trained, or --save would
    replace a file.
    """
    if save is not None and not _NAME.fullmatch(save):
        raise typer.BadParameter(f"{save!r}: expected letters, digits, '.', '_' and '-'", param_hint="--save")
    source = open_source(folder, implementation)
    text = yaml.safe_dump(source.settings, sort_keys=False, allow_unicode=True)
    render.show(source.to_dict(), text.rstrip(), as_json=as_json)
    if save is not None:
        place = write_option(save, source.option, force=force)
        render.say(render.stderr(), f"written to {place}: use it as model={save}")
    if not as_json:
        render.say(render.stderr(), *source.notes)


def write_option(name: str, text: str, *, force: bool) -> Path:
    """Write `text` as the option `name` of the group model; its path.

    Raises ConfigError when the file exists and not `force`, RunError when it cannot be written.
    """
    place = user_conf_dir() / "model" / f"{name}.yaml"
    if place.exists() and not force:
        raise ConfigError(f"{place} exists; give another name, or --force to replace it")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, text)
    except OSError as error:
        raise RunError(f"cannot write {place}: {error.strerror or error}") from error
    return place

"""`burst model`: a folder of Hugging Face as the section `model` of a configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import JsonOption
from burst_cli.overrides import user_conf_dir
from engine.config.errors import ConfigError, DataError, RunError
from engine.config.schema import to_plain
from engine.config.settings import ModelConfig
from engine.data.chat import folder_template
from engine.data.tokenizers import tokenizer_of
from engine.pretrained.folder import TokenizerFiles, find_tokenizer
from engine.pretrained.names import INDEX_FILE, SINGLE_FILE, weight_files
from engine.pretrained.resolve import version_note
from engine.pretrained.decoder_shape import Pretrained
from engine.pretrained.shape import read_pretrained
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
    as_json: JsonOption = False,
) -> None:
    """Show a model of Hugging Face as a configuration to train it with.

    Families: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3. The weights are looked for, not read; without them the shape
    is shown all the same.

    \b
    burst model ~/models/Llama-3.1-8B --save mine     # writes ~/.config/burst/conf/model/mine.yaml
    burst launch exp=llama8b_1m model=mine data.tokenizer=$HOME/models/Llama-3.1-8B

    Exit codes: 0 done, 1 the file cannot be written, 2 the folder holds no model that this engine has, or --save would
    replace a file.
    """
    if save is not None and not _NAME.fullmatch(save):
        raise typer.BadParameter(f"{save!r}: expected letters, digits, '.', '_' and '-'", param_hint="--save")
    found = describe(folder)
    text = yaml.safe_dump(found["model"], sort_keys=False, allow_unicode=True)
    render.show(found, text.rstrip(), as_json=as_json)
    if save is not None:
        place = write_option(save, f"# {found['folder']}\n{text}", force=force)
        render.say(render.stderr(), f"written to {place}: use it as model={save}")
    if not as_json:
        render.say(render.stderr(), *found["notes"])


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


def describe(folder: Path) -> dict[str, Any]:
    """{folder, model, window_tokens, seq_len, notes}; model: the settings of that section that are not the default.

    Weights are named only where there are some. Raises ConfigError when the folder holds no model that this engine has,
    or weights, a tokenizer or a chat template that cannot be read.
    """
    folder = folder.expanduser().absolute()
    pretrained = read_pretrained(folder)
    tokenizer = _checked_tokenizer(folder)
    has_weights = any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    if has_weights:
        weight_files(folder)
    plain, default = to_plain(pretrained.model), to_plain(ModelConfig())
    assert isinstance(plain, dict)
    assert isinstance(default, dict)
    shape = ("name", "vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads")
    shown = {name: plain[name] for name in plain if name in (*shape, "head_dim") or plain[name] != default[name]}
    return {
        "folder": str(folder),
        "model": {**shown, **({"init_from": str(folder)} if has_weights else {})},
        "window_tokens": pretrained.window_tokens,
        "seq_len": pretrained.seq_len,
        "notes": [*_notes(folder, pretrained, tokenizer), *([] if has_weights else [_no_weights(folder)])],
    }


def _no_weights(folder: Path) -> str:
    return (
        f"no weights to begin with: {folder} has no {SINGLE_FILE} or {INDEX_FILE} (pickled weights are not read), "
        "so a run would start from random ones"
    )


def _checked_tokenizer(folder: Path) -> TokenizerFiles | None:
    """The files of the folder's tokenizer; None where it has none.

    Raises ConfigError for a tokenizer.json that cannot be loaded and for a chat template that is not valid Jinja.
    """
    try:
        files = find_tokenizer(folder)
        if files is None:
            return None
        if files.file.is_file():  # others are converted by transformers, which need not be installed here
            tokenizer_of(files, str(folder))
        if (template := folder_template(files)) is not None:
            template.check_syntax()
    except DataError as error:
        raise ConfigError(str(error)) from error
    return files


def _notes(folder: Path, pretrained: Pretrained, tokenizer: TokenizerFiles | None) -> list[str]:
    notes = []
    notes.append(
        "it has no tokenizer, so data.tokenizer is not compared with it"
        if tokenizer is None
        else f"its tokenizer: data.tokenizer={folder}"
    )
    if tokenizer is not None and (note := version_note(tokenizer)) is not None:
        notes.append(note)
    if pretrained.window_tokens is not None:
        notes.append(f"its window: attention.mask=window attention.window_tokens={pretrained.window_tokens}")
    notes.append(
        f"trained on {pretrained.seq_len:,} tokens; for longer sequences stretch RoPE, as with "
        f"model.rope_scaling.kind=yarn model.rope_scaling.factor=4 "
        f"model.rope_scaling.original_seq_len={pretrained.seq_len}"
    )
    return notes

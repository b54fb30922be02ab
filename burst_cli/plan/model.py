"""`burst model`: a folder of Hugging Face as the section `model` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import JsonOption
from burst_cli.outputs import write_output
from engine.config.errors import ConfigError
from engine.config.schema import to_plain
from engine.config.settings import ModelConfig
from engine.pretrained.names import weight_files
from engine.pretrained.shape import Pretrained, read_pretrained

app = new_verb()


@app.command()
def model(
    folder: Annotated[Path, typer.Argument(help="A folder with config.json and *.safetensors.")],
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="FILE", help="Write it to this new file, as ~/.config/burst/conf/model/NAME.yaml."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model of Hugging Face as a configuration to train it with.

    Families: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3. The weights are looked for, not read.

    \b
    burst model ~/models/Llama-3.1-8B --write ~/.config/burst/conf/model/mine.yaml
    burst launch exp=llama8b_1m model=mine data.tokenizer=$HOME/models/Llama-3.1-8B/tokenizer.json

    Exit codes: 0 done, 2 the folder holds no model that this engine has, or the file cannot be written.
    """
    found = describe(folder)
    if write is not None:
        write_yaml(found, write)
    if as_json:
        render.emit_json(found.to_dict())
        return
    render.stdout().print(yaml_text(found), markup=False, highlight=False, soft_wrap=True, end="")
    for note in found.notes:
        render.stderr().print(note, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class FoundModel:
    """A model in a folder: the settings of `model` that are not the default, and what else to know."""

    folder: Path
    pretrained: Pretrained
    settings: dict[str, Any]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "folder": str(self.folder),
            "model": self.settings,
            "window_tokens": self.pretrained.window_tokens,
            "seq_len": self.pretrained.seq_len,
            "notes": list(self.notes),
        }


def describe(folder: Path) -> FoundModel:
    """What lies in `folder`. Raises ConfigError when that is no model that this engine has, or has no weights."""
    folder = folder.expanduser().absolute()
    pretrained = read_pretrained(folder)
    weight_files(folder)
    plain, default = to_plain(pretrained.model), to_plain(ModelConfig())
    assert isinstance(plain, dict)
    assert isinstance(default, dict)
    shape = ("name", "vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads")
    kept = {
        item.name: plain[item.name]
        for item in fields(ModelConfig)
        if item.name in (*shape, "head_dim") or plain[item.name] != default[item.name]
    }
    return FoundModel(folder, pretrained, {**kept, "init_from": str(folder)}, tuple(_notes(folder, pretrained)))


def yaml_text(found: FoundModel) -> str:
    """The file conf/model/NAME.yaml."""
    text: str = yaml.safe_dump(found.settings, sort_keys=False)
    return text


def write_yaml(found: FoundModel, path: Path) -> None:
    """Writes a new file. Raises ConfigError when it exists."""
    if path.exists():
        raise ConfigError(f"{path} exists; name another file or remove it")
    write_output("--write", path, yaml_text(found))


def _notes(folder: Path, pretrained: Pretrained) -> list[str]:
    notes = []
    if (folder / "tokenizer.json").is_file():
        notes.append(f"its tokenizer: data.tokenizer={folder / 'tokenizer.json'}")
    if pretrained.window_tokens is not None:
        notes.append(f"its window: attention.mask=window attention.window_tokens={pretrained.window_tokens}")
    if pretrained.seq_len is not None:
        notes.append(
            f"trained on {pretrained.seq_len:,} tokens; for longer sequences stretch RoPE, as with "
            f"model.rope_scaling.kind=yarn model.rope_scaling.factor=4 "
            f"model.rope_scaling.original_seq_len={pretrained.seq_len}"
        )
    return notes

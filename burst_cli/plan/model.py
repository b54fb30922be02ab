"""`burst model`: a folder of Hugging Face as the section `model` of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import JsonOption
from engine.config.schema import to_plain
from engine.config.settings import ModelConfig
from engine.pretrained.names import weight_files
from engine.pretrained.shape import Pretrained, read_pretrained

app = new_verb()


@app.command()
def model(
    folder: Annotated[Path, typer.Argument(help="A folder with config.json and *.safetensors.")],
    as_json: JsonOption = False,
) -> None:
    """Show a model of Hugging Face as a configuration to train it with.

    Families: Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3. The weights are looked for, not read.

    \b
    burst model ~/models/Llama-3.1-8B > ~/.config/burst/conf/model/mine.yaml
    burst launch exp=llama8b_1m model=mine data.tokenizer=$HOME/models/Llama-3.1-8B/tokenizer.json

    Exit codes: 0 done, 2 the folder holds no model that this engine has.
    """
    found = describe(folder)
    render.show(found, yaml.safe_dump(found["model"], sort_keys=False).rstrip(), as_json=as_json)
    if not as_json:
        render.say(render.stderr(), *found["notes"])


def describe(folder: Path) -> dict[str, Any]:
    """{folder, model, window_tokens, seq_len, notes}; model: the settings of that section that are not the default.

    Raises ConfigError when the folder holds no model that this engine has, or no weights.
    """
    folder = folder.expanduser().absolute()
    pretrained = read_pretrained(folder)
    weight_files(folder)
    plain, default = to_plain(pretrained.model), to_plain(ModelConfig())
    assert isinstance(plain, dict)
    assert isinstance(default, dict)
    shape = ("name", "vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads")
    kept = {name: plain[name] for name in plain if name in (*shape, "head_dim") or plain[name] != default[name]}
    return {
        "folder": str(folder),
        "model": {**kept, "init_from": str(folder)},
        "window_tokens": pretrained.window_tokens,
        "seq_len": pretrained.seq_len,
        "notes": _notes(folder, pretrained),
    }


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

"""`burst model`: a folder of Hugging Face as a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.options import JsonOption

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
    from burst_cli import render
    from burst_cli.plan.model_view import describe, write_yaml, yaml_text

    found = describe(folder)
    if write is not None:
        write_yaml(found, write)
    if as_json:
        render.emit_json(found.to_dict())
        return
    render.stdout().print(yaml_text(found), markup=False, highlight=False, soft_wrap=True, end="")
    for note in found.notes:
        render.stderr().print(note, markup=False, highlight=False, soft_wrap=True)

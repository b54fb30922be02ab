"""What a testbed is made of, as templates: NAME.j2 here, or beside the code of the fake hardware."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


def render(name: str, **values: Any) -> str:
    """The text of a template. What is filled in are names, numbers and paths of ours, all checked."""
    return _templates().get_template(f"{name}.j2").render(**values)


@functools.cache
def _templates() -> jinja2.Environment:
    import jinja2  # not where tests run with nothing but the engine's packages

    here = Path(__file__).parent
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([here, here.with_name("hardware")]),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )

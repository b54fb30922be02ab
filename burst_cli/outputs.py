"""Files that --output, --picture and the like name: refused before the work begins, or there as a whole at its end."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.errors import BurstError, ConfigError
from engine.runs.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".svg", ".png")


def check_output(option: str, path: Path | None, *ends: str) -> None:
    """Raise ConfigError for a file that could not be written; `ends`: of its name. Missing folders will be made."""
    if path is None:
        return
    if ends and path.suffix.lower() not in ends:
        raise ConfigError(f"{option}: got {str(path)!r}; expected the name of a file that ends in {' or '.join(ends)}")
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; give the name of a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option}: {path} is a device or a pipe; give the name of a file")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(f"{option}: {path}: {above} is no folder")
    if ends and set(ends) <= set(PICTURES) and not has_matplotlib():
        raise ConfigError(f"{option} needs matplotlib, which is not installed: pip install 'burst-train[picture]'")


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """Replace `path` atomically, its folders made. Raises BurstError that names the file."""
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        replace_file(path.absolute(), content, is_shared=True)
    except OSError as error:
        raise BurstError(f"{option}: cannot write {path}: {error.strerror}") from error


def write_figure(option: str, path: Path, figure: Figure) -> None:
    """`figure` as `path`, in the format that its name ends in; text as text, the same bytes for the same picture."""
    import matplotlib as mpl

    stream, form = io.BytesIO(), path.suffix[1:].lower()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "burst"}):
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(stream, format=form, dpi=150, metadata=metadata)
    write_output(option, path, stream.getvalue())

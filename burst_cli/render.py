"""What people and programs read: figures in words (12.3K tokens/s, 1.5 GiB, 0:42; a dash is not known),
consoles, tables, the one JSON document of --json, and errors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.terminal import can_write
from cluster.remote_text import clean_text
from engine.config.errors import BurstError, ConfigError
from engine.runs.figures import DASH
from engine.runs.files import json_text

K = TypeVar("K")
V = TypeVar("V")
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as bars, low to high, at most `width` characters; each bar is the mean of its share of the values."""
    if not values:
        return ""
    size = min(width, len(values))
    edges = [index * len(values) // size for index in range(size + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def clean(text: str) -> str:
    """`text` without terminal escapes and control characters (output of ranks may hold any bytes)."""
    return clean_text(text.replace("\t", "    "))


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of every key, both in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def fold_numbers(numbers: Iterable[int]) -> str:
    """0,3-5 for 0 3 4 5."""
    from ClusterShell.RangeSet import RangeSet

    return str(RangeSet.fromlist(map(str, numbers)))


def fold_names(names: Sequence[str]) -> str:
    """tb[1-4] for tb1 tb2 tb3 tb4; names that are no node names are listed."""
    unique = list(dict.fromkeys(names))
    if len(unique) < 2:
        return "".join(unique)
    from cluster.ssh.hosts import fold_nodes

    try:
        return fold_nodes(unique)
    except Exception:  # the library has no common error for names that it does not understand
        return ",".join(unique)


# --- consoles, tables, errors -----------------------------------------------------------------------------------------


# Nobody reads a pipe through a window 80 columns wide: tables keep their cells whole there.
PIPE_WIDTH = 320
# Below this rich prints nothing at all; COLUMNS=0 means that somebody did not know.
LEAST_WIDTH = 20
_PADDING = 1
_PIPED_READING_WIDTH = 160
_LEAST_WITH_NOTES = 60  # columns of a terminal; on narrower ones notes get what is left
# What could once be typed, and what to do in its place.
REMOVED = {
    "burst config --search-path": "--config-dir comes first, then ~/.config/burst/conf, then the files of burst",
    "burst plan --all": "attention=auto --details puts all methods side by side, and says why one is not legal",
    "burst plan --compare": "attention=auto --details puts all methods side by side; attention=NAME plans one",
    "burst plan --pass": "the picture has all passes",
    "burst plan --with": "cluster.machine.name=NAME 'cluster.machine.rates=[\"FIELD=NUMBER\"]' changes a device",
    "burst plan --machine": "--device NAME predicts seconds, too",
    "burst check-nodes --bandwidth": "--collectives measures what training does, through a launch",
    "burst image build --wheels": "put the wheels into docker/wheels of the checkout",
    "burst image build --base": "`burst image build -- --build-arg BASE=NAME:TAG` tells the engine",
    "burst image build --apt-packages": "`burst image build -- --build-arg APT_PACKAGES='NAME NAME'` tells the engine",
    "burst image build --network": "`burst image build -- --network NAME` tells the engine",
    "burst image build --no-cache": "`burst image build -- --no-cache` tells the engine",
    "burst image push --via-shared": "from three nodes on they feed each other; leave it out",
    "burst image push --route": "from three nodes on they feed each other; leave it out",
    "burst image prune": "`docker image rm NAME:TAG` on a node; `docker image ls -f label=org.burst.image=1` lists all",
    "burst check-nodes --cuda-smoke": "--collectives uses every GPU by ranks as a launch starts them, in the image",
    "burst check-nodes --watch": "`watch -n 60 burst check-nodes ...` repeats it",
    "burst check-nodes --expand": "`nodeset --expand`, which came with burst, splits what --list prints",
    "burst env write": "`burst env show --node NODE --format dotenv` prints what belongs into a file",
    "burst logs --raw": "the files in RUN/logs are the bytes as they came",
    "burst logs --since": "--tail and --grep choose lines",
    "burst report --baseline": "--compare A B tells how much two runs differ; --output FILE.csv has what ratios need",
    "burst report --by": "--compare A B takes two runs, or the newest of two experiments",
    "burst report --columns": "--output FILE.html has all columns, FILE.csv and --json every figure",
    "burst report --exp": "write the experiments after `burst report`",
    "burst report --fail-above": "`jq -e '.runs[0].step_time_s < 2'` behind `burst report RUN --json` exits with 1",
    "burst report --fail-below": "`jq -e '.runs[0].mfu > 0.4'` behind `burst report RUN --json` exits with 1",
    "burst report --force": "remove the file, or give --output another name",
    "burst report --format": "--output FILE.html or FILE.csv, and --json; other tools make other tables of these",
    "burst report --limit": "name the runs, or take --latest; `burst runs --limit 10` lists the newest",
    "burst report --published": "benchmarks/published holds the figures of others, with what to bear in mind",
    "burst report --png": "the page of --output report.html has the plots; a browser prints them",
    "burst report --since": "name the runs: ids begin with their date",
    "burst report --sort": "--output FILE.csv and --json have every figure, for any tool that sorts",
    "burst report --status": "`burst runs --state` lists them; --output FILE.csv and --json have the status of each",
    "burst sweep --price": "the device hours that it says, times the price; `burst plan --price` tells of one run",
    "burst model --write": "send what `burst model FOLDER` prints into a file",
    "burst bench exchange": "`burst bench attention` tells what communication adds and moves",
    "burst bench attention --output": "`--json > FILE.json` writes the results",
    "burst bench attention --plot": "`--json > FILE.json` has the figures for any tool that plots",
    "burst bench loss": "`make gpu` measures the loss, `burst plan` predicts its time and memory",
}


class _PipeConsole(Console):
    """A console whose reader may leave. rich would end the program as failed, whatever it is doing."""

    def on_broken_pipe(self) -> None:
        """Be silent from now on. Who prints results has no more to do; what is told of work does not stop the work."""
        self.quiet = True
        if not self.stderr:
            raise BrokenPipeError
        handle_broken_pipe(self.file)


def handle_broken_pipe(stream: IO[str]) -> None:
    """Let what is still written to `stream` go nowhere, so that the interpreter does not complain when it ends."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(descriptor, stream.fileno())
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """What is printed on stdout in this block is lost when its reader has left, and nothing else happens."""
    try:
        yield
    except BrokenPipeError:
        handle_broken_pipe(sys.stdout)


def stdout() -> Console:
    """A console for results. Prints no markup of its own accord into user text: pass `rich.text.Text` for that."""
    return _console(stderr=False)


def stderr() -> Console:
    """A console for progress, warnings and errors."""
    return _console(stderr=True)


def plain_stderr() -> Console:
    """A console on stderr that never redraws, even on a terminal."""
    return _PipeConsole(stderr=True, force_terminal=False, highlight=False, emoji=False)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) >= LEAST_WIDTH:
        width: int | None = int(columns)
    else:
        width = os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else PIPE_WIDTH
    return _PipeConsole(stderr=stderr, width=width, highlight=False, emoji=False)


def reading_width(console: Console) -> int:
    """Columns for text and tables with many figures: those of a terminal, in a pipe no more than people read."""
    return _PIPED_READING_WIDTH if console.width == PIPE_WIDTH else console.width


def show(document: Mapping[str, Any], *views: RenderableType, as_json: bool) -> None:
    """The result of a verb on stdout: `document` as the one of --json, else `views`, of which a text is no markup."""
    if as_json:
        emit_json(document)
    else:
        say(stdout(), *views)


def say(console: Console, *views: RenderableType) -> None:
    """Print `views` one below the other: texts as they are, whole lines; tables as wide as there is room."""
    for view in views:
        text = Text(view) if isinstance(view, str) else view
        console.print(text, soft_wrap=isinstance(text, Text))


def told(kind: Literal["error", "warning", "note"], text: str) -> Text:
    """`warning: text`."""
    return Text.assemble((f"{kind}: ", "bold red" if kind == "error" else "yellow"), text)


def emit_json(document: Mapping[str, Any]) -> None:
    """Print the one JSON document of this call on stdout; paths become text, figures that are no number null."""
    text = json_text(document, is_ascii=False)
    # What a terminal would obey, or a file name that is no text: escaped, it can be written and read back.
    is_plain = text.isascii() or (text.replace("\n", "").isprintable() and can_write(sys.stdout, text))
    text = text if is_plain else json_text(document)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BurstError(f"cannot write the result to standard output: {error.strerror}") from error


def fail(error: BaseException, *, as_json: bool = False, debug: bool = False) -> int:
    """The exit code that this error deserves, after saying on stderr (and, with `as_json`, on stdout) what is wrong.

    2 for mistakes in usage or configuration, else 1; an error of ours says its own.
    """
    code = getattr(error, "exit_code", 1)
    code = code if isinstance(code, int) else 1
    problems = _problems(error)
    many = len(problems) > 1
    console = stderr()
    if debug:
        console.print(Text("".join(traceback.format_exception(error)).rstrip(), style="dim"))
    title = f"{len(problems)} problems in the configuration" if many else problems[0]
    console.print(told("error", title))
    for line in problems if many else ():
        console.print(Text.assemble(("  • ", "red"), line))
    if as_json:
        with contextlib.suppress(BurstError):  # what could not be written before cannot be written now
            emit_json(
                {"error": {"type": type(error).__name__, "message": title, "problems": problems, "exit_code": code}}
            )
    return code


def _problems(error: BaseException) -> list[str]:
    """Every mistake in words, at least one."""
    if isinstance(error, ConfigError) and error.problems:
        return list(error.problems)
    if isinstance(error, BurstError):
        return [str(error)]
    if hasattr(error, "format_message"):
        return [_usage_text(error)]
    if isinstance(error, OSError) and error.filename is not None:
        return [f"{error.filename}: {error.strerror or error}. Check that it exists and that you may use it."]
    if isinstance(error, OSError) and error.strerror:  # a full disk, while a file is written
        return [f"{error.strerror}. With --debug it is shown where."]
    return [f"{type(error).__name__}: {error} (a bug in burst: run again with --debug and report what it shows)"]


def _usage_text(error: Any) -> str:
    """A mistake on the command line in words, with the command that explains that verb."""
    context = getattr(error, "ctx", None)
    text, verb = str(error.format_message()).rstrip().rstrip("."), context.command_path if context else "burst"
    unknown = re.match(r"No such (?:option|command):? '?([\w-]+)", text)
    gone = f"{verb} {unknown[1]}" if unknown else ""
    return f"{gone} is gone: {REMOVED[gone]}" if gone in REMOVED else f"{text}. See `{verb} --help`."


@dataclass(frozen=True)
class Column:
    """title: in as many lines as it has. rank: who stays on a narrow terminal, lowest first."""

    title: str
    rank: int = 0
    is_number: bool = True


def listing(
    headings: Iterable[str], rows: Iterable[Sequence[str | Text]], numbers: Collection[str] = (), *, ruled: bool = False
) -> Table:
    """All cells of `rows` whole and as they are, never as markup; `numbers`: headings whose columns stand right."""
    table = Table(header_style="bold") if ruled else Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        is_number = heading in numbers
        no_wrap = is_number and not ruled
        # A heading may take several lines, but none of its words does.
        least = max(map(len, heading.split()), default=0)
        table.add_column(
            Text(heading),
            justify="right" if is_number else "left",
            no_wrap=no_wrap,
            overflow="fold",
            min_width=least if ruled else None,
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def styled(cells: Iterable[str], style: str) -> list[Text]:
    """A row of a listing, all of it in this style."""
    return [Text(cell, style) for cell in cells]


def fitting(ranks: Sequence[int], widths: Sequence[int], room: int) -> list[int]:
    """The places of the columns of a table that fit into `room`, those of the lowest ranks; at least one."""
    kept: list[int] = []
    for place in sorted(range(len(ranks)), key=lambda place: ranks[place]):
        if not kept or sum(widths[one] for one in kept) + widths[place] <= room:
            kept.append(place)
    return sorted(kept)


def fitted_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Text]],
    notes: Sequence[Text],
    width: int,
    *,
    notes_room: int | None = None,
    short: Sequence[str] | None = None,
) -> tuple[Table, bool]:
    """(the cells of `rows` that have room, and the note of each row, whether all cells have room as they are).

    Columns that no row fills are left out. notes_room: kept free for notes. short: what stands in the first column
    where not all have room.
    """
    filled = [place for place in range(len(columns)) if any(row[place].plain != DASH for row in rows)]
    columns, rows = [columns[place] for place in filled], [[row[place] for place in filled] for row in rows]
    has_notes = any(notes)
    room = width - (width // 4 if has_notes and width >= _LEAST_WITH_NOTES else 0)
    is_whole = sum(_widths(columns, rows)) <= room
    if short is not None and not is_whole:
        rows = [[Text(name), *row[1:]] for name, row in zip(short, rows, strict=True)]
    if has_notes and notes_room is not None:
        room = width - notes_room
    widths = [min(wide, width // 2) for wide in _widths(columns, rows)]  # names may be as long as one likes
    kept = fitting([column.rank for column in columns], widths, room)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _PADDING, 0, 0))
    if has_notes:  # in a pipe, whose width is not known, lines are no longer than people read
        longest = max(note.cell_len for note in notes)
        longest = min(longest, _PIPED_READING_WIDTH) if width >= PIPE_WIDTH else longest
        table.width = min(width, sum(widths[place] for place in kept) + longest + _PADDING)
    for place in kept:
        justify = "right" if columns[place].is_number else "left"
        table.add_column(columns[place].title, no_wrap=True, justify=justify, max_width=width // 2)  # type: ignore[arg-type]
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1 if has_notes else None)
    for row, note in zip(rows, notes, strict=True):
        table.add_row(*(row[place] for place in kept), note)
    return table, is_whole


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> list[int]:
    return [
        _PADDING + max([*map(len, column.title.split("\n")), *(row[place].cell_len for row in rows)])
        for place, column in enumerate(columns)
    ]

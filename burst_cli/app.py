"""The `burst` command: the table of verbs, and the one place where errors become exit codes.

A verb's module is imported only when that verb runs, so `burst --help` stays fast. To add a verb: write
`burst_cli/NOUN/NAME.py` with `app = new_verb()` and an `@app.command()` in it, and add one line to VERBS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from burst_cli import __version__
from burst_cli.terminal import use_any_encoding

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
C = TypeVar("C", bound=Callable[..., Any])
_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True)
class Verb:
    """One word after `burst`: where its code lives and the line that `burst --help` shows for it."""

    name: str
    module: str
    help: str


VERBS = (
    Verb("launch", "burst_cli.launch.launch", "Train: write the run folder, start the ranks, show progress."),
    Verb("sweep", "burst_cli.sweep.sweep", "Run every combination of listed values, resumable, and fill a table."),
    Verb("runs", "burst_cli.runs.runs", "List runs, newest first: state, speed, MFU, loss, why one failed."),
    Verb("status", "burst_cli.runs.status", "Show how a run is: progress, nodes, what went wrong, what to type."),
    Verb("logs", "burst_cli.logs.logs", "Show what the ranks say; -f follows to the end of the run."),
    Verb("cancel", "burst_cli.runs.cancel", "Stop runs and wait for their end, from any terminal."),
    Verb("resume", "burst_cli.launch.resume", "Take over a run whose launcher is gone, or start its next attempt."),
    Verb("checkpoint", "burst_cli.checkpoint.checkpoint", "List, verify, export and prune checkpoints of a run."),
    Verb("eval", "burst_cli.eval.eval", "Evaluate weights: validation, loss by position, needles by depth."),
    Verb("model", "burst_cli.plan.model", "Show a model of Hugging Face as a configuration to train it with."),
    Verb("plan", "burst_cli.plan.plan", "Show what a configuration will do: bytes, balance, buffers, time."),
    Verb("report", "burst_cli.report.report", "Show runs side by side: speed, MFU, memory, traffic, losses."),
    Verb("bench", "burst_cli.bench.bench", "Measure attention, or this machine for predictions."),
    Verb("config", "burst_cli.config.config", "Show the composed configuration and where each value comes from."),
    Verb("data", "burst_cli.data.data", "Prepare training data, and show samples as training takes them."),
    Verb("check-nodes", "burst_cli.nodes.check_nodes", "Check GPUs, network, disks and software of every node."),
    Verb("env", "burst_cli.nodes.env", "Show or check the NCCL environment of every node, with reasons."),
    Verb("image", "burst_cli.image.image", "Build the container image and bring it to every node over SSH."),
    Verb("hosts", "burst_cli.nodes.hosts", "List the nodes; trust or forget their host keys."),
    Verb("testbed", "burst_cli.nodes.testbed", "A virtual cluster on this machine, to rehearse every verb on."),
)


class _Parts(TyperGroup):
    """What has parts, as `burst` itself has verbs, shows its help when it is typed alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(self.get_help(ctx))
            raise typer.Exit(EXIT_USAGE)
        return super().parse_args(ctx, args)


class _Verbs(_Parts):
    """Lists every verb from VERBS and imports only the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for verb in VERBS:
            self.add_command(TyperCommand(name=verb.name, help=verb.help))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        verb = next((verb for verb in VERBS if verb.name == name), None)
        if verb is None:
            return name, command, rest
        loaded = typer.main.get_command(importlib.import_module(verb.module).app)
        loaded.name, loaded.help = name, loaded.help or verb.help
        _format_help(loaded)
        return name, loaded, rest


class _Context(typer.Context):
    """Of one command: a mistake that does not say on whose line it was found is of this one."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        if getattr(error, "ctx", self) is None:
            error.ctx = self
        return super().__exit__(kind, error, trace)


def _format_help(command: Any) -> None:
    """Lets the terminal, not the source, decide where the lines of a help text end; `\\b` marks what stays as it is.

    Flags lose their type, which would read as if `--json true` could be written, and their opposite, --no-json.
    """
    command.context_class = _Context
    for parameter in command.get_params(typer.Context(command, **_HELP)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar, parameter.secondary_opts = "", []
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(
        text if text.startswith("\b") else re.sub(r"\n(?![\s-])", " ", text) for text in paragraphs
    )
    for part in getattr(command, "commands", {}).values():
        _format_help(part)


app = typer.Typer(
    cls=_Verbs,
    help="Train Llama-style language models on long sequences, on one laptop or a fleet of GPU nodes.",
    epilog="Settings are positional: burst launch exp=tiny train.steps=50   (burst config --fields lists all)",
    context_settings=_HELP,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"burst {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the Python traceback of an error; works after a verb too.")
    ] = False,
) -> None:
    """What may stand before a verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `burst ARGV` (default: this process's arguments), everything printed; never raises for mistakes.

    0 ok, 1 failed, 2 usage or configuration, 3 unknown state, 130 interrupted.
    """
    use_any_encoding()
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug, as_json = "--debug" in flags, "--json" in flags  # one document, also when the verb never gets to run
    arguments = [argument for argument in flags if argument != "--debug"] + arguments[len(flags) :]
    with _watched_reader() as reader_left:
        try:
            code = _run(arguments)
            sys.stdout.flush()
            return code
        except (KeyboardInterrupt, typer.Abort):
            return EXIT_INTERRUPTED
        except Exception as error:
            from burst_cli import render

            if isinstance(error, BrokenPipeError) and reader_left():  # `| head` has read enough
                render.handle_broken_pipe(sys.stdout)
                return 0
            code = render.fail(error, as_json=as_json, debug=debug)
            try:
                sys.stdout.flush()
            except OSError:  # as a full disk; the interpreter would fail at it again, with an exit code of its own
                render.handle_broken_pipe(sys.stdout)
            return code


@contextlib.contextmanager
def _watched_reader() -> Iterator[Callable[[], bool]]:
    """Tells whether stdout is a pipe that nobody reads any more, also once rich has put another file in its place."""
    poll = select.poll()
    own: int | None = None
    with contextlib.suppress(OSError, ValueError):  # no file at all
        own = os.dup(sys.stdout.fileno())
        poll.register(own, 0)
    try:
        yield lambda: any(event & select.POLLERR for _, event in poll.poll(0))
    finally:
        if own is not None:
            os.close(own)


def _run(arguments: list[str]) -> int:
    """The exit code of the verb, or of what a shell asks to complete a line; mistakes come out as exceptions."""
    command: Any = typer.main.get_command(app)
    _format_help(command)

    def run() -> int:
        try:
            code: object = command.main(arguments, prog_name="burst", standalone_mode=False)
        except SystemExit as stop:
            # Typer and rich end like this at any pipe that breaks, without a word.
            raise stop.__context__ if isinstance(stop.__context__, BrokenPipeError) else stop from None
        return code if isinstance(code, int) else 0

    if not os.environ.get("_BURST_COMPLETE"):
        return run()
    from burst_cli.overrides import run_completion

    return run_completion(run)


class _Verb(typer.Typer):
    """Of a command that takes a dataclass, the fields that are options of the command line stand in its place."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[C], C]:
        register = super().command(name, **settings)
        return lambda function: register(_expand_options(function))


def _expand_options(function: C) -> C:
    """`function` with arguments of its own for the fields of the dataclasses that it takes."""
    own = inspect.signature(function, eval_str=True).parameters
    groups = {name: own[name].annotation for name in own if dataclasses.is_dataclass(own[name].annotation)}
    fields = {name: _options(kind) for name, kind in groups.items()}

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        made = {name: kind(**{field: given.pop(field) for field in fields[name]}) for name, kind in groups.items()}
        return function(**made, **given)

    parameters = [one for name, parameter in own.items() for one in fields.get(name, {name: parameter}).values()]
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return cast(C, call)


def _options(kind: type) -> dict[str, inspect.Parameter]:
    kinds, parameters = get_type_hints(kind, include_extras=True), inspect.signature(kind).parameters.items()
    return {
        name: one.replace(annotation=kinds[name]) for name, one in parameters if get_origin(kinds[name]) is Annotated
    }


def new_verb() -> typer.Typer:
    """An empty Typer application with the settings that every verb shares; its module must call it `app`."""
    return _Verb(cls=_Parts, add_completion=False, context_settings=_HELP)

"""`burst plan`: what a configuration will do, before it does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import ConfigDirOption, FromOption, JsonOption, OverridesArgument, from_folder
from burst_cli.outputs import PICTURES, check_output, write_figure
from burst_cli.plan import candidates as planning
from burst_cli.plan.table import answer_view, details_view
from burst_cli.plan.trace import trace_rank, trace_to_dict, trace_view
from engine.config.errors import ConfigError

app = new_verb()

EXIT_DOES_NOT_FIT = 1


def _announce() -> None:
    """A sign of life, in a pipe, too."""
    render.say(render.stderr(), "predicting memory and time; large models take half a minute")


DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="The machine that is planned for: a100, h100, h200, b200, l40s, cpu, ..., or a profile (FILE.json) that "
        "`burst bench machine` measured. h100x8: eight on every node. 24GiB or 80GB: memory alone. Default: as "
        "configured, else this machine.",
    ),
]
MemoryByOption = Annotated[
    Literal["exact", "none"],
    typer.Option(
        "--memory-by",
        help="exact: rehearse a step without data, some seconds; none: leave out, memory=auto then adds no time.",
    ),
]
PriceOption = Annotated[
    float | None, typer.Option("--price", min=0, max=1e9, help="Of one device hour, for the cost of the run.")
]
TraceOption = Annotated[
    int | None,
    typer.Option(
        "--trace",
        metavar="RANK",
        min=0,
        help="Instead of the answer, what this rank of those that share a sequence sends, receives and computes in the "
        "attention of layer 0, step by step.",
    ),
]
DetailsOption = Annotated[
    bool, typer.Option("--details", help="All of it: steps, bytes, buffers, memory by component, what was chosen from.")
]


@app.command()
def plan(
    overrides: OverridesArgument = None,
    folder: FromOption = None,
    config_dir: ConfigDirOption = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Number of ranks, where the configuration does not say it.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Nodes that these ranks lie on, evenly; default: 1.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw the schedule into FILE.svg or FILE.png."),
    ] = None,
    device: DeviceOption = None,
    memory_by: MemoryByOption = "exact",
    price: PriceOption = None,
    trace: TraceOption = None,
    details: DetailsOption = False,
    as_json: JsonOption = False,
) -> int:
    """Tell what a configuration will do without doing it: does it fit, how fast, what it costs, and what would help.

    Nothing is trained and no GPU is needed: a step is rehearsed without values for its memory, and its plans are
    replayed on a model of the machine for its time. Advice is what saves most device seconds per token.

    \b
    burst plan exp=llama8b_1m --ranks 32 --nodes 4 --device h100 --price 2.5
        the answer, in six lines
    burst plan exp=llama8b_1m --ranks 8 --device h200 memory=auto --details
        how it comes about, and the checkpoint policies it was chosen from
    burst plan exp=llama8b_1m --ranks 16 --nodes 2 attention=auto --details
        all methods side by side: seconds, memory, why one is not legal
    burst plan exp=tiny --device cpu --picture plan.svg
        a picture of who computes and sends when
    burst plan exp=tiny attention=burst --ranks 4 --nodes 2 --trace 0
        what rank 0 does, step by step

    In the details attention is shown per layer, of the ranks that share one sequence. Balance is the work of the
    busiest rank over the mean: 1 is perfect. Exposed is the time that communication adds to the computation.

    Exit codes: 0 it fits, 1 it does not, 2 usage or configuration.
    """
    if trace is not None and (picture is not None or details):
        raise ConfigError("--trace prints what one rank does and nothing else; leave out --picture and --details")
    if picture is not None:
        check_output("--picture", picture, *PICTURES)
    device, placed = planning.placement(device, ranks, nodes)
    settings, dirs = from_folder(folder, [*(overrides or []), *placed], config_dir or [])
    console = render.stdout()
    has_memory = memory_by == "exact" and trace is None
    found = planning.plan_one(
        settings, dirs, device=device, has_memory=has_memory, has_presets=details, announce=_announce
    )
    if trace is not None:
        steps = trace_rank(found, trace)
        if as_json:
            render.emit_json(trace_to_dict(found, trace, steps))
        else:
            render.say(console, trace_view(found, trace, steps))
        return 0
    if picture is not None:
        from burst_cli.plan.schedule_picture import schedule_figure

        write_figure("--picture", picture, schedule_figure(found))
    if as_json:
        render.emit_json(found.to_dict(price) | ({"picture": str(picture)} if picture else {}))
        return 0 if found.fits else EXIT_DOES_NOT_FIT
    render.say(console, answer_view(found, price, picture))
    if device is None and planning.assumes_device(found.config):
        words = f"nothing says which GPU: {found.machine.name} is assumed; name yours, or cpu, with --device"
        render.say(render.stderr(), render.told("note", words))
    if details:
        render.say(console, "", details_view(found))
    return 0 if found.fits else EXIT_DOES_NOT_FIT

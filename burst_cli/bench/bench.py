"""`burst bench attention|machine`: measurements on this machine, variants in turn."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import JsonOption
from burst_cli.outputs import check_output, write_output
from engine.bench.ranks import RankProgram, measure_cell
from engine.bench.spec import (
    AttentionCell,
    Backend,
    HeadShape,
    MachineCell,
    RankSetup,
    Rounds,
    check_points,
)
from engine.config.errors import ConfigError
from engine.config.schema import tokens_of
from engine.config.settings import Dtype
from engine.planning.methods.presets import PRESETS

app = new_verb()

_WINDOWS = 400  # that a measurement of the machine consists of
_LISTED = "NAME[:FIELD=VALUE]...,..."


@dataclasses.dataclass(frozen=True)
class RankOptions:
    """What both measurements are told of their ranks and of a layer."""

    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the ranks are taken to lie on.")] = 1
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads; default: as --heads.")] = None
    backend: Annotated[Backend, typer.Option(help="Transport; auto: nccl with GPUs, else gloo.")] = "auto"
    rank_command: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="What starts each rank; {rank}, {node} and {local_rank} are replaced: 'ip netns exec bench{rank}'.",
        ),
    ] = ""

    def shape(self, head_dim: int, dtype: Dtype) -> HeadShape:
        """The heads, of this width."""
        return HeadShape(self.heads, self.kv_heads or self.heads, head_dim, dtype)

    def program(self, module: str) -> RankProgram:
        """What every rank runs. Raises ConfigError."""
        try:
            return RankProgram(module, tuple(shlex.split(self.rank_command)))
        except ValueError as error:
            text = f"--rank-command: got {self.rank_command!r}, which is no command line: {error}"
            raise ConfigError(text) from None


@app.callback()
def _bench() -> None:
    """Measure attention, or this machine for predictions.

    Variants take turns in every round, the slowest rank's time counts, and only ratios within one table mean
    something on a shared machine. Exit codes: 0 ok, 1 a rank failed, 2 usage, 130 interrupted.
    """


@app.command()
def attention(
    *,
    presets: Annotated[
        str | None,
        typer.Option(
            metavar=_LISTED,
            help="Presets with fields of the group attention that differ, e.g. ring,burst:backward_circulates=q; "
            "default: every preset that is legal here.",
        ),
    ] = None,
    masks: Annotated[
        str,
        typer.Option(
            metavar=_LISTED,
            help="Masks with fields of the group attention, e.g. causal,full,window:window_tokens=1024.",
        ),
    ] = "causal",
    seq_lens: Annotated[str, typer.Option(metavar="N,...", help="Lengths of the sequence in tokens.")] = "4096",
    ranks: Annotated[int, typer.Option(min=1, help="Processes that share the sequence.")] = 4,
    options: RankOptions,
    head_dim: Annotated[int, typer.Option(min=2, help="Width of a head.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the inputs.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=1, help="Measured calls of each variant.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Calls of each variant before that.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of a rank.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Seconds of attention forward and backward by preset, what communication adds, and bytes sent.

    exposed is the time minus that of the same plan with a transport that moves nothing, where that was faster.
    """
    from burst_cli.bench.view import bench_view

    variants = tuple(PRESETS if presets is None else _words(presets, "--presets"))
    mask_list = _words(masks, "--masks")
    setup, rounds = RankSetup(ranks, options.nodes, threads, options.backend), Rounds(repeats, warmup)
    shape = options.shape(head_dim, dtype)
    check_points(variants, mask_list)
    cells = [
        AttentionCell(variants, mask, length, setup, shape, rounds)
        for mask in mask_list
        for length in _numbers(seq_lens, "--seq-lens")
    ]
    document = _measure_attention(cells, options.program("engine.bench.attention"))
    render.show(document, bench_view(document), as_json=as_json)


@app.command()
def machine(
    *,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks, as many as will train; default: one per GPU, else 4.")
    ] = None,
    options: RankOptions,
    head_dim: Annotated[int, typer.Option(min=2, help="Width of a head.")] = 128,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Number format of training; default: bfloat16 on GPUs, else float32.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of a rank; default: its share of the cores.")
    ] = None,
    for_seconds: Annotated[
        float,
        typer.Option("--seconds", min=0.1, max=3600, help="About how long to measure; a loaded machine takes longer."),
    ] = 30.0,
    output: Annotated[Path, typer.Option(metavar="FILE.json", help="The profile; an earlier one is replaced.")] = Path(
        "machine.json"
    ),
    as_json: JsonOption = False,
) -> None:
    """Measure this machine in about half a minute, so that predictions are of it: rates of products, attention tiles,
    a layer and the optimizer, links between ranks and to host memory, and what the host adds to every step.

    \b
    burst bench machine --ranks 4
        writes machine.json
    burst plan exp=tiny --device machine.json
        seconds per step here, from these figures
    burst launch exp=tiny cluster.machine.name=machine.json
        trains, and keeps the prediction for `burst report`

    Run it on a quiet machine, with as many ranks as will train: what ranks
    share (cores, memory, links) each has a part of in both. A plan for other
    numbers of ranks shares the cores out anew.
    """
    from burst_cli.bench.view import machine_view
    from engine.predict.memory import read_nvidia_smi

    check_output("--output", output, ".json")
    gpus = 0 if options.backend == "gloo" else len(read_nvidia_smi())
    chosen = ranks or gpus or 4
    on_cpu = chosen > gpus
    cores = max(1, len(os.sched_getaffinity(0)) * options.nodes // chosen)
    setup = RankSetup(chosen, options.nodes, threads or cores, "gloo" if on_cpu else options.backend)
    shape = options.shape(head_dim, dtype or ("float32" if on_cpu else "bfloat16"))
    program, cell = options.program("engine.bench.machine"), MachineCell(setup, shape, for_seconds / _WINDOWS)
    cell.run_config(1)  # what is wrong is said before ranks are there to say it
    with render.stderr().status(f"machine: {chosen} ranks measure it, for about {for_seconds:.0f} s"):
        document = measure_cell(cell, program)
    write_output("--output", output, json.dumps(document, indent=2) + "\n")
    render.show(document, machine_view(document), as_json=as_json)
    render.say(render.stderr(), Text(f"written: {output}; use it with --device {output}", style="dim"))


def _measure_attention(cells: list[AttentionCell], program: RankProgram) -> dict[str, Any]:
    """The document of all cells, measured one after the other; progress on stderr."""
    first = cells[0]
    settings = {name: value for one in (first.setup, first.shape, first.rounds) for name, value in vars(one).items()}
    load = round(os.getloadavg()[0], 2)  # before our own ranks add to it
    environment: dict[str, Any] = {"command": shlex.join(["burst", *sys.argv[1:]]), "load": load}
    results, skipped = list[Any](), list[dict[str, Any]]()
    for cell in cells:
        legal, reasons = cell.legal_variants()
        if legal:
            text = f"{cell.mask}, {cell.seq_len:,} tokens: {len(legal)} variants on {cell.setup.ranks} ranks"
            render.say(render.stderr(), Text(text, style="dim"))
            result = measure_cell(dataclasses.replace(cell, variants=legal), program)
            environment = result["environment"] | environment
            results += result["results"]
            reasons |= result["skipped"]
        place = {"mask": cell.mask, "seq_len": cell.seq_len}
        skipped += [{"variant": name, **place, "reason": reason} for name, reason in reasons.items()]
    if not results:
        lines = (f"{entry['variant']}: {entry['reason']}" for entry in skipped)
        raise ConfigError(["bench: no variant is legal here", *dict.fromkeys(lines)])
    found = {"environment": environment, "settings": settings, "results": results, "skipped": skipped}
    return {"benchmark": "attention", **found}


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) != len(words):
        raise ConfigError(f"{option}: got {text!r}; expected different values separated by commas, none of them empty")
    return words


def _numbers(text: str, option: str) -> list[int]:
    words = [str(tokens_of(word)) for word in _words(text, option)]
    if not all(word.isdecimal() and len(word) < 19 and int(word) for word in words):
        raise ConfigError(f"{option}: got {text!r}; expected positive whole numbers, such as 4096,128K")
    return [int(word) for word in words]

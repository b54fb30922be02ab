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

PresetsOption = Annotated[
    str | None,
    typer.Option(
        "--presets",
        metavar="NAME[:FIELD=VALUE]...,...",
        help="Presets with fields of the group attention that differ, e.g. ring,burst:backward_circulates=q; "
        "default: every preset that is legal here.",
    ),
]
MasksOption = Annotated[
    str,
    typer.Option(
        "--masks",
        metavar="NAME[:FIELD=VALUE]...,...",
        help="Masks with fields of the group attention, e.g. causal,full,window:window_tokens=1024.",
    ),
]
SeqLensOption = Annotated[str, typer.Option("--seq-lens", metavar="N,...", help="Lengths of the sequence in tokens.")]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Processes that share the sequence.")]
NodesOption = Annotated[int, typer.Option("--nodes", min=1, help="Nodes that the ranks are taken to lie on.")]
HeadsOption = Annotated[int, typer.Option("--heads", min=1, help="Query heads.")]
KvHeadsOption = Annotated[
    int | None, typer.Option("--kv-heads", min=1, help="Key and value heads; default: as --heads.")
]
HeadDimOption = Annotated[int, typer.Option("--head-dim", min=2, help="Width of a head.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Number format of the inputs.")]
BackendOption = Annotated[Backend, typer.Option("--backend", help="Transport; auto: nccl with GPUs, else gloo.")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Measured calls of each variant.")]
WarmupOption = Annotated[int, typer.Option("--warmup", min=0, help="Calls of each variant before that.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="CPU threads of a rank.")]
RankCommandOption = Annotated[
    str,
    typer.Option(
        "--rank-command",
        metavar="COMMAND",
        help="What starts each rank; {rank}, {node} and {local_rank} are replaced: 'ip netns exec bench{rank}'.",
    ),
]


@app.callback()
def _bench() -> None:
    """Measure attention, or this machine for predictions.

    Variants take turns in every round, the slowest rank's time counts, and only ratios within one table mean
    something on a shared machine. Exit codes: 0 ok, 1 a rank failed, 2 usage, 130 interrupted.
    """


@app.command()
def attention(
    presets: PresetsOption = None,
    masks: MasksOption = "causal",
    seq_lens: SeqLensOption = "4096",
    ranks: RanksOption = 4,
    nodes: NodesOption = 1,
    heads: HeadsOption = 8,
    kv_heads: KvHeadsOption = None,
    head_dim: HeadDimOption = 64,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = "auto",
    repeats: RepeatsOption = 5,
    warmup: WarmupOption = 1,
    threads: ThreadsOption = 1,
    rank_command: RankCommandOption = "",
    as_json: JsonOption = False,
) -> None:
    """Seconds of attention forward and backward by preset, what communication adds, and bytes sent.

    exposed is the time minus that of the same plan with a transport that moves nothing, where that was faster.
    """
    variants = tuple(PRESETS if presets is None else _words(presets, "--presets"))
    mask_list = _words(masks, "--masks")
    setup, rounds = RankSetup(ranks, nodes, threads, backend), Rounds(repeats, warmup)
    shape = HeadShape(heads, kv_heads or heads, head_dim, dtype)
    check_points(variants, mask_list)
    cells = [
        AttentionCell(variants, mask, length, setup, shape, rounds)
        for mask in mask_list
        for length in _numbers(seq_lens, "--seq-lens")
    ]
    document = _measure_attention(cells, _program("engine.bench.attention", rank_command))
    if as_json:
        render.emit_json(document)
    else:
        from burst_cli.bench.view import bench_view

        render.stdout().print(bench_view(document))


_WINDOWS = 400  # that a measurement of the machine consists of


@app.command()
def machine(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks, as many as will train; default: one per GPU, else 4."),
    ] = None,
    nodes: NodesOption = 1,
    heads: HeadsOption = 8,
    kv_heads: KvHeadsOption = None,
    head_dim: HeadDimOption = 128,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Number format of training; default: bfloat16 on GPUs, else float32."),
    ] = None,
    backend: BackendOption = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads of a rank; default: its share of the cores.")
    ] = None,
    rank_command: RankCommandOption = "",
    for_seconds: Annotated[
        float,
        typer.Option("--seconds", min=0.1, max=3600, help="About how long to measure; a loaded machine takes longer."),
    ] = 30.0,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE.json", help="The profile; an earlier one is replaced.")
    ] = Path("machine.json"),
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
    from engine.planning.memory.capacity import read_nvidia_smi

    check_output("--output", output, ".json")
    gpus = 0 if backend == "gloo" else len(read_nvidia_smi())
    chosen = ranks or gpus or 4
    on_cpu = chosen > gpus
    setup = RankSetup(
        chosen,
        nodes,
        threads or max(1, len(os.sched_getaffinity(0)) * nodes // chosen),
        "gloo" if on_cpu else backend,
    )
    shape = HeadShape(heads, kv_heads or heads, head_dim, dtype or ("float32" if on_cpu else "bfloat16"))
    program, cell = _program("engine.bench.machine", rank_command), MachineCell(setup, shape, for_seconds / _WINDOWS)
    cell.run_config(1)  # what is wrong is said before ranks are there to say it
    with render.stderr().status(f"machine: {chosen} ranks measure it, for about {for_seconds:.0f} s"):
        document = measure_cell(cell, program)
    write_output("--output", output, json.dumps(document, indent=2) + "\n")
    if as_json:
        render.emit_json(document)
    else:
        from burst_cli.bench.view import machine_view

        render.stdout().print(machine_view(document))
    render.stderr().print(f"written: {output}; use it with --device {output}", style="dim", markup=False)


def _program(module: str, rank_command: str) -> RankProgram:
    try:
        return RankProgram(module, tuple(shlex.split(rank_command)))
    except ValueError as error:
        raise ConfigError(f"--rank-command: got {rank_command!r}, which is no command line: {error}") from None


def _measure_attention(cells: list[AttentionCell], program: RankProgram) -> dict[str, Any]:
    """The document of all cells, measured one after the other; progress on stderr."""
    first = cells[0]
    settings = {
        **dataclasses.asdict(first.setup),
        **dataclasses.asdict(first.shape),
        **dataclasses.asdict(first.rounds),
    }
    document = _document(settings)
    for cell in cells:
        legal, skipped = cell.legal_variants()
        if legal:
            text = f"{cell.mask}, {cell.seq_len:,} tokens: {len(legal)} variants on {cell.setup.ranks} ranks"
            render.stderr().print(text, style="dim", markup=False)
            result = measure_cell(dataclasses.replace(cell, variants=legal), program)
            document["environment"] = result["environment"] | document["environment"]
            document["results"] += result["results"]
            skipped |= result["skipped"]
        place = {"mask": cell.mask, "seq_len": cell.seq_len}
        document["skipped"] += [{"variant": name, **place, "reason": reason} for name, reason in skipped.items()]
    if not document["results"]:
        lines = (f"{entry['variant']}: {entry['reason']}" for entry in document["skipped"])
        raise ConfigError(["bench: no variant is legal here", *dict.fromkeys(lines)])
    return document


def _document(settings: dict[str, Any]) -> dict[str, Any]:
    load = round(os.getloadavg()[0], 2)  # before our own ranks add to it
    environment = {"command": shlex.join(["burst", *sys.argv[1:]]), "load": load}
    return {"benchmark": "attention", "environment": environment, "settings": settings, "results": [], "skipped": []}


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

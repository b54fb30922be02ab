"""`burst image build`: the image of this checkout, with labels that say where it comes from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from burst_cli import render
from burst_cli.figures import binary_bytes
from burst_cli.options import JsonOption
from cluster.image.build import BuildPlan, BuildSettings, build_build_plan, run_build
from engine.runs.provenance import git_facts

DEFAULT_TAG = "burst:latest"


def build(
    tag: Annotated[str, typer.Option("--tag", "-t", help="NAME:TAG of the image.")] = DEFAULT_TAG,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option("--device", help="cuda: NVIDIA GPUs; cpu: much smaller.")
    ] = "cuda",
    context: Annotated[
        Path | None, typer.Option("--context", help="A checkout of burst; default: the one that runs.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="Another base image with Python 3.11 or newer; default: pinned in Dockerfile."),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(
            "--wheels",
            help="Folder of wheels: install from there alone, without network. No package of Debian is added then.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    apt_packages: Annotated[
        str | None, typer.Option("--apt-packages", help="Packages of Debian to add; '' for none.")
    ] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="Network of the build steps, such as host or none.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every layer anew.")] = False,
    command: Annotated[str, typer.Option("--command", help="The engine's command line.")] = "docker",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the command and its context; build nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Build the image of this checkout through the Docker engine that DOCKER_HOST names.

    Layers from the one that changes least: torch, other packages, burst. Labels hold commit and digest of all files
    that went in, so the same files give the same image. For machines without network, fetch wheels once where there is
    one: pip wheel -w wheels -c constraints.txt '.[parquet,tensorboard]' hatchling
    """
    root = (context or Path(__file__).resolve().parents[2]).absolute()
    settings = BuildSettings(tag, device, base, wheels, apt_packages, network, no_cache)
    plan = build_build_plan(root, settings, git_facts(root), command)
    if dry_run:
        _show_plan(plan, as_json=as_json)
        return

    console = render.stderr()
    image = run_build(plan, tag, lambda line: console.print(line, markup=False, style="dim", soft_wrap=True))
    if as_json:
        document = {"image": tag, "id": image.image_id, "size_bytes": image.size_bytes, "labels": plan.labels}
        render.emit_json(document)
        return

    console = render.stdout()
    console.print(f"{tag}: {binary_bytes(image.size_bytes)}, {image.image_id}", markup=False)
    console.print(f"next: burst image push --image {tag} cluster=NAME", markup=False)


def _show_plan(plan: BuildPlan, *, as_json: bool) -> None:
    if as_json:
        render.emit_json(plan.to_dict())
        return
    console = render.stdout()
    console.print(shlex.join(plan.argv), markup=False, soft_wrap=True)
    console.print(f"with {len(plan.files)} files on its stdin, {binary_bytes(plan.context_bytes)}", markup=False)

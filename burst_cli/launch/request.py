"""What `burst launch`, `eval` and `resume` are told: light, for the shell asks for it at every press of the tab key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from burst_cli import render
from burst_cli.options import (
    RUNS_DIR,
    DetachOption,
    ForceOption,
    JsonOption,
    PlainOption,
    RunsDirOption,
    SkipChecksOption,
)
from burst_cli.targets import HostfileOption, HostsOption
from cluster.control.link import LaunchTiming
from engine.config.settings import RunConfig

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class LaunchRequest:
    """What is to run where. run_path: the run folder to use, in place of a new one in `runs_dir`.

    base: the configuration that the overrides change, in place of that of the files.
    """

    hosts: HostsOption = None
    hostfile: HostfileOption = None
    runs_dir: RunsDirOption = RUNS_DIR
    force: ForceOption = False
    skip_checks: SkipChecksOption = False
    overrides: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()
    run_path: Path | None = None
    dry_run: bool = False
    base: RunConfig | None = None

    @property
    def names_nodes(self) -> bool:
        """Whether --hosts or --hostfile does."""
        return self.hosts is not None or self.hostfile is not None


@dataclass(frozen=True)
class LaunchManner:
    """How a launch talks, and how patient it is.

    detach: leave the run to a process in the background once the nodes run, or be that process. form: of a rehearsal:
    only the job as another program takes it.
    """

    detach: DetachOption = False
    plain: PlainOption = False
    as_json: JsonOption = False
    timing: LaunchTiming = LaunchTiming()  # noqa: RUF009 - frozen
    form: str | None = None

    def console(self) -> Console:
        """Where progress goes."""
        return render.plain_stderr() if self.plain else render.stderr()

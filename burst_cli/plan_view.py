"""A launch plan as `--dry-run` shows it: the very values that would be run."""

from __future__ import annotations

from rich.text import Text

from burst_cli import render
from cluster.plan import LaunchPlan

_ORDER = ("plan.sh", "env/", "config.yaml")


def show_plan(plan: LaunchPlan, *, as_json: bool) -> None:
    """Print the plan on stdout: run folder and backend, then command, environment and configuration as files."""
    if as_json:
        render.emit_json(plan.to_dict())
        return
    console = render.stdout()
    ranks = ", ".join(f"{node.local_ranks} ranks on {node.hostname}" for node in plan.nodes)
    console.print(Text.assemble(("run folder  ", "bold"), plan.run_path, ("  (dry run: not created)", "yellow")))
    console.print(Text.assemble(("ranks       ", "bold"), ranks))
    console.print(Text.assemble(("backend     ", "bold"), f"{plan.backend.name}, {plan.backend.reason}"))
    for name, text in sorted(plan.files, key=lambda file: _rank(file[0])):
        console.print(Text(f"\n{name}", style="bold"))
        console.print(Text("\n".join(f"  {line}" for line in text.splitlines())), soft_wrap=True)


def _rank(name: str) -> int:
    return next((index for index, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER))

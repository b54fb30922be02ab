"""A launch plan as `--dry-run` shows it: the very values that would be run."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from burst_cli import render
from burst_cli.figures import binary_bytes
from burst_cli.memory_check import MEMORY_PLAN_FILE, MemoryCheck
from cluster.plan import LaunchPlan
from engine.memory.auto import MemoryChoice

_ORDER = ("plan.sh", "env/", "config.yaml")


def show_plan(plan: LaunchPlan, memory: MemoryCheck, *, as_json: bool) -> None:
    """Print the plan on stdout: run folder, backend, memory; then command, environment and configuration as files."""
    if as_json:
        render.emit_json({**plan.to_dict(), "memory": memory.to_dict()})
        return
    console = render.stdout()
    ranks = ", ".join(f"{node.local_ranks} ranks on {node.hostname}" for node in plan.nodes)
    console.print(Text.assemble(("run folder  ", "bold"), plan.run_path, ("  (dry run: not created)", "yellow")))
    console.print(Text.assemble(("ranks       ", "bold"), ranks))
    console.print(Text.assemble(("backend     ", "bold"), f"{plan.backend.name}, {plan.backend.reason}"))
    console.print(Text.assemble(("memory      ", "bold"), memory.summary), soft_wrap=True)
    console.print(memory_notes(memory), soft_wrap=True, end="")
    if memory.choice is not None:
        console.print(policies_table(memory.choice))
    shown = [file for file in plan.files if file[0] != MEMORY_PLAN_FILE]  # its content stands above
    for name, text in sorted(shown, key=lambda file: _rank(file[0])):
        console.print(Text(f"\n{name}", style="bold"))
        console.print(Text("\n".join(f"  {line}" for line in text.splitlines())), soft_wrap=True)


def policies_table(choice: MemoryChoice) -> Table:
    """What memory=auto chose from, in its order: bytes of one rank, seconds that a policy adds to a step."""
    table = Table("policy", "device", "host", "adds", "fits", header_style="bold", box=None, padding=(0, 2))
    for candidate in choice.candidates:
        best = candidate.prediction or candidate.estimate
        chosen = candidate.memory == choice.config.memory
        table.add_row(
            candidate.name,
            binary_bytes(best.needed_bytes),
            binary_bytes(best.host_peak_bytes),
            f"{candidate.extra_s:.3g} s",
            "yes" if candidate.fits else "no",
            style="bold" if chosen else None,
        )
    return table


def memory_notes(memory: MemoryCheck) -> Text:
    """What a person should know of the check: the policy that was chosen, warnings; one line each, may be empty."""
    notes = Text()
    if memory.choice is not None:
        notes.append(f"memory.activation_checkpoint={memory.choice.reason}\n")
    for text in (*memory.warnings, *memory.problems):
        notes.append(f"warning: {text}\n", style="yellow")
    return notes


def _rank(name: str) -> int:
    return next((index for index, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER))

"""A launch plan as `--dry-run` shows it: the very values that would be run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.text import Text

from burst_cli import render
from burst_cli.plan.memory_check import MEMORY_PLAN_FILE, MemoryCheck
from cluster.launch.runner import runner_of
from cluster.plan import PLAN_FILE, LaunchPlan
from engine.config.errors import ConfigError

_ORDER = ("plan.sh", "job.sbatch", "job.yaml", "env/", "config.yaml")
_MOST_ENVIRONMENTS = 2  # shown to people; all are in --json


def show_plan(
    plan: LaunchPlan,
    memory: MemoryCheck | None,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    *,
    as_json: bool,
) -> None:
    """Print the plan on stdout: run folder, nodes, backend, memory; then command, environment, configuration as files.

    `warnings`: what is odd about the nodes, `notes`: what is good to know; on stderr with --json.
    """
    if as_json:
        render.stderr().print(launch_notes(None, warnings, notes), soft_wrap=True, end="")
        render.emit_json({**plan.to_dict(), **({} if memory is None else {"memory": memory.to_dict()})})
        return
    console = render.stdout()
    console.print(Text.assemble(("run folder  ", "bold"), plan.run_path, ("  (dry run: not created)", "yellow")))
    console.print(Text.assemble(("ranks       ", "bold"), _ranks(plan)), soft_wrap=True)
    console.print(Text.assemble(("backend     ", "bold"), f"{plan.backend.name}, {plan.backend.reason}"))
    if memory is not None:
        console.print(Text.assemble(("memory      ", "bold"), f"{memory.needs}, by the prediction"), soft_wrap=True)
    console.print(launch_notes(memory, warnings, notes), soft_wrap=True, end="")
    if memory is not None and memory.choice.candidates:
        from burst_cli.plan.table import candidates_table

        console.print(candidates_table(memory.choice))
    shown, left_out = _shown_files(plan)
    for name, text in shown:
        console.print(Text(f"\n{name}", style="bold"))
        console.print(Text("\n".join(f"  {line}" for line in text.splitlines())), soft_wrap=True)
    if left_out:
        console.print(Text(f"\n{left_out} more files like {plan.nodes[0].env_file}: see --json", style="dim"))


def show_job(plan: LaunchPlan, form: str) -> None:
    """Print the job of `plan` as YAML. Raises ConfigError for a plan that has none."""
    from cluster.launch.manifest import FORMS, JOB_FILE

    if JOB_FILE not in dict(plan.files):
        raise ConfigError(f"--as {form} needs cluster.launcher=kubernetes, as in cluster=k8s")
    print(FORMS[form](plan), end="")


def _ranks(plan: LaunchPlan) -> str:
    """How many ranks there are where, nodes folded."""
    if len(plan.nodes) == 1:
        return f"{plan.world_size} ranks on {plan.nodes[0].name}"
    from cluster.ssh.nodes import fold_nodes

    names = fold_nodes(node.name for node in plan.nodes)
    return f"{plan.world_size} ranks on {len(plan.nodes)} nodes ({names}), by {plan.launcher}"


def _shown_files(plan: LaunchPlan) -> tuple[list[tuple[str, str]], int]:
    """(files in the order to show them, how many environments are left out). What stands above is no part of them."""
    files = [file for file in plan.files if file[0] not in (MEMORY_PLAN_FILE, PLAN_FILE)]
    files.sort(key=lambda file: next((place for place, name in enumerate(_ORDER) if file[0].startswith(name)), 99))
    if runner_of(plan).takes_nodes:  # where no file is a script that shows it
        first = plan.nodes[0]
        files.insert(0, (f"command on {first.name}", shlex.join(first.argv)))
    left_out = [file for file in files if file[0].startswith("env/")][_MOST_ENVIRONMENTS:]
    left_out = left_out if len(left_out) > 1 else []
    return [file for file in files if file not in left_out], len(left_out)


def launch_notes(memory: MemoryCheck | None, warnings: Sequence[str] = (), notes: Sequence[str] = ()) -> Text:
    """What a person should know before: `notes`, the policy that was chosen, warnings; one line each, may be empty."""
    said = Text("".join(f"{note}\n" for note in notes))
    if memory is not None and memory.choice.candidates:
        said.append(f"memory.activation_checkpoint={memory.choice.reason}\n")
    told = () if memory is None else (*memory.warnings, *memory.problems)
    for text in (*warnings, *told):
        said.append(f"warning: {text}\n", style="yellow")
    return said

"""A launch that is prepared as people and programs read it: the plan with its files, the job, the notes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.text import Text

from burst_cli import render
from burst_cli.plan.decisions import preset_words
from burst_cli.plan.memory_check import MEMORY_PLAN_FILE, MemoryCheck
from burst_cli.plan.table import candidates_table
from cluster.control.runner import runner_of
from cluster.plan import PLAN_FILE, LaunchPlan
from cluster.ssh.hosts import fold_nodes
from engine.config.errors import ConfigError
from engine.runs.figures import count_of
from engine.runs.folder import RESOLVED_FILE

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
    render.say(console, Text.assemble(("ranks       ", "bold"), _ranks(plan)))
    console.print(Text.assemble(("backend     ", "bold"), f"{plan.backend.name}, {plan.backend.reason}"))
    if memory is not None:
        render.say(console, Text.assemble(("memory      ", "bold"), f"{memory.needs}, by the prediction"))
    console.print(launch_notes(memory, warnings, notes), soft_wrap=True, end="")
    if memory is not None and memory.decision.candidates:
        console.print(candidates_table(memory))
    shown, left_out = _shown_files(plan)
    for name, text in shown:
        render.say(console, Text(f"\n{name}", style="bold"), "\n".join(f"  {line}" for line in text.splitlines()))
    if left_out:
        console.print(Text(f"\n{left_out} more files like {plan.nodes[0].env_file}: see --json", style="dim"))


def show_job(plan: LaunchPlan, form: str) -> None:
    """Print the job of `plan` as YAML. Raises ConfigError for a plan that has none."""
    from cluster.launch.kubernetes.manifest import FORMS, JOB_FILE

    if JOB_FILE not in dict(plan.files):
        raise ConfigError(f"--as {form} needs cluster.launcher=kubernetes, as in cluster=k8s")
    print(FORMS[form](plan), end="")


def _ranks(plan: LaunchPlan) -> str:
    """How many ranks there are where, nodes folded."""
    if len(plan.nodes) == 1:
        return f"{count_of('rank', plan.world_size)} on {plan.nodes[0].name}"
    names = fold_nodes(node.name for node in plan.nodes)
    return f"{count_of('rank', plan.world_size)} on {len(plan.nodes)} nodes ({names}), by {plan.launcher}"


def _shown_files(plan: LaunchPlan) -> tuple[list[tuple[str, str]], int]:
    """(files in the order to show them, how many environments are left out). What stands above is no part of them."""
    files = [file for file in plan.files if file[0] not in (MEMORY_PLAN_FILE, RESOLVED_FILE, PLAN_FILE)]
    files.sort(key=lambda file: next((place for place, name in enumerate(_ORDER) if file[0].startswith(name)), 99))
    if runner_of(plan).takes_nodes:  # where no file is a script that shows it
        first = plan.nodes[0]
        files.insert(0, (f"command on {first.name}", shlex.join(first.argv)))
    left_out = [file for file in files if file[0].startswith("env/")][_MOST_ENVIRONMENTS:]
    left_out = left_out if len(left_out) > 1 else []
    return [file for file in files if file not in left_out], len(left_out)


def launch_notes(memory: MemoryCheck | None, warnings: Sequence[str] = (), notes: Sequence[str] = ()) -> Text:
    """What a person should know before: `notes`, what was chosen for auto, warnings; one line each, may be empty."""
    said = Text("".join(f"{note}\n" for note in notes))
    if memory is not None and memory.run.decision("attention.preset").candidates:
        said.append(f"attention={preset_words(memory.run.decision('attention.preset'))}\n")
    if memory is not None and memory.decision.candidates:
        said.append(f"memory.activation_checkpoint={memory.reason}\n")
    told = () if memory is None else (*memory.warnings, *memory.problems)
    for text in (*warnings, *told):
        said.append(f"warning: {text}\n", style="yellow")
    return said

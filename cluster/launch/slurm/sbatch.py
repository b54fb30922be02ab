"""The batch file of a run, as text: a pure function of the settings. Every value is checked before it gets there.

The same file serves inside of an allocation, where bash runs it and its #SBATCH lines are comments. Its argument is the
token of the attempt, which lies in the run folder: a node that finds it there sees the same storage as the launcher.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.plan import TRAINER_MODULE, MachineFacts
from cluster.remote_text import one_line
from cluster.ssh.hosts import fold_nodes, parse_nodes
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig

SCRIPT_FILE = "job.sbatch"
TOKEN_FILE = "slurm.token"
LOG_PREFIX = "slurm-"
RESTART_VARIABLE = "SLURM_RESTART_COUNT"  # is set where Slurm runs a job again
NOT_SHARED = 66  # exit code: a node does not see the launcher's run folder
WARNING_S = 60  # before the time limit, beside what the ranks may take to save: Slurm looks twice a minute
PEER_WAIT_S = 60  # once a node's task has ended well, the others have so long

_TIME = re.compile(r"(?i:unlimited|infinite)|\d{1,7}(:\d{1,2}){0,2}|\d{1,5}-\d{1,2}(:\d{1,2}){0,2}")
_OPTION = re.compile(r"--([a-z][a-z0-9-]{1,40})(=[^\x00-\x1f\x7f\"\\]{0,500})?")
# What the file itself says, and what would make of one job something else.
_OURS = frozenset(
    {
        *("nodes", "ntasks", "ntasks-per-node", "output", "error", "input", "open-mode", "job-name", "chdir", "wrap"),
        *("requeue", "no-requeue", "array", "parsable", "wait", "test-only", "export", "export-file", "clusters"),
        *("nodelist", "nodefile", "help", "usage", "version", "quiet", "verbose", "signal"),
    }
)
_HAVE_SETTINGS = {
    "time": "time_limit",
    "gpus-per-node": "gpus_per_node",
}


def check_slurm_settings(cluster: ClusterConfig) -> None:
    """Raise ConfigError with every setting that Slurm could not be given as it stands."""
    slurm = cluster.slurm
    problems = [problem for option in slurm.options if (problem := _option_problem(option))]
    if slurm.time_limit is not None and _TIME.fullmatch(slurm.time_limit) is None:
        problems.append(f"cluster.slurm.time_limit={one_line(slurm.time_limit, 80)!r}: expected [DAYS-]HH:MM:SS")
    if cluster.container.runtime != "bare":
        problems.append(
            f"cluster.container.runtime={cluster.container.runtime}: a job of Slurm starts ranks outside of containers "
            "only; cluster.launcher=ssh reaches nodes that have Docker"
        )
    is_nccl = cluster.backend == "nccl" and cluster.ranks_per_node is not None  # by GPUs that slurm.options ask for
    if slurm.gpus_per_node is None and cluster.backend != "gloo" and not is_nccl:
        problems.append(
            "cluster.slurm.gpus_per_node=null: say how many GPUs a node has (`sinfo --format='%P %G'` shows that of "
            "every partition); 0: ranks compute on the CPU"
        )
    if cluster.nodes is not None:
        try:
            parse_nodes(cluster.nodes, "cluster.nodes")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def sbatch_text(
    config: RunConfig,
    facts: MachineFacts,
    run_path: Path,
    module: str = TRAINER_MODULE,
    *,
    python: str = sys.executable,
) -> str:
    """The text of the batch file; it holds no secret, and in one job ranks are started once.

    facts: of this machine, whose folders the nodes share. python: which runs the tasks of the nodes. module: of ranks.
    """
    if re.search(r"[\x00-\x1f\x7f\"\\]", str(run_path)):
        shown = one_line(str(run_path))
        raise ConfigError(f"run folder {shown!r}: Slurm cannot be given a path with quotes, backslashes or line ends")
    directives = "\n".join(f"#SBATCH {option}" for option in _directives(config, run_path))
    return "\n".join(["#!/bin/bash", directives, "", *_body(config, facts, run_path, module, python), ""])


def _save_s(config: RunConfig) -> float | None:
    """What ranks may take to save when the time limit is near; None: they save nothing."""
    checkpoint = config.train.checkpoint
    return checkpoint.stop_grace_s if checkpoint.is_on else None


def _directives(config: RunConfig, run_path: Path) -> Iterator[str]:
    cluster, slurm, save_s = config.cluster, config.cluster.slurm, _save_s(config)
    yield f"--job-name=burst-{run_path.name}"
    yield f"--nodes={cluster.num_nodes}"
    yield "--ntasks-per-node=1"
    if slurm.option("cpus-per-task") is None:
        yield "--exclusive"
        yield "--mem=0"  # all of it: a part per CPU would be the default of many clusters
    if slurm.gpus_per_node:
        yield f"--gpus-per-node={slurm.gpus_per_node}"
    if slurm.time_limit is not None:
        yield f"--time={slurm.time_limit}"
    if cluster.nodes is not None:
        yield f"--nodelist={_slurm_nodes(cluster.nodes)}"
    yield "--requeue" if cluster.max_restarts else "--no-requeue"
    if save_s is not None:
        yield f"--signal=B:USR1@{math.ceil(save_s) + WARNING_S}"
    yield "--open-mode=append"
    # In patterns of file names a percent sign is written twice.
    yield _quoted("output", f"{str(run_path).replace('%', '%%')}/{LOG_PREFIX}%j.log")
    for option in slurm.options:
        name, equals, value = option.removeprefix("--").partition("=")
        yield _quoted(name, value) if equals else f"--{name}"


def _body(config: RunConfig, facts: MachineFacts, run_path: Path, module: str, python: str) -> Iterator[str]:
    token = shlex.quote(str(run_path / TOKEN_FILE))
    yield f"# Run {run_path.name}: one task per node, in which a supervisor starts the node's ranks."
    yield f'if [ -z "$1" ] || [ "$(cat {token} 2>/dev/null)" != "$1" ]; then'
    yield '    echo "burst: $(hostname) does not see the run folder: Slurm needs one that all nodes share" >&2'
    yield f"    exit {NOT_SHARED}"
    yield "fi"
    yield f"cd {shlex.quote(facts.cwd)} || exit"
    if facts.python_path is not None:
        yield f"export PYTHONPATH={shlex.quote(facts.python_path)}"
    yield "export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1"
    yield from _steps(config, shlex.quote(python), shlex.quote(str(run_path)), run_path.name, module)


def _steps(config: RunConfig, python: str, run: str, run_id: str, module: str) -> Iterator[str]:
    """What starts the tasks, and what is done beside and after them where ranks save."""
    srun = f"srun {shlex.join(_srun_options(config, run_id))} \\\n    "
    srun += f'{python} -m cluster.launch.slurm.node_task {run} "$1" {module}'
    limit = f'{python} -m cluster.launch.slurm.time_limit {run} "$token"'
    if config.cluster.max_restarts:
        yield "# Slurm runs the job again, which lost a node or was preempted: the next attempt is a job of its own."
        yield f'[ -z "${RESTART_VARIABLE}" ] || exec {python} -m cluster.launch.slurm.time_limit {run} "$1" go-on'
    if _save_s(config) is None:
        yield f"exec {srun}"
        return
    yield "# Slurm warns of the time limit: the ranks save and stop."
    yield "token=$1  # which it is not in a function"
    yield f"stop() {{ trap '' USR1; is_up=1; {limit} stop; }}"
    yield "trap stop USR1"
    yield f"{srun} &"
    yield "wait $!; code=$?"
    yield '[ -z "$is_up" ] || { wait $!; code=$?; }'
    if config.cluster.max_restarts:
        yield f'[ -z "$is_up" ] || {limit} go-on'
    yield 'exit "$code"'


def _srun_options(config: RunConfig, run_id: str) -> tuple[str, ...]:
    cpus, num_nodes = config.cluster.slurm.option("cpus-per-task"), config.cluster.num_nodes
    return (
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        # Newer versions of srun do not take it from sbatch.
        *((f"--cpus-per-task={cpus}",) if cpus is not None else ()),
        "--cpu-bind=none",  # one task stands for all ranks of its node
        "--mpi=none",
        "--input=none",
        "--kill-on-bad-exit=1",
        f"--wait={PEER_WAIT_S}",
        f"--job-name=burst-{run_id}",
    )


def _option_problem(option: str) -> str | None:
    where = f"cluster.slurm.options: {one_line(option, 80)!r}"
    found = _OPTION.fullmatch(option)
    if found is None:
        return f"{where}: expected --NAME or --NAME=VALUE without quotes, backslashes and line ends"
    if found[1] in _HAVE_SETTINGS:
        return f"{where}: use cluster.slurm.{_HAVE_SETTINGS[found[1]]}"
    if found[1] == "cpus-per-task" and not (found[2] or "")[1:].isdecimal():
        return f"{where}: expected --cpus-per-task=N"
    if found[1] in _OURS:
        return f"{where}: burst sets --{found[1]} itself, or cannot work with it"
    return None


def _slurm_nodes(nodes: str) -> str:
    """Names as Slurm reads them: it knows fewer forms of ranges than NodeSet."""
    names = parse_nodes(nodes, "cluster.nodes").names
    folded = fold_nodes(names)
    is_plain = all(part.count("[") <= 1 for part in re.split(r",(?![^\[]*\])", folded)) and "/" not in folded
    return folded if is_plain else ",".join(names)


def _quoted(name: str, value: str) -> str:
    """An option of an #SBATCH line; checked values hold neither double quotes nor backslashes."""
    return f"--{name}={value}" if re.fullmatch(r"[A-Za-z0-9_./:,+-]*", value) else f'--{name}="{value}"'

"""The plan and the batch file: what they say for given settings, and that no setting says more than it should."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit import write_program
from testkit.fake_plan import node_facts
from testkit.waiting import wait_for

from cluster.launch.slurm.plan import build_slurm_plan
from cluster.launch.slurm.sbatch import TOKEN_FILE, check_slurm_settings, sbatch_text
from engine.config.cluster import ClusterConfig, ContainerConfig, SlurmConfig
from engine.config.errors import ConfigError
from engine.config.settings import CheckpointConfig, DataConfig, RunConfig, TrainConfig

GOLDEN = Path(__file__).parent / "fixtures"
RUN = Path("/shared/runs/long/20260131-120000-abc123")
NEVER, SAVES = CheckpointConfig(), CheckpointConfig(every_steps=5, stop_grace_s=90.5)
EVERYTHING = SlurmConfig(
    time_limit="2-12:00:00",
    gpus_per_node=8,
    options=(
        *("--partition=gpu,gpu-long", "--cpus-per-task=96", "--constraint=h100&ib|b200", "--exclude=n[1-2],n7"),
        *("--comment=night run #3", "--exclusive=user", "--contiguous"),
    ),
)


def config_of(checkpoint: CheckpointConfig = NEVER, **cluster) -> RunConfig:
    """Of a run on the CPU, unless there is something of Slurm or the backend."""
    if "slurm" not in cluster:
        cluster = {"backend": "gloo", **cluster}
    data = DataConfig(format="text", paths=("/data/x.txt",))
    return RunConfig(data=data, train=TrainConfig(checkpoint=checkpoint), cluster=ClusterConfig(**cluster))


def text_of(path: Path = RUN, checkpoint: CheckpointConfig = NEVER, **cluster) -> str:
    python_path = cluster.pop("python_path", None)
    facts = node_facts(cwd="/home/me/work", python_path=python_path)
    return sbatch_text(config_of(checkpoint, num_nodes=4, **cluster), facts, path, python="/opt/venv/bin/python")


def plan_of(environment: dict[str, str] | None = None, **cluster):
    facts = node_facts("head", python="/opt/venv/bin/python", cwd="/w", python_path="/src")
    return build_slurm_plan(config_of(**cluster), facts, RUN, environment=environment or {})


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("plain.sbatch", {}),
        ("every_setting.sbatch", {"python_path": "/home/me/burst", "slurm": EVERYTHING, "nodes": "n[01-16]"}),
    ],
)
def test_the_file_is_as_it_was_agreed(file, words):
    assert text_of(**words) == (GOLDEN / file).read_text()


@pytest.mark.parametrize(
    ("checkpoint", "max_restarts", "said", "unsaid"),
    [
        (NEVER, 0, {"--no-requeue"}, ("--signal", "time_limit")),
        (NEVER, 1, {"--requeue"}, ("--signal", "--no-requeue", " stop")),
        (SAVES, 0, {"--no-requeue", "--signal=B:USR1@151"}, ("go-on", "--requeue")),
        (SAVES, 2, {"--requeue", "--signal=B:USR1@151"}, ("--no-requeue",)),
    ],
)
def test_a_job_is_warned_in_time_to_save_and_goes_on_where_it_may(checkpoint, max_restarts, said, unsaid):
    text = text_of(checkpoint=checkpoint, max_restarts=max_restarts)

    assert said <= set(directives(text))
    assert not [word for word in unsaid if word in text]
    for word in ("stop",) * checkpoint.is_on + ("go-on",) * (checkpoint.is_on and max_restarts > 0):
        assert f'-m cluster.launch.slurm.time_limit {RUN} "$token" {word}' in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=200).returncode == 0


OURS = "ntasks ntasks-per-node error input open-mode job-name chdir wrap no-requeue parsable wait test-only export-file"
OURS += " nodes array requeue output export clusters nodelist nodefile help usage version quiet verbose signal"


def test_a_setting_that_would_say_something_else_is_refused_by_its_name():
    odd = ["--comment=a\n--uid=0", '--comment="', "--comment=\\", "-N 900", "comment"]
    odd += [
        "--cpus-per-task",
        "--cpus-per-task=1 --uid=0",
        "--cpus-per-task=x6",
        *(f"--{one}=1" for one in OURS.split()),
    ]
    for name, values in {"time_limit": ["1:00:00 --uid=0", "soon"], "options": [(option,) for option in odd]}.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"cluster.slurm.{name}"):
                check_slurm_settings(ClusterConfig(slurm=SlurmConfig(**{name: value})))


def test_all_settings_that_are_wrong_are_told_at_once():
    check_slurm_settings(ClusterConfig(backend="gloo", slurm=SlurmConfig(options=("--cpus-per-task=8",))))
    container = ContainerConfig(runtime="docker", image="burst:1")
    slurm = SlurmConfig(time_limit="x", options=("--nodes=1", "y", "--time=1", "--gpus-per-node=1"))
    with pytest.raises(ConfigError, match=r"use cluster.slurm.time_limit") as caught:
        check_slurm_settings(ClusterConfig(slurm=slurm, container=container, nodes="n[1"))

    assert len(caught.value.problems) == 8
    assert "use cluster.slurm.gpus_per_node" in str(caught.value)
    assert "cluster.nodes: 'n[1': not in the grammar" in str(caught.value)


@pytest.mark.parametrize("path", ['/a"b/run', "/a\\b/run", "/a\nb/run"])
def test_a_run_folder_that_slurm_would_misread_is_refused(path):
    with pytest.raises(ConfigError, match="a path with quotes, backslashes or line ends"):
        text_of(Path(path))


def test_a_percent_sign_in_the_run_folder_is_no_pattern():
    assert '--output="/50%% off/run/slurm-%j.log"' in directives(text_of(Path("/50% off/run")))


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters='"\\/', exclude_categories=("Cc", "Cs")), min_size=1, max_size=30))
def test_whatever_a_folder_is_called_bash_reads_it_as_one_word(name):
    path = Path("/shared") / f"x{name}" / "run"
    body = text_of(path, NEVER).split("\n\n", 1)[1]

    assert shlex.split(body.split("\n")[-2].strip())[-3:] == [str(path), "$1", "engine.train"]


@pytest.fixture
def batch(tmp_path):
    """Writes the file of a run in a folder with blanks and quotes, beside scripts for its commands; how it is run."""

    def make(config: RunConfig, token: str | None = "t", **scripts: str) -> tuple[list[str], dict[str, str]]:
        folder = tmp_path / "it's a $(run)"
        folder.mkdir()
        if token is not None:
            (folder / TOKEN_FILE).write_text(f"{token}\n")
        for name, script in scripts.items():
            write_program(tmp_path / name, script)
        facts = node_facts(cwd=str(tmp_path), python_path="/src $HOME")
        (tmp_path / "job").write_text(sbatch_text(config, facts, folder, python=str(tmp_path / "py")))
        return ["bash", str(tmp_path / "job")], {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    return make


def said_by(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_bash_starts_one_task_per_node_in_the_folder_of_the_launcher(batch, tmp_path):
    show = 'printf "%s\\n" "$PYTHONPATH" "$PWD" "$@"'
    command, environment = batch(config_of(NEVER, num_nodes=2), srun=show)
    lines = said_by([*command, "t"], environment).stdout.splitlines()

    assert lines[:2] == ["/src $HOME", str(tmp_path)]
    task = [
        str(tmp_path / "py"),
        "-m",
        "cluster.launch.slurm.node_task",
        str(tmp_path / "it's a $(run)"),
        "t",
        "engine.train",
    ]
    assert lines[-6:] == task
    assert {"--nodes=2", "--ntasks-per-node=1", "--wait=60"} <= set(lines)


@pytest.mark.parametrize(("there", "said"), [(None, "t"), ("other", "t"), ("", "")])
def test_a_node_with_another_run_folder_starts_nothing(batch, there, said):
    command, environment = batch(config_of(NEVER, num_nodes=2), there, srun="echo begun")
    done = said_by([*command, said], environment)

    assert (done.returncode, done.stdout) == (66, "")
    assert "does not see the run folder" in done.stderr


def test_a_job_that_slurm_runs_again_starts_no_ranks(batch, tmp_path):
    command, environment = batch(config_of(num_nodes=2, max_restarts=1), srun="echo begun", py='echo "$@"')
    done = said_by([*command, "t"], {**environment, "SLURM_RESTART_COUNT": "1"})

    assert done.stdout == f"-m cluster.launch.slurm.time_limit {tmp_path}/it's a $(run) t go-on\n", done.stderr


def test_ranks_that_save_are_left_to_it_however_often_slurm_warns_of_the_time_limit(batch, tmp_path):
    said, saved = tmp_path / "said", tmp_path / "saved"
    ranks = f"echo begun >>{said}; while [ ! -e {saved} ]; do sleep 0.05; done; echo saved >>{said}"
    config = config_of(CheckpointConfig(every_steps=5), num_nodes=2, max_restarts=1)
    command, environment = batch(config, srun=ranks, py=f'echo "$4-$5" >>{said}')
    with subprocess.Popen([*command, "t"], env=environment) as job:
        wait_for(lambda: said.exists() and said.read_text())
        for _ in range(2):
            job.send_signal(signal.SIGUSR1)
            time.sleep(0.3)  # for what would be wrong to happen
        saved.touch()

    assert said.read_text().split() == ["begun", "t-stop", "saved", "t-go-on"]


def test_the_plan_says_how_many_ranks_before_there_are_nodes():
    plan = plan_of(num_nodes=4, master_port=29500, slurm=SlurmConfig(gpus_per_node=8))

    assert plan.nodes[3].argv == (
        *("/opt/venv/bin/python", "-m", "torch.distributed.run", "--nnodes=4", "--nproc-per-node=8", "--node-rank=3"),
        *("--rdzv-backend=static", "--master-addr=FIRST_ADDRESS", "--master-port=29500", "--local-addr=ITS_ADDRESS"),
        *(f"--log-dir={RUN}/logs/slurm-node3/torchrun", "--max-restarts=0", f"--rdzv-id={RUN.name}"),
        *("-m", "engine.train", f"{RUN}/config.yaml"),
    )
    assert (plan.world_size, plan.backend.name, plan.launcher) == (32, "nccl", "slurm")
    assert [node.first_rank for node in plan.nodes] == [0, 8, 16, 24]
    assert (plan.config.cluster.num_nodes, plan.config.cluster.ranks_per_node) == (4, 8)
    assert dict(plan.files)["job.sbatch"].count("--gpus-per-node=8") == 1


@pytest.mark.parametrize(
    ("cluster", "backend", "local_ranks"),
    [
        ({"backend": "gloo"}, "gloo", 1),
        ({"slurm": SlurmConfig(gpus_per_node=0)}, "gloo", 1),
        ({"backend": "nccl", "ranks_per_node": 4}, "nccl", 4),
    ],
)
def test_ranks_are_on_as_many_gpus_as_is_said(cluster, backend, local_ranks):
    plan = plan_of(**cluster)

    assert (plan.backend.name, plan.backend.local_ranks) == (backend, local_ranks)
    assert not [line for line in directives(dict(plan.files)["job.sbatch"]) if "gpus" in line]


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_how_many_gpus_a_node_has_must_be_said(backend):
    with pytest.raises(ConfigError, match=r"say how many GPUs a node has .*sinfo"):
        plan_of(num_nodes=2, backend=backend)


def test_how_many_nodes_there_are_follows_from_their_names_or_from_the_allocation():
    named, allocation = plan_of(nodes="n[1-3]"), {"SLURM_JOB_NODELIST": "n[1-4]"}

    assert (named.world_size, "--nodelist=n[1-3]" in dict(named.files)["job.sbatch"]) == (3, True)
    assert plan_of(allocation).world_size == plan_of(allocation, num_nodes=4).world_size == 4
    assert (plan_of(allocation, nodes="n[1-3]").world_size, plan_of().world_size) == (3, 1)
    assert "--nodelist=r1n1,r1n2,r2n1,r2n2" in directives(text_of(nodes="r[1-2]n[1-2]"))  # Slurm knows one range a name
    with pytest.raises(ConfigError, match="this allocation of Slurm has 4 nodes"):
        plan_of(allocation, num_nodes=5)

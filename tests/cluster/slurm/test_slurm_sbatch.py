"""The batch file as text: what it says for given settings, and that no setting says more than it should."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.fake_plan import node_facts
from testkit.waiting import wait_for

from cluster.slurm.plan import build_slurm_plan
from cluster.slurm.sbatch import TOKEN_FILE, check_slurm_settings, sbatch_text
from engine.config.cluster import ClusterConfig, ContainerConfig, SlurmConfig
from engine.config.errors import ConfigError
from engine.config.settings import CheckpointConfig, DataConfig, RunConfig, TrainConfig

GOLDEN = Path(__file__).parent / "fixtures"
RUN = Path("/shared/runs/long/20260131-120000-abc123")


def text_of(path: Path = RUN, *, python_path: str | None = None, every_steps: int | None = None, **cluster) -> str:
    train = TrainConfig(checkpoint=CheckpointConfig(every_steps=every_steps))
    facts = node_facts(cwd="/home/me/work", python_path=python_path)
    config = replace(config_of(num_nodes=4, **cluster), train=train)
    return sbatch_text(config, facts, path, python="/opt/venv/bin/python")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_file_of_a_plain_run_is_as_it_was_agreed():
    assert text_of() == (GOLDEN / "plain.sbatch").read_text()


def test_the_file_with_every_setting_is_as_it_was_agreed():
    settings = SlurmConfig(
        time_limit="2-12:00:00",
        gpus_per_node=8,
        options=(
            *("--partition=gpu,gpu-long", "--cpus-per-task=96", "--constraint=h100&ib|b200", "--exclude=n[1-2],n7"),
            *("--comment=night run #3", "--exclusive=user", "--contiguous"),
        ),
    )
    text = text_of(
        python_path="/home/me/burst",
        slurm=settings,
        nodes="n[01-16]",
    )

    assert text == (GOLDEN / "every_setting.sbatch").read_text()


def test_a_job_is_warned_in_time_to_save_and_goes_on_where_it_may():
    saving = RunConfig(
        data=DataConfig(format="text", paths=("/data/x.txt",)),
        train=TrainConfig(checkpoint=CheckpointConfig(every_steps=5, stop_grace_s=90.5)),
        cluster=ClusterConfig(backend="gloo", max_restarts=2, num_nodes=2),
    )
    text = dict(plan_with(saving).files)["job.sbatch"]

    assert {"--requeue", "--signal=B:USR1@151"} <= set(directives(text))
    assert "--no-requeue" not in text
    for word in ("stop", "go-on"):
        assert f'-m cluster.slurm.time_limit {RUN} "$token" {word}' in text
    assert "go-on" not in text_of(every_steps=5)
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=200).returncode == 0


def test_without_checkpoints_there_is_nothing_to_be_warned_for():
    text = text_of(max_restarts=1)

    assert "--requeue" in directives(text)
    assert "--signal" not in text
    assert "--no-requeue" in directives(text_of(every_steps=5))


def test_a_job_that_slurm_runs_again_starts_no_ranks(tmp_path):
    for name in ("srun", "py"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    facts = node_facts(cwd=str(tmp_path))
    text = sbatch_text(config_of(num_nodes=2, max_restarts=1), facts, tmp_path, python=str(tmp_path / "py"))
    (tmp_path / TOKEN_FILE).write_text("t\n")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(["bash", "-s", "t"], input=text, env=environment, capture_output=True, text=True, timeout=200)

    assert done.stdout == f"py -m cluster.slurm.time_limit {tmp_path} t go-on\n", done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_limit", "1:00:00 --uid=0"),
        ("time_limit", "soon"),
        ("options", ("--comment=a\n--uid=0",)),
        ("options", ('--comment="',)),
        ("options", ("--comment=\\",)),
        ("options", ("-N 900",)),
        ("options", ("comment",)),
        ("options", ("--nodes=900",)),
        ("options", ("--cpus-per-task",)),
        ("options", ("--cpus-per-task=1 --uid=0",)),
        ("options", ("--array=1-9",)),
        ("options", ("--requeue",)),
        ("options", ("--output=/etc/passwd",)),
        ("options", ("--export=ALL",)),
    ],
)
def test_a_setting_that_would_say_something_else_is_refused_by_its_name(name, value):
    with pytest.raises(ConfigError, match=f"cluster.slurm.{name}"):
        check_slurm_settings(ClusterConfig(slurm=SlurmConfig(**{name: value})))


def test_all_settings_that_are_wrong_are_told_at_once():
    container = ContainerConfig(runtime="docker", image="burst:1")
    slurm = SlurmConfig(time_limit="x", options=("--nodes=1", "y"))
    with pytest.raises(ConfigError) as caught:
        check_slurm_settings(ClusterConfig(slurm=slurm, container=container))

    assert len(caught.value.problems) == 5


def test_an_option_that_has_a_setting_names_it():
    with pytest.raises(ConfigError, match=r"use cluster.slurm.time_limit"):
        check_slurm_settings(ClusterConfig(backend="gloo", slurm=SlurmConfig(options=("--time=1",))))


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
    body = text_of(path).split("\n\n", 1)[1]
    words = shlex.split(body.split("\n")[-2].strip())

    assert words[-3:] == [str(path), "$1", "engine.train"]


def run_script(tmp_path: Path, token: str | None, said: str) -> subprocess.CompletedProcess[str]:
    """The file run by bash with an srun that only shows its arguments."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$PWD" "$@"\n')
    (tools / "srun").chmod(0o755)
    folder = tmp_path / "it's a $(run)"
    folder.mkdir()
    if token is not None:
        (folder / TOKEN_FILE).write_text(f"{token}\n")
    config = config_of(num_nodes=2)
    facts = node_facts(cwd=str(tmp_path), python_path="/src $HOME")
    script = tmp_path / "job"
    script.write_text(sbatch_text(config, facts, folder, python="/py"))
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    return subprocess.run(["bash", str(script), said], env=environment, capture_output=True, text=True, timeout=200)


def test_bash_starts_one_task_per_node_in_the_folder_of_the_launcher(tmp_path):
    lines = run_script(tmp_path, "secret", "secret").stdout.splitlines()

    assert lines[:2] == ["/src $HOME", str(tmp_path)]
    assert lines[-6:-2] == ["/py", "-m", "cluster.slurm.node_task", str(tmp_path / "it's a $(run)")]
    assert lines[-2:] == ["secret", "engine.train"]
    assert {"--nodes=2", "--ntasks-per-node=1", "--wait=60"} <= set(lines)


@pytest.mark.parametrize(("there", "said"), [(None, "secret"), ("other", "secret"), ("", "")])
def test_a_node_with_another_run_folder_starts_nothing(tmp_path, there, said):
    done = run_script(tmp_path, there, said)

    assert (done.returncode, done.stdout) == (66, "")
    assert "does not see the run folder" in done.stderr


def test_ranks_that_save_are_left_to_it_however_often_slurm_warns_of_the_time_limit(tmp_path):
    said, saved = tmp_path / "said", tmp_path / "saved"
    ranks = f"echo begun >>{said}; while [ ! -e {saved} ]; do sleep 0.05; done; echo saved >>{said}"
    tools = {"srun": ranks, "py": f'echo "$4-$5" >>{said}'}
    for name, script in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    saving = TrainConfig(checkpoint=CheckpointConfig(every_steps=5))
    config = replace(config_of(num_nodes=2, max_restarts=1), train=saving)
    text = sbatch_text(config, node_facts(cwd=str(tmp_path)), tmp_path, python=str(tmp_path / "py"))
    (tmp_path / "job").write_text(text)
    (tmp_path / TOKEN_FILE).write_text("t\n")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with subprocess.Popen(["bash", str(tmp_path / "job"), "t"], env=environment) as job:
        wait_for(lambda: said.exists() and said.read_text())
        for _ in range(2):
            job.send_signal(signal.SIGUSR1)
            time.sleep(0.3)  # for what would be wrong to happen
        saved.touch()

    assert said.read_text().split() == ["begun", "t-stop", "saved", "t-go-on"]


def config_of(**cluster) -> RunConfig:
    """Of a run on the CPU, unless there is something of Slurm or the backend."""
    if "slurm" not in cluster:
        cluster = {"backend": "gloo", **cluster}
    return RunConfig(data=DataConfig(format="text", paths=("/data/x.txt",)), cluster=ClusterConfig(**cluster))


def plan_of(environment: dict[str, str] | None = None, **cluster):
    return plan_with(config_of(**cluster), environment)


def plan_with(config: RunConfig, environment: dict[str, str] | None = None):
    facts = node_facts("head", python="/opt/venv/bin/python", cwd="/w", python_path="/src")
    return build_slurm_plan(config, facts, RUN, environment=environment or {})


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


def test_named_nodes_are_asked_for_by_name():
    plan = plan_of(nodes="n[1-3]")

    assert plan.world_size == 3
    assert "--nodelist=n[1-3]" in dict(plan.files)["job.sbatch"]


def test_inside_of_an_allocation_all_of_its_nodes_are_used_and_no_more():
    allocation = {"SLURM_JOB_NODELIST": "n[1-4]"}

    assert plan_of(allocation).world_size == 4
    with pytest.raises(ConfigError, match="this allocation of Slurm has 4 nodes"):
        plan_of(allocation, num_nodes=5)

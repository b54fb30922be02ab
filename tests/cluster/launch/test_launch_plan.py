from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.fake_plan import node_facts

from cluster.launch.local import RUNNER, build_local_plan
from cluster.launch.runner import Asked
from cluster.plan import LaunchPlan, choose_backend, node_spec, with_exclusive
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, config_from_dict

RUN = Path("/runs/my exp/20260101-000000-abcdef")


def config(**cluster: object) -> RunConfig:
    return RunConfig(cluster=ClusterConfig(**cluster))  # type: ignore[arg-type]


def environment(plan: LaunchPlan) -> dict[str, str]:
    return {variable.name: variable.value for variable in plan.nodes[0].environment}


@pytest.mark.parametrize(
    ("gpus", "ranks", "asked", "backend", "world_size"),
    [
        (0, None, "auto", "gloo", 1),
        (0, 4, "auto", "gloo", 4),
        (8, None, "auto", "nccl", 8),
        (8, 4, "auto", "nccl", 4),
        (1, 4, "auto", "gloo", 4),
        (8, 4, "gloo", "gloo", 4),
        (8, None, "gloo", "gloo", 1),
        (2, 2, "nccl", "nccl", 2),
    ],
)
def test_nccl_exactly_when_every_rank_has_a_gpu(
    gpus: int, ranks: int | None, asked: str, backend: str, world_size: int
) -> None:
    plan = build_local_plan(config(ranks_per_node=ranks, backend=asked), node_facts(gpus=gpus), RUN)
    assert (plan.backend.name, plan.world_size) == (backend, world_size)
    assert f"--nproc-per-node={world_size}" in plan.nodes[0].argv


def test_backend_reason_names_the_facts() -> None:
    assert (
        choose_backend(config(ranks_per_node=4), node_facts(gpus=1)).reason == "on the CPU: 1 visible GPU for 4 ranks"
    )
    assert choose_backend(config(), node_facts(gpus=2)).reason == "2 visible GPUs for 2 ranks"


@pytest.mark.parametrize(
    ("cluster", "remedy"),
    [
        ({"nodes": "n[1-4]"}, "cluster.nodes=n[1-4] names other machines; add cluster=local"),
        ({"container": {"runtime": "docker", "image": "burst:1"}}, "cluster.container.runtime=docker: "),
    ],
)
def test_machines_and_containers_that_no_launch_reaches_are_refused(cluster: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RUNNER.survey(config_from_dict({"cluster": cluster}), Asked())
    assert str(caught.value).startswith(remedy)


def test_nccl_without_enough_gpus_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"1 visible GPU for 2 ranks.*cluster\.backend=gloo"):
        choose_backend(config(backend="nccl", ranks_per_node=2), node_facts(gpus=1))


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "expected"),
    [
        (8, 4, None, ("2", "8 cores for 4 ranks")),
        (2, 4, None, ("1", "2 cores for 4 ranks")),
        (7, 1, None, ("7", "7 cores for 1 rank")),
        (8, 4, 3, ("3", "cluster.threads_per_rank=3")),
    ],
)
def test_threads_share_the_cores(cores: int, ranks: int, threads: int | None, expected: tuple[str, str]) -> None:
    plan = build_local_plan(config(ranks_per_node=ranks, threads_per_rank=threads), node_facts(cores=cores), RUN)
    found = {variable.name: (variable.value, variable.reason) for variable in plan.nodes[0].environment}
    assert found["OMP_NUM_THREADS"] == expected


def test_cpu_run_hides_gpus_and_stays_on_the_loopback() -> None:
    values = environment(build_local_plan(config(ranks_per_node=2), node_facts(gpus=1), RUN))
    assert (values["CUDA_VISIBLE_DEVICES"], values["GLOO_SOCKET_IFNAME"]) == ("", "lo")


def test_gpu_run_leaves_the_choice_of_gpus_alone() -> None:
    values = environment(build_local_plan(config(), node_facts(gpus=2), RUN))
    assert "CUDA_VISIBLE_DEVICES" not in values
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in values
    assert values["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


@pytest.mark.parametrize(("gpus", "chosen", "exclusive"), [(2, False, True), (2, True, False), (0, False, False)])
def test_a_run_on_gpus_keeps_the_machine_unless_it_was_given_its_own(gpus: int, chosen: bool, exclusive: bool) -> None:
    machine = replace(node_facts(gpus=gpus), has_chosen_gpus=chosen)
    plan = build_local_plan(config(), machine, RUN)
    assert node_spec(plan, plan.nodes[0], lease_s=None).exclusive is exclusive
    assert not with_exclusive(plan, exclusive=False).is_exclusive


def test_a_supervisor_of_this_machine_finds_all_files_in_the_run_folder() -> None:
    plan = build_local_plan(config(ranks_per_node=2), node_facts(), RUN)
    spec = node_spec(plan, plan.nodes[0], lease_s=60.0)
    assert (spec.node, spec.folder, spec.files, spec.container) == ("node1", str(RUN), (), None)
    assert (spec.environment["BURST_NODE"], spec.lease_s) == ("node1", 60.0)


def test_command_reads_the_run_folder_and_takes_no_fixed_port() -> None:
    argv = build_local_plan(config(), node_facts(), RUN).nodes[0].argv
    assert argv[:3] == ("/usr/bin/python3", "-m", "torch.distributed.run")
    assert argv[-3:] == ("-m", "engine.train", str(RUN / "config.yaml"))
    assert "--rdzv-endpoint=127.0.0.1:0" in argv


def test_hostile_host_names_stay_inside_the_run_folder() -> None:
    plan = build_local_plan(config(), node_facts(hostname="../../etc/x; rm -rf ~"), RUN)
    assert all(".." not in Path(name).parts for name, _ in plan.files)
    assert Path(plan.nodes[0].log_dir).parent == RUN / "logs"


def test_plan_script_runs_the_same_command_in_the_same_environment(tmp_path: Path) -> None:
    """plan.sh is run for real, with a command that reports how it was called; blanks and quotes in every path."""
    run_path = tmp_path / "it's a $(run)" / "20260101-000000-abcdef"
    reporter = tmp_path / "report me.py"
    reporter.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))\n"
    )
    reporter.chmod(0o700)
    cwd = tmp_path / "where I am"
    cwd.mkdir()
    node = node_facts("vm", python=str(reporter), cwd=str(cwd), python_path="/src;echo no:/b c")
    plan = build_local_plan(config(ranks_per_node=2), node, run_path)
    for name, text in plan.files:
        (run_path / name).parent.mkdir(parents=True, exist_ok=True)
        (run_path / name).write_text(text)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "KEPT": "yes"}
    output = subprocess.run(["sh", run_path / "plan.sh"], env=env, capture_output=True, text=True, check=True).stdout
    argv, folder, variables = json.loads(output)
    assert argv == list(plan.nodes[0].argv[1:])
    assert folder == str(cwd)
    assert variables["KEPT"] == "yes"
    assert environment(plan).items() <= variables.items()

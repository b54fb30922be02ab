"""Plans for this machine: its GPUs and its Python, the ranks that it can have, and what is laid into the run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
from testkit import ROOT, write_program
from testkit.fake_plan import node_facts

from cluster.control.runner import SurveyOptions
from cluster.launch.local import RUNNER, build_local_plan, probe_local_node, visible_gpus
from cluster.plan import LaunchPlan, MachineFacts, choose_backend, node_spec, with_exclusive
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig

RUN = Path("/runs/my exp/20260101-000000-abcdef")


def config(**cluster: Any) -> RunConfig:
    return RunConfig(cluster=ClusterConfig(**cluster))


def plan(gpus: int = 0, cores: int = 8, **cluster: Any) -> LaunchPlan:
    return build_local_plan(config(**cluster), node_facts(gpus=gpus, cores=cores), RUN)


def environment(plan: LaunchPlan) -> dict[str, str]:
    return {variable.name: variable.value for variable in plan.nodes[0].environment}


@pytest.mark.parametrize(
    ("gpus", "ranks", "asked", "backend", "world_size", "reason"),
    [
        (0, None, "auto", "gloo", 1, "on the CPU: 0 visible GPUs for 1 rank"),
        (0, 4, "auto", "gloo", 4, "on the CPU: 0 visible GPUs for 4 ranks"),
        (8, None, "auto", "nccl", 8, "8 visible GPUs for 8 ranks"),
        (8, 4, "auto", "nccl", 4, "8 visible GPUs for 4 ranks"),
        (1, 4, "auto", "gloo", 4, "on the CPU: 1 visible GPU for 4 ranks"),
        (8, 4, "gloo", "gloo", 4, "cluster.backend=gloo"),
        (8, None, "gloo", "gloo", 1, "cluster.backend=gloo"),
        (2, 2, "nccl", "nccl", 2, "cluster.backend=nccl"),
    ],
)
def test_nccl_exactly_when_every_rank_has_a_gpu_and_the_reason_names_the_facts(
    gpus: int, ranks: int | None, asked: str, backend: str, world_size: int, reason: str
) -> None:
    found = plan(gpus, ranks_per_node=ranks, backend=asked)
    assert (found.backend.name, found.world_size, found.backend.reason) == (backend, world_size, reason)
    assert f"--nproc-per-node={world_size}" in found.nodes[0].argv


def test_nccl_without_enough_gpus_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"1 visible GPU for 2 ranks.*cluster\.backend=gloo"):
        choose_backend(config(backend="nccl", ranks_per_node=2), node_facts(gpus=1))


def test_machines_that_no_local_launch_reaches_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.nodes=n\[1-4\] names other machines; add cluster=local"):
        RUNNER.survey(config(nodes="n[1-4]"), SurveyOptions())


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
    found = plan(cores=cores, ranks_per_node=ranks, threads_per_rank=threads).nodes[0].environment
    assert {one.name: (one.value, one.reason) for one in found}["OMP_NUM_THREADS"] == expected


def test_a_run_on_the_cpu_hides_gpus_and_one_on_gpus_leaves_their_choice_alone() -> None:
    on_cpu, on_gpus = environment(plan(1, ranks_per_node=2)), environment(plan(2))
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_cpu["GLOO_SOCKET_IFNAME"]) == ("", "lo")
    assert "CUDA_VISIBLE_DEVICES" not in on_gpus
    assert on_gpus["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert on_gpus["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


@pytest.mark.parametrize(("gpus", "chosen", "exclusive"), [(2, False, True), (2, True, False), (0, False, False)])
def test_a_run_on_gpus_keeps_the_machine_unless_it_was_given_its_own(gpus: int, chosen: bool, exclusive: bool) -> None:
    found = build_local_plan(config(), replace(node_facts(gpus=gpus), has_chosen_gpus=chosen), RUN)
    assert node_spec(found, found.nodes[0], lease_s=None).exclusive is exclusive
    assert not with_exclusive(found, exclusive=False).is_exclusive


def test_ranks_read_the_run_folder_take_no_fixed_port_and_their_supervisor_finds_all_files_there() -> None:
    found = plan(ranks_per_node=2)
    (node,), spec = found.nodes, node_spec(found, found.nodes[0], lease_s=60.0)
    assert node.argv == (
        *("/usr/bin/python3", "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", f"--log-dir={RUN}/logs/node1/torchrun"),
        *("--max-restarts=0", f"--rdzv-id={RUN.name}", "-m", "engine.train", f"{RUN}/config.yaml"),
    )
    assert (spec.node, spec.folder, spec.files, spec.container) == ("node1", str(RUN), (), None)
    assert (spec.environment["BURST_NODE"], spec.lease_s) == ("node1", 60.0)


def test_hostile_host_names_stay_inside_the_run_folder() -> None:
    found = build_local_plan(config(), node_facts(hostname="../../etc/x; rm -rf ~"), RUN)
    assert all(".." not in Path(name).parts for name, _ in found.files)
    assert Path(found.nodes[0].log_dir).parent == RUN / "logs"


def test_plan_script_runs_the_same_command_in_the_same_environment(tmp_path: Path) -> None:
    """plan.sh is run for real, with a command that reports how it was called; blanks and quotes in every path."""
    run_path, cwd = tmp_path / "it's a $(run)" / RUN.name, tmp_path / "where I am"
    body = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"
    reporter = write_program(tmp_path / "report me.py", body, "/usr/bin/env python3")
    cwd.mkdir()
    facts = node_facts("vm", python=str(reporter), cwd=str(cwd), python_path="/src;echo no:/b c")
    found = build_local_plan(config(ranks_per_node=2), facts, run_path)
    for name, text in found.files:
        (run_path / name).parent.mkdir(parents=True, exist_ok=True)
        (run_path / name).write_text(text)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "KEPT": "yes"}
    output = subprocess.run(["sh", run_path / "plan.sh"], env=env, capture_output=True, text=True, check=True).stdout
    argv, folder, variables = json.loads(output)
    assert (argv, folder) == (list(found.nodes[0].argv[1:]), str(cwd))
    assert {"KEPT": "yes", **environment(found)}.items() <= variables.items()


# --- this machine -----------------------------------------------------------------------------------------------------

TWO = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n"
MIG = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\n"


@pytest.mark.parametrize(
    ("listing", "variable", "count"),
    [
        ("", None, 0),
        ("No devices were found\n", None, 0),
        (TWO, None, 2),
        (MIG, None, 1),
        (TWO, "1", 1),
        (TWO, "0,1", 2),
        (TWO, "", 0),
        (TWO, "-1", 0),
        (TWO, "0,-1,1", 1),
        (TWO, "0,1,2,3", 2),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_use(listing: str, variable: str | None, count: int) -> None:
    assert visible_gpus(listing, {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}) == count


@pytest.mark.parametrize(("script", "gpus"), [(f"printf '{TWO}'", 2), (f"printf '{TWO}'; exit 9", 0), ("exit 127", 0)])
def test_probe_counts_gpus_only_when_the_tool_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpus: int
) -> None:
    write_program(tmp_path / "bin/nvidia-smi", script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (probe_local_node().gpus, probe_local_node().has_chosen_gpus) == (gpus, False)


def test_probe_tells_where_the_ranks_find_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/mine:{ROOT}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    place = (sys.executable, str(Path.cwd()), f"{ROOT}:/mine")
    assert probe_local_node() == MachineFacts(gethostname(), len(os.sched_getaffinity(0)), 0, *place, True)

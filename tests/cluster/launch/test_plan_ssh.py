from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from testkit.plan_fleet import CODE, node, nodes, run_config

from cluster.launch.ssh import build_ssh_plan, fleet_warnings, least_hardware
from cluster.plan import LaunchPlan, node_spec, with_files
from cluster.plan_nodes import node_folders
from engine.config.errors import ConfigError
from engine.config.settings import config_from_dict
from engine.planning.memory.capacity import Gpu, Hardware

RUN = Path("/runs/my exp/20260101-000000-abcdef")
FOLDER = f"/home/me/.burst/runs/{RUN.name}"
DOCKER = {"container": {"runtime": "docker", "image": "burst:1"}}


def plan(count: int = 2, *, gpus: int = 0, **sections: object) -> LaunchPlan:
    return build_ssh_plan(run_config(**sections), nodes(count, gpus=gpus), CODE, RUN)


def environment(plan: LaunchPlan, index: int = 0) -> dict[str, str]:
    return {variable.name: variable.value for variable in plan.nodes[index].environment}


def test_command_of_a_bare_node_word_for_word() -> None:
    assert plan(cluster={"ranks_per_node": 2}).nodes[1].argv == (
        "/opt/venv/bin/python",
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--master-addr=10.0.0.1",
        "--master-port=23456",
        "--local-addr=10.0.0.2",
        f"--log-dir={FOLDER}/logs/n2/torchrun",
        "--max-restarts=0",
        f"--rdzv-id={RUN.name}",
        "-m",
        "engine.train",
        f"{FOLDER}/config.yaml",
    )


def test_environment_of_a_node_without_gpus_word_for_word() -> None:
    assert environment(plan(cluster={"ranks_per_node": 2}), 1) == {
        "BURST_RUN_ID": RUN.name,
        "BURST_NODE": "n2",
        "BURST_RANK_LOGS": f"{FOLDER}/logs/n2",
        "OMP_NUM_THREADS": "8",
        "PYTHONSAFEPATH": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": f"/home/me{CODE[1:]}",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{FOLDER}/logs/n2/flight_recorder_rank",
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def test_environment_of_a_node_with_gpus_talks_by_nccl_and_logs_into_the_run_folder() -> None:
    found = environment(plan(gpus=8))
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert found["NCCL_IB_DISABLE"] == "1"
    assert found["NCCL_DEBUG_FILE"].startswith(f"{FOLDER}/logs/n1/")
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_settings_of_the_user_are_stronger_than_ours_and_every_variable_has_a_reason() -> None:
    settings = ["OMP_NUM_THREADS=3", "GLOO_SOCKET_IFNAME=rail0", "EMPTY=", "EQUALS=a=b"]
    found = plan(cluster={"environment": settings})
    values = environment(found)
    assert (values["OMP_NUM_THREADS"], values["GLOO_SOCKET_IFNAME"]) == ("3", "rail0")
    assert (values["EMPTY"], values["EQUALS"]) == ("", "a=b")
    assert all(variable.reason for variable in found.nodes[0].environment)


def test_ranks_read_what_the_nodes_decided() -> None:
    found = plan(3, gpus=4)
    written = config_from_dict(yaml.safe_load(dict(found.files)["config.yaml"]))
    assert written == found.config
    cluster = written.cluster
    assert (cluster.launcher, cluster.nodes, cluster.num_nodes) == ("ssh", "n[1-3]", 3)
    assert (cluster.backend, cluster.ranks_per_node, cluster.world_size) == ("nccl", 4, 12)
    assert cluster.topology_groups == 3


def test_a_fleet_uses_the_backend_that_its_weakest_node_can() -> None:
    mixed = (node("n1", 1, gpus=8), node("n2", 2))
    found = build_ssh_plan(run_config(cluster={"ranks_per_node": 2}), mixed, CODE, RUN)
    assert found.backend.name == "gloo"
    with pytest.raises(ConfigError, match="n\\[1-2\\] has 0 visible GPUs for 2 ranks"):
        build_ssh_plan(run_config(cluster={"ranks_per_node": 2, "backend": "nccl"}), mixed, CODE, RUN)


def test_memory_is_planned_for_the_node_that_has_least_of_it() -> None:
    small = Gpu("L4", 23034 << 20)
    third = dataclasses.replace(node("n3", 3, memory_bytes=None), gpus=(small, small))
    mixed = (node("n1", gpus=2), node("n2", 2, memory_bytes=1000), third)
    assert least_hardware(mixed[::2]) == Hardware((small, small), 66657892434, "memory of n1")
    assert least_hardware(mixed) == Hardware((), 970, "memory of n2")
    assert least_hardware(mixed[2:]).host_bytes is None


def test_environment_values_never_stand_in_a_command() -> None:
    secret = "canary-7f3a"
    for container in ({}, DOCKER):
        found = plan(cluster={"environment": [f"TOKEN={secret}"], **container})
        assert all(secret not in word for one in found.nodes for word in one.argv)


def test_command_of_a_container_word_for_word() -> None:
    found = plan(cluster={"ranks_per_node": 2, **DOCKER})
    name = f"burst-{RUN.name}-n2"
    assert found.nodes[1].container == name
    assert found.nodes[1].argv[:32] == (
        *("docker", "run", "--rm", "--init", "--name", name, "--label", f"burst.run={RUN.name}"),
        *("--network=host", "--user", "1000:100", "--workdir", FOLDER, "--env-file", f"{FOLDER}/env/n2.env"),
        *("--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *("--volume", "/home/me/.burst/cache:/home/me/.burst/cache"),
        *("--volume", f"/home/me{CODE[1:]}:/home/me{CODE[1:]}:ro"),
        *("--volume", f"{FOLDER}:{FOLDER}"),
        *("--entrypoint", "python3", "burst:1", "-m", "torch.distributed.run", "--nnodes=2"),
    )
    assert "--privileged" not in found.nodes[1].argv


def test_a_container_gets_gpus_only_with_nccl_and_infiniband_only_where_it_is() -> None:
    with_ib = nodes(2, gpus=8, has_infiniband_devices=True)
    fabric = build_ssh_plan(run_config(cluster=DOCKER), with_ib, CODE, RUN).nodes[0].argv
    assert {"--gpus=all", "--device=/dev/infiniband", "--cap-add=IPC_LOCK"} <= set(fabric)
    plain = plan(gpus=8, cluster=DOCKER).nodes[0].argv
    assert "--gpus=all" in plain
    assert "--device=/dev/infiniband" not in plain
    assert "--gpus=all" not in plan(gpus=8, cluster={"backend": "gloo", **DOCKER}).nodes[0].argv


def test_options_of_the_configuration_take_the_place_of_those_for_the_machine() -> None:
    container = {**DOCKER["container"], "run_options": ["--shm-size", "8g"], "command": "sudo podman"}
    argv = plan(gpus=8, cluster={"container": container}).nodes[0].argv
    assert argv[:3] == ("sudo", "podman", "run")
    assert "--shm-size" in argv
    assert not {"--gpus=all", "--ipc=host", "--ulimit"} & set(argv)


def test_ranks_in_a_container_keep_the_groups_of_their_user_and_cache_kernels_where_they_may_write() -> None:
    one = node("n1", groups=(27, 100, 5001))
    found = build_ssh_plan(run_config(cluster=DOCKER), (one,), CODE, RUN)
    argv = found.nodes[0].argv
    assert [word for word in argv if word.startswith("--group-add")] == ["--group-add=27", "--group-add=5001"]
    kernels = Path(environment(found)["TRITON_CACHE_DIR"])
    volumes = {argv[index + 1] for index, word in enumerate(argv) if word == "--volume"}
    assert f"{kernels.parent}:{kernels.parent}" in volumes
    kept = {"container": {**DOCKER["container"], "run_options": ["--group-add=keep-groups"]}}
    argv = build_ssh_plan(run_config(cluster=kept), (one,), CODE, RUN).nodes[0].argv
    assert [word for word in argv if word.startswith("--group-add")] == ["--group-add=keep-groups"]


def test_containers_see_data_and_mounts_under_their_own_names() -> None:
    settings = {"container": {**DOCKER["container"], "mounts": ["/models", "/scratch:rw"]}}
    data = {"format": "text", "paths": ["/data/*.txt", "~/corpus/a.txt"], "prepared_dir": "~/tokens"}
    config = run_config(cluster=settings, data=data)
    found = build_ssh_plan(config, nodes(2), CODE, RUN)
    argv = found.nodes[0].argv
    volumes = {argv[index + 1] for index, word in enumerate(argv) if word == "--volume"}
    assert {"/data:/data:ro", "/home/me/corpus/a.txt:/home/me/corpus/a.txt:ro", "/models:/models:ro"} <= volumes
    assert {"/scratch:/scratch", "/home/me/tokens:/home/me/tokens"} <= volumes
    assert node_folders(found.config, "/home/me") == ("/home/me/.burst/cache", "/home/me/tokens")


def test_environment_file_of_a_container_is_what_docker_reads() -> None:
    found = plan(cluster={"environment": ["GREETING=it's me"], **DOCKER})
    text = dict(found.files)["env/n1.env"]
    assert "GREETING=it's me\n" in text
    assert "HOME=/home/me\n" in text
    assert "GREETING='it'\"'\"'s me'\n" in dict(plan(cluster={"environment": ["GREETING=it's me"]}).files)["env/n1.env"]


def test_a_supervisor_is_told_all_it_needs() -> None:
    prediction = ("memory_plan.json", "{}")  # which the ranks' summary sets beside what they measure
    found = with_files(plan(cluster={"ranks_per_node": 2}), prediction)
    spec = node_spec(found, found.nodes[1], lease_s=60.0)
    assert (spec.run_id, spec.node, spec.node_rank, spec.num_nodes) == (RUN.name, "n2", 1, 2)
    assert (spec.first_rank, spec.local_ranks, spec.folder, spec.exclusive) == (2, 2, FOLDER, True)
    files = dict(spec.files)
    assert set(files) == {"config.yaml", "env/n2.env", "run.json", "memory_plan.json"}
    state = yaml.safe_load(files["run.json"])
    assert (state["state"], state["host"], state["pid"]) == ("starting", None, None)


def test_what_is_odd_about_the_network_is_said_once() -> None:
    odd = [
        dataclasses.replace(one, environment=dataclasses.replace(one.environment, notes=("no topology",)))  # type: ignore[type-var]
        for one in nodes(3)
    ]
    assert fleet_warnings(odd, run_config()) == ("n[1-3]: no topology",)

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from testkit.fake_plan import CODE, node, nodes, run_config
from testkit.known_facts import known_facts

from cluster.agent.messages import Spec
from cluster.launch.ssh import (
    build_ssh_plan,
    fleet_warnings,
    least_hardware,
    resolve_fleet,
    with_absolute_paths,
    with_shared_checkpoints,
)
from cluster.plan import LaunchPlan, node_spec, with_files
from cluster.plan_nodes import fixed_part, node_folders
from cluster.survey.network import NetInterface
from engine.config.errors import ConfigError
from engine.config.settings import config_from_dict
from engine.predict.memory import Gpu, Hardware

RUN = Path("/runs/my exp/20260101-000000-abcdef")
FOLDER = f"/home/me/.burst/runs/{RUN.name}"
DOCKER = {"container": {"runtime": "docker", "image": "burst:1"}}


def plan(count: int = 2, *, gpus: int = 0, **sections: object) -> LaunchPlan:
    return build_ssh_plan(run_config(**sections), nodes(count, gpus=gpus), CODE, RUN)


def environment(plan: LaunchPlan, index: int = 0) -> dict[str, str]:
    return {variable.name: variable.value for variable in plan.nodes[index].environment}


def volumes(argv: tuple[str, ...]) -> set[str]:
    return {argv[index + 1] for index, word in enumerate(argv) if word == "--volume"}


def test_command_and_environment_of_a_bare_node_word_for_word() -> None:
    found = plan(cluster={"ranks_per_node": 2})
    assert found.nodes[1].argv == (
        *("/opt/venv/bin/python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--node-rank=1"),
        *("--rdzv-backend=static", "--master-addr=10.0.0.1", "--master-port=23456", "--local-addr=10.0.0.2"),
        *(f"--log-dir={FOLDER}/logs/n2/torchrun", "--max-restarts=0", f"--rdzv-id={RUN.name}"),
        *("-m", "engine.train", f"{FOLDER}/config.yaml"),
    )
    assert environment(found, 1) == {
        **{"BURST_RUN_ID": RUN.name, "BURST_NODE": "n2", "BURST_RANK_LOGS": f"{FOLDER}/logs/n2"},
        **{"OMP_NUM_THREADS": "8", "PYTHONSAFEPATH": "1", "PYTHONFAULTHANDLER": "1"},
        **{"PYTHONPATH": f"/home/me{CODE[1:]}", "CUDA_VISIBLE_DEVICES": "", "TORCH_FR_BUFFER_SIZE": "2000"},
        **{"TORCH_FR_DUMP_TEMP_FILE": f"{FOLDER}/logs/n2/flight_recorder_rank", "GLOO_SOCKET_IFNAME": "eth0"},
    }


def test_environment_of_a_node_with_gpus_talks_by_nccl_and_logs_into_the_run_folder() -> None:
    found = environment(plan(gpus=8))
    assert (found["NCCL_SOCKET_IFNAME"], found["NCCL_IB_DISABLE"]) == ("=eth0", "1")
    assert found["NCCL_DEBUG_FILE"].startswith(f"{FOLDER}/logs/n1/")
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_settings_of_the_user_are_stronger_than_ours_stand_in_no_command_and_every_variable_has_a_reason() -> None:
    settings = ["OMP_NUM_THREADS=3", "GLOO_SOCKET_IFNAME=rail0", "EMPTY=", "EQUALS=a=b", "GREETING=it's canary-7f3a"]
    bare, contained = (plan(cluster={"environment": settings, **container}) for container in ({}, DOCKER))
    values = environment(bare)
    assert (values["OMP_NUM_THREADS"], values["GLOO_SOCKET_IFNAME"]) == ("3", "rail0")
    assert (values["EMPTY"], values["EQUALS"]) == ("", "a=b")
    assert all(variable.reason for variable in bare.nodes[0].environment)
    assert all("canary-7f3a" not in word for found in (bare, contained) for one in found.nodes for word in one.argv)
    text = dict(contained.files)["env/n1.env"]  # as docker reads it
    assert "GREETING=it's canary-7f3a\n" in text
    assert "HOME=/home/me\n" in text
    assert "GREETING='it'\"'\"'s canary-7f3a'\n" in dict(bare.files)["env/n1.env"]


def test_ranks_read_what_the_nodes_decided() -> None:
    found = plan(3, gpus=4)
    written = config_from_dict(yaml.safe_load(dict(found.files)["config.yaml"]))
    assert written == found.config
    cluster = written.cluster
    assert (cluster.launcher, cluster.nodes, cluster.num_nodes) == ("ssh", "n[1-3]", 3)
    assert (cluster.backend, cluster.ranks_per_node, cluster.world_size, cluster.topology_groups) == ("nccl", 4, 12, 3)


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
    assert least_hardware(mixed[2:]) == Hardware((small, small), None, "unknown")


def test_paths_are_absolute_unless_they_are_of_a_home_and_checkpoints_lie_where_all_see_them() -> None:
    data = {"format": "jsonl", "paths": ["a.txt", "~/b.txt", "/c.txt"], "tokenizer": "t.json", "prepared_dir": "p"}
    cluster = {"ssh": {"identity_file": "~/.ssh/key", "known_hosts": "k", "jump": "gate"}, "shared_folder": "/shared"}
    settings = {"cluster": cluster, "attention": {"blocks_file": "b.json"}}
    here, found = Path.cwd(), with_absolute_paths(run_config(data={**data, "chat_template": "c.jinja"}, **settings))
    assert found.data.paths == (f"{here}/a.txt", "~/b.txt", "/c.txt")
    told = (found.data.tokenizer, found.data.chat_template, found.data.prepared_dir, found.attention.blocks_file)
    assert told == tuple(f"{here}/{name}" for name in ("t.json", "c.jinja", "p", "b.json"))
    ssh = found.cluster.ssh
    assert (ssh.identity_file, ssh.config_file, ssh.jump) == (str(Path("~/.ssh/key").expanduser()), None, "gate")
    assert ssh.known_hosts == f"{here}/k"
    for tokenizer, template in (("bytes", None), ("bpe", "chatml")):
        named = run_config(data={"tokenizer": tokenizer, "chat_template": template})
        assert with_absolute_paths(named) == named
    assert with_shared_checkpoints(found, "me").train.checkpoint.folder == "/shared/.burst-me/checkpoints"
    for own in (run_config(), run_config(cluster=cluster, train={"checkpoint": {"folder": "/mine"}})):
        assert with_shared_checkpoints(own, "me") == own


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


@pytest.mark.parametrize(
    ("facts", "container", "has", "lacks"),
    [
        ({}, {}, set(), {"--gpus=all", "--device=/dev/infiniband"}),
        ({"gpus": 8, "backend": "gloo"}, {}, set(), {"--gpus=all"}),
        ({"gpus": 8}, {}, {"--gpus=all", "--ipc=host"}, {"--device=/dev/infiniband"}),
        (
            {"gpus": 8, "has_infiniband_devices": True},
            {},
            {"--gpus=all", "--device=/dev/infiniband", "--cap-add=IPC_LOCK"},
            set(),
        ),
        (
            {"gpus": 8},
            {"run_options": ["--shm-size", "8g"], "command": "sudo podman"},
            {"sudo", "podman", "--shm-size"},
            {"docker", "--gpus=all", "--ipc=host", "--ulimit"},
        ),
        ({"groups": (27, 100, 5001)}, {}, {"--group-add=27", "--group-add=5001"}, {"--group-add=100"}),
        (
            {"groups": (27, 100, 5001)},
            {"run_options": ["--group-add=keep-groups"]},
            {"--group-add=keep-groups"},
            {"--group-add=27", "--group-add=5001"},
        ),
    ],
)
def test_a_container_may_use_what_the_node_has_unless_the_configuration_says_what(
    facts: dict[str, Any], container: dict[str, Any], has: set[str], lacks: set[str]
) -> None:
    facts = dict(facts)
    backend = facts.pop("backend", "auto")
    config = run_config(cluster={"backend": backend, "container": {**DOCKER["container"], **container}})
    words = set(build_ssh_plan(config, nodes(2, **facts), CODE, RUN).nodes[0].argv)
    assert has <= words
    assert not lacks & words


def test_containers_see_data_mounts_and_a_cache_of_kernels_under_their_own_names() -> None:
    settings = {"container": {**DOCKER["container"], "mounts": ["/models", "/scratch:rw", "/out"]}}
    data = {"format": "text", "paths": ["/data/*.txt", "~/corpus/a.txt"], "prepared_dir": "~/tokens"}
    state = {"checkpoint": {"folder": "/out", "resume_from": "~/old/checkpoints/step-00000010"}}
    found = plan(cluster=settings, data=data, train=state)
    mounted, kernels = volumes(found.nodes[0].argv), Path(environment(found)["TRITON_CACHE_DIR"])
    assert {"/data:/data:ro", "/home/me/corpus/a.txt:/home/me/corpus/a.txt:ro", "/models:/models:ro"} <= mounted
    assert {"/scratch:/scratch", "/home/me/tokens:/home/me/tokens", f"{kernels.parent}:{kernels.parent}"} <= mounted
    assert {"/home/me/old/checkpoints:/home/me/old/checkpoints:ro", "/out:/out"} <= mounted  # what is written stays so
    data = {"format": "text", "messages_field": "m", "tokenizer": "/t/t.json", "chat_template": "/c.jinja"}
    data |= {"paths": ["/d/x?/y", "/e/[ab]"]}
    whole = {"checkpoint": {"resume_from": "/old/run"}}
    argv = plan(cluster=DOCKER, data=data, train=whole, model={"init_from": "/m"}).nodes[0].argv
    of_nodes = ("/home/me/.burst/cache", f"/home/me{CODE[1:]}", FOLDER)
    read = {path for volume in volumes(argv) if (path := volume.partition(":")[0]) not in of_nodes}
    assert read == {"/t", "/c.jinja", "/d", "/e", "/old/run", "/m"}
    plain = plan(cluster=DOCKER, data={**data, "messages_field": None, "chat_template": None})
    assert {"/t/t.json:/t/t.json:ro"} <= volumes(plain.nodes[0].argv)
    assert fixed_part("/*.txt") == "/"
    assert node_folders(found.config, "/home/me") == ("/home/me/.burst/cache", "/home/me/tokens", "/out")


def test_a_supervisor_is_told_all_it_needs() -> None:
    prediction = ("memory_plan.json", "{}")  # which the ranks' summary sets beside what they measure
    saving = {"checkpoint": {"every_steps": 1, "stop_grace_s": 77.0}}
    docker = {"container": {**DOCKER["container"], "command": "sudo docker"}}
    found = with_files(plan(cluster={"ranks_per_node": 2, **docker}, train=saving), prediction)
    spec, node = node_spec(found, found.nodes[1], lease_s=60.0), found.nodes[1]
    assert spec._replace(files=()) == Spec(
        **{"run_id": RUN.name, "node": "n2", "node_rank": 1, "num_nodes": 2, "first_rank": 2, "local_ranks": 2},
        **{"folder": FOLDER, "cwd": FOLDER, "argv": node.argv, "environment": environment(found, 1), "files": ()},
        **{"container": f"burst-{RUN.name}-n2", "engine": ("sudo", "docker"), "lease_s": 60.0, "stop_grace_s": 77.0},
        exclusive=True,
    )
    files = dict(spec.files)
    assert set(files) == {"config.yaml", "env/n2.env", "run.json", "memory_plan.json"}
    state = yaml.safe_load(files["run.json"])
    assert (state["state"], state["host"], state["pid"], state["world_size"]) == ("starting", None, None, 4)
    assert node_spec(plan(), plan().nodes[0], lease_s=None).stop_grace_s == 12.0


def test_what_is_odd_about_the_network_is_said_once() -> None:
    facts = [
        known_facts(f"n{number}", interface=NetInterface("eth0", is_up=True), trouble="no topology")
        for number in (1, 2, 3)
    ]
    odd = [dataclasses.replace(one, facts=told) for one, told in zip(nodes(3), facts, strict=True)]
    assert fleet_warnings(odd, run_config()) == ("n[1-3]: no topology",)


def test_threads_are_as_many_as_the_node_with_fewest_cores_has() -> None:
    poor = known_facts("n2", interface=node("n2", 2).facts.interface.interface, cores=4)
    two = (node("n1"), dataclasses.replace(node("n2", 2), facts=poor))
    assert resolve_fleet(run_config(), two)[0].cluster.threads_per_rank == 4

"""Testbeds as values: addresses, commands and files, without root."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from cluster.ssh.hosts import is_host_name
from cluster.testbed.build import build_plan
from cluster.testbed.folder import Fault, TestbedFolder, TestbedState, state_root
from cluster.testbed.machine import missing_requirements
from cluster.testbed.network import BLOCKS, Network, block_network
from cluster.testbed.node import Node
from cluster.testbed.spec import TestbedSpec, format_rate, parse_rate
from cluster.testbed.texts import is_cluster_config, passwd_text
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError

STATE = TestbedState(TestbedSpec("lab", nodes=3, rails=2, rate_bits_per_s=100_000_000, docker=True), block=5)
FOLDER = TestbedFolder(Path("/x/lab"))


def file_of(node: str, name: str) -> str:
    """The text of a file of a node."""
    files = Node(STATE, node, FOLDER.node(node)).files("a key\n", "root:x:0:0::/root:/bin/sh\n")
    return next(text for path, text in files.items() if path.name == name)


@pytest.mark.parametrize(
    ("name", "nodes", "expected"),
    [("testbed", 2, ("tb1", "tb2")), ("lab", 1, ("lab1",)), ("lab2", 2, ("lab2-1", "lab2-2")), ("a-", 1, ("a-1",))],
)
def test_nodes_are_named_after_their_testbed(name, nodes, expected):
    names = TestbedSpec(name, nodes).node_names

    assert names == expected
    assert all(is_host_name(node) for node in names)


@pytest.mark.parametrize("name", ["", "Lab", "-lab", "1lab", "lab/..", "lab.x", "a" * 13, "läb", "lab\n"])
def test_a_name_that_cannot_name_links_and_hosts_is_refused(name):
    with pytest.raises(ConfigError, match="at most 12 lower-case letters"):
        TestbedSpec(name)


def test_all_mistakes_of_a_testbed_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        TestbedSpec("testbed", nodes=0, rails=9, docker_in_memory=True, hardware="h100x9")

    assert caught.value.problems == (
        "0 nodes: expected 1 to 64",
        "9 rails: expected 0 to 8",
        "no hardware profile 'h100x9'; there are h100x8, h200x8, a100x8 and none",
        "Docker's data in memory, but no Docker: add --docker",
    )


@pytest.mark.parametrize(("text", "bits"), [("200mbit", 200_000_000), ("1.5Gbit", 1_500_000_000), ("64kbit", 64_000)])
def test_a_rate_reads_back_as_it_was_written(text, bits):
    assert parse_rate(text) == bits
    assert parse_rate(format_rate(bits)) == bits


@pytest.mark.parametrize("text", ["", "200", "-1mbit", "1kbit", "9999999gbit", "1mbit; reboot"])
def test_a_rate_without_sense_is_refused(text):
    with pytest.raises(ConfigError, match=r"rate .*expected"):
        parse_rate(text)


def test_blocks_of_addresses_do_not_overlap():
    networks = [block_network(block) for block in range(BLOCKS)]

    assert not any(one.overlaps(other) for one, other in itertools.pairwise(networks))
    assert len(set(networks)) == BLOCKS


def test_every_interface_has_its_own_address_and_rails_are_networks_of_their_own():
    network = STATE.network
    addresses = [network.address(node, name) for node in STATE.spec.node_names for name in STATE.spec.interfaces]

    assert len({*addresses, network.head_address}) == 10
    assert len({network.mac(node, name) for node in STATE.spec.node_names for name in STATE.spec.interfaces}) == 9
    assert network.address("lab2") == "10.100.80.2"
    assert network.address("lab2", "rail1") == "10.100.82.2"


def test_what_a_testbed_adds_to_this_machine_bears_its_name_and_fits():
    commands = list(STATE.network.commands())
    namespaces = [command[3] for command in commands if command[:3] == ("ip", "netns", "add")]
    links = [command[3] for command in commands if command[:3] == ("ip", "link", "add")]

    assert namespaces == ["btb.lab.switch", "btb.lab.lab1", "btb.lab.lab2", "btb.lab.lab3"]
    assert links[0] == "btblab"
    assert len(Network(TestbedSpec("a" * 12), 0).head_link) <= 15


def test_every_link_is_shaped_at_both_ends():
    shaped = [command for command in STATE.network.commands() if "tbf" in command]

    assert len(shaped) == 2 + 3 * 3 * 2
    assert all("100000000bit" in command for command in shaped)
    assert not [command for command in Network(TestbedSpec("lab"), 5).commands() if command[0] == "tc"]


def test_every_node_knows_every_other_by_name():
    hosts = file_of("lab1", "hosts")

    assert "10.100.80.3 lab3\n" in hosts
    assert "10.100.81.3 lab3-rail0\n" in hosts


def test_sshd_takes_keys_only_and_has_one_line_of_environment():
    lines = file_of("lab1", "sshd_config").splitlines()

    assert {"PasswordAuthentication no", "KbdInteractiveAuthentication no", "UsePAM no"} <= set(lines)
    (environment,) = [line for line in lines if line.startswith("SetEnv")]
    assert 'PATH="/x/lab/nodes/lab1/bin:' in environment
    assert 'DOCKER_HOST="unix:///x/lab/nodes/lab1/docker/docker.sock"' in environment
    assert "BURST_PROBE_ROOT" not in environment


def test_only_the_ssh_user_gets_another_home():
    passwd = "root:x:0:0:root:/root:/usr/sbin/nologin\nme:x:1000:1000::/home/me:/bin/zsh\n"

    assert passwd_text(passwd, "/h") == "root:x:0:0:root:/h:/bin/sh\nme:x:1000:1000::/home/me:/bin/zsh\n"
    assert passwd_text(passwd, "/h", "/slow").startswith("root:x:0:0:root:/h:/slow\n")


def test_the_configuration_names_nodes_and_how_to_reach_them(tmp_path):
    plan = build_plan(TestbedSpec("lab", nodes=3, rails=2), tmp_path / "lab.yaml")
    text = plan.files[plan.config_file]
    config = yaml.safe_load(text)

    assert config["nodes"] == "lab[1-3]"
    assert config["interface"] == "rail0"
    assert config["ssh"]["config_file"] == f"{plan.folder}/ssh_config"
    assert set(config) <= set(ClusterConfig.__dataclass_fields__)
    assert is_cluster_config(text)
    assert not is_cluster_config("name: lab\nnodes: lab[1-3]\n")


def test_the_state_survives_the_disk(tmp_path):
    folder = TestbedFolder(tmp_path)
    state = STATE.with_faults("lab2", (Fault("disk_full", "/data"), Fault("sshd_stop")))
    folder.save(state)

    assert folder.load() == state


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": {"name": "../x"}, "block": 0, "faults": {}}'])
def test_a_damaged_state_is_no_state(tmp_path, text):
    (tmp_path / "state.json").write_text(text)

    assert TestbedFolder(tmp_path).load() is None


@pytest.mark.parametrize("path", ["relative", "/has space", '/a"b', "/" + "a" * 61, "/a\nPermitRootLogin yes"])
def test_a_folder_that_configuration_files_would_misread_is_refused(path, monkeypatch):
    monkeypatch.setenv("BURST_TESTBED_DIR", path)
    with pytest.raises(ConfigError, match="expected an absolute path"):
        state_root()


def test_what_is_missing_is_named_with_the_package_that_brings_it(tmp_path):
    problems = missing_requirements(docker=True, platform="linux", root=False, path=str(tmp_path))

    assert "ip and tc not found: apt-get install iproute2" in problems
    assert "sshd not found: apt-get install openssh-server" in problems
    assert any("dockerd" in problem and "docker.io" in problem for problem in problems)
    assert any("needs root" in problem for problem in problems)
    bare = missing_requirements(docker=False, platform="linux", root=True, path=str(tmp_path))
    assert not any("docker" in problem for problem in bare)


def test_other_systems_are_told_that_they_cannot():
    (problem,) = missing_requirements(docker=False, platform="darwin", root=True, path="")

    assert "Linux" in problem

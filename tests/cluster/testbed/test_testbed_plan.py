"""Testbeds as values: addresses, commands and files, without root."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.ssh.hosts import Host, is_host_name
from cluster.testbed.machine import TestbedError, missing_requirements, tool_path
from cluster.testbed.node import passwd_text
from cluster.testbed.plan import network_commands, plan_testbed
from cluster.testbed.spec import TestbedSpec, parse_rate
from cluster.testbed.testbed import Testbed, block_network, is_ours, load_testbed, locked, state_root
from engine.config.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "nodes", "expected", "node_set"),
    [
        ("testbed", 2, ("tb1", "tb2"), "tb[1-2]"),
        ("lab", 1, ("lab1",), "lab1"),
        ("lab2", 2, ("lab2-1", "lab2-2"), "lab2-[1-2]"),
        ("a-", 1, ("a-1",), "a-1"),
    ],
)
def test_nodes_are_named_after_their_testbed(name, nodes, expected, node_set):
    spec = TestbedSpec(name, nodes)
    assert (spec.node_names, spec.node_set) == (expected, node_set)
    assert all(is_host_name(node) for node in expected)


@pytest.mark.parametrize("name", ["", "Lab", "-lab", "1lab", "lab/..", "lab.x", "a" * 13, "läb", "lab\n"])
def test_a_name_that_cannot_name_links_and_hosts_is_refused(name):
    with pytest.raises(ConfigError, match="at most 12 lower-case letters"):
        TestbedSpec(name)


def test_all_mistakes_of_a_testbed_are_told_at_once():
    assert TestbedSpec() == TestbedSpec("testbed", 4, 0, None, False, False, "none", False)
    TestbedSpec(nodes=64, rails=8)
    with pytest.raises(ConfigError) as caught:
        TestbedSpec("testbed", nodes=0, rails=9, docker_in_memory=True, hardware="h100x9")
    assert caught.value.problems == (
        "0 nodes: expected 1 to 64",
        "9 rails: expected 0 to 8",
        "no hardware profile 'h100x9'; there are h100x8, h200x8, a100x8 and none",
        "Docker's data in memory, but no Docker: add --docker",
    )


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200mbit", 200_000_000),
        ("1.5Gbit", 1_500_000_000),
        ("8kbit", 8_000),
        ("1000gbit", 10**12),
        ("50MB/s", 400_000_000),
        ("125 KiB/s", 1_024_000),
    ],
)
def test_a_rate_is_read(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "200", "5MB/h", "-1mbit", "1kbit", "9999999gbit", "1mbit; reboot"])
def test_a_rate_without_sense_is_refused(text):
    with pytest.raises(ConfigError, match=r"rate .*expected"):
        parse_rate(text)


def test_every_link_is_shaped_at_both_of_its_ends():
    testbed = Testbed(Path("/lab"), TestbedSpec("lab", nodes=2, rails=1, rate_bits_per_s=400_000_000), block=0)
    shaped = [" ".join(command) for command in network_commands(testbed) if command[0] == "tc"]
    ends = ["tc qdisc replace dev btblab", "tc -n btb.lab.switch qdisc replace dev head"]
    for node in (1, 2):
        for link in ("eth0", "rail0"):
            ends.append(f"tc -n btb.lab.lab{node} qdisc replace dev {link}")
            ends.append(f"tc -n btb.lab.switch qdisc replace dev {link}.{node}")
    assert shaped == [f"{end} root tbf rate 400000000bit burst 500000b latency 50ms" for end in ends]


def test_a_node_has_addresses_files_and_an_environment_of_its_own():
    spec = TestbedSpec("lab", nodes=2, rails=1, docker=True, hardware="h100x8", slurm=True)
    testbed = Testbed(Path("/lab"), spec, 3, config_file="/lab.yaml", python_folder="/py")
    node, plan = testbed.node("lab2"), plan_testbed(testbed)
    assert (testbed.head_address, node.addresses) == ("10.100.48.254", {"eth0": "10.100.48.2", "rail0": "10.100.49.2"})
    assert str(block_network(3)) == "10.100.48.0/20"
    assert (node.mac("rail0"), node.port("rail0")) == ("02:b7:00:03:01:02", "rail0.2")
    assert node.environment == {
        "PATH": "/lab/nodes/lab2/bin:/py:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "BURST_TESTBED": "lab",
        "BURST_PROBE_ROOT": "/lab/run/lab2/root",
        "SLURM_CONF": "/lab/slurm/slurm.conf",
        "DOCKER_HOST": "unix:///lab/nodes/lab2/docker/docker.sock",
    }
    plain = Host("lab2", "10.100.48.2", key_name="lab2", identity_files=("/lab/client_key",))
    assert testbed.host("lab2") == replace(plain, known_hosts=("/lab/known_hosts",))
    files = {file.removeprefix("/lab/nodes/lab2/") for file in plan.files if "/lab2/" in file}
    etc = {f"etc/{name}" for name in ("hosts", "hostname", "resolv.conf", "passwd", "shadow")}
    assert files == {*etc, "ssh/sshd_config", "docker/daemon.json"}


def test_only_the_ssh_user_gets_another_home():
    passwd = "root:x:0:0:root:/root:/usr/sbin/nologin\nme:x:1000:1000::/home/me:/bin/zsh\n"
    assert passwd_text(passwd, "/h") == "root:x:0:0:root:/h:/bin/sh\nme:x:1000:1000::/home/me:/bin/zsh\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spec": {"name": "../x"}, "block": 0, "faults": {}}'])
def test_a_damaged_state_is_no_state_and_its_folder_is_ours_while_nothing_else_is_in_it(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    assert load_testbed(tmp_path) is None
    names = "client_key client_key.pub known_hosts ssh_config shared nodes slurm run .state.json-x"
    for name in (*names.split(), "thesis"):
        assert is_ours(tmp_path)
        (tmp_path / name).touch()
    assert not is_ours(tmp_path)
    assert not is_ours(tmp_path / "thesis")
    assert is_ours(tmp_path / "none")


def test_who_works_on_a_folder_is_waited_for_but_not_for_ever(tmp_path):
    with locked(tmp_path), pytest.raises(TestbedError, match="in use by another"), locked(tmp_path, patience_s=0.1):
        pass


@pytest.mark.parametrize("path", ["relative", "/has space", '/a"b', "/" + "a" * 61, "/a\nPermitRootLogin yes"])
def test_a_folder_that_configuration_files_would_misread_is_refused(path, monkeypatch):
    monkeypatch.setenv("BURST_TESTBED_DIR", path)
    with pytest.raises(ConfigError, match="expected an absolute path"):
        state_root()


def test_what_is_missing_is_named_with_the_package_that_brings_it(tmp_path):
    needs = {
        *("ip and tc: iproute2", "nsenter and unshare and setsid and findmnt: util-linux", "mount: mount"),
        *("hostname: hostname", "ssh-keygen: openssh-client", "sshd: openssh-server"),
    }
    docker = {"dockerd and docker: docker.io", "iptables: iptables"}
    slurm = {"slurmctld: slurmctld", "slurmd: slurmd", "sbatch: slurm-client", "munged: munge"}

    def missing(**wanted):
        problems = missing_requirements(platform="linux", path=str(tmp_path), **wanted)
        return {line.replace(" not found: apt-get install ", ": ") for line in problems}

    assert missing(docker=False, root=True) == needs
    no_root = "a testbed needs root (network namespaces, mounts, sshd): run it with sudo"
    assert missing(docker=True, slurm=True, root=False) == {*needs, *docker, *slurm, no_root}
    assert (tool_path("true"), tool_path("no-such-daemon")) == (shutil.which("true"), "/usr/sbin/no-such-daemon")
    told = missing_requirements(docker=False, platform="darwin", root=True, path="")
    assert told == ["a testbed is made of Linux network namespaces; this is darwin"]

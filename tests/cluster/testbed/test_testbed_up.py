"""Testbeds for real: up, several at once, down after anything."""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from testkit.connections import connect, run_on
from testkit.image_rig import busybox_tree
from testkit.machine_clock import at_most
from testkit.testbed_fixture import next_name, owner_of, remove_abandoned
from testkit.waiting import wait_for

from cluster.testbed import plan
from cluster.testbed.build import build_plan, open_testbed, up
from cluster.testbed.machine import TestbedError, run_command
from cluster.testbed.spec import TestbedSpec
from cluster.testbed.status import TestbedStatus, read_all, read_status
from cluster.testbed.teardown import Removed, leftovers, standing_names, tear_down
from cluster.testbed.testbed import BLOCKS, Testbed, block_network, state_root

IMAGE = "burst-testbed-test:1"
_SECONDS = 2_000_000 + os.getpid()  # how long a process of a test sleeps: no other has this argument
# It kills itself: another process could be held up until all is built.
_UP = """
import os, signal, sys, threading, time
from pathlib import Path
from cluster.testbed.build import up
from cluster.testbed.spec import TestbedSpec

def kill_at(moment):
    while not os.path.exists(moment):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill_at, args=(sys.argv[3],), daemon=True).start()
up(TestbedSpec(sys.argv[1], nodes=3, rails=1, docker=True, slurm=True), Path(sys.argv[2]))
"""


def test_a_node_has_a_name_links_a_home_and_a_python_of_its_own(testbed4):
    first, second, *_, last = testbed4.node_names
    for node in testbed4.node_names:
        assert run_on(testbed4, node, "sh", "-c", "hostname; ls /sys/class/net").split() == [node, "eth0", "lo"]
    assert run_on(testbed4, first, "sh", "-c", "touch ~/mine; ls ~") == "mine"
    assert run_on(testbed4, second, "sh", "-c", "ls ~") == ""
    assert run_on(testbed4, first, "sh", "-c", "rm ~/mine; ls ~") == ""
    assert run_on(testbed4, first, "python3", "-c", "import sys; print(sys.prefix)") == sys.prefix
    assert run_on(testbed4, first, "getent", "hosts", last).split() == [testbed4.node(last).address, last]


# As `useradd` does it: a new file takes the name of the old one, which takes away what is mounted there anywhere. The
# /etc in question is a copy: testbeds that stand on this machine are left alone.
_ADD_USER = """
mount --bind "$1/machine" /etc
mkfifo "$1/held" "$1/added"
unshare --mount sh -ec 'sh "$2" n1 "$1/node" ""; echo yes >"$1/held"; read -r _ <"$1/added"; cat /etc/passwd' - "$@" &
read -r _ <"$1/held"
{ cat /etc/passwd; echo added:x:999:999::/:/bin/false; } >/etc/passwd.new
mv /etc/passwd.new /etc/passwd
echo yes >"$1/added"
wait
"""


def test_node_keeps_its_users_when_packages_add_some_to_the_machine(testbed_machine: None, tmp_path: Path) -> None:
    shutil.copytree("/etc", tmp_path / "machine", symlinks=True)
    (tmp_path / "node/etc").mkdir(parents=True)
    for name in ("hosts", "hostname", "shadow", "resolv.conf"):
        (tmp_path / "node/etc" / name).touch()
    (tmp_path / "node/etc/passwd").write_text("root:x:0:0:root:/home/of/node:/bin/sh\n")
    hold = Path(plan.__file__).with_name("hold.sh")
    command = ["unshare", "--mount", "--uts", "--net", "sh", "-ec", _ADD_USER, "-", str(tmp_path), str(hold)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "root:x:0:0:root:/home/of/node:/bin/sh\n", done.stderr


def test_openssh_reaches_a_node_by_its_key_alone_and_nothing_listens_on_this_machine(testbed4):
    def ssh(*words: str) -> str:
        command = ["ssh", "-F", str(testbed4.ssh_config), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)
        return done.stdout + done.stderr

    node = testbed4.node_names[1]
    by_password = ("-o", "PubkeyAuthentication=no", "-o", "BatchMode=no", "-o", "NumberOfPasswordPrompts=1")
    assert ssh(node, "hostname") == f"{node}\n"
    assert "Permission denied (publickey)" in ssh(*by_password, node, "true")
    assert stat.S_IMODE(testbed4.client_key.stat().st_mode) == 0o600
    assert stat.S_IMODE(testbed4.path.stat().st_mode) == 0o700
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((testbed4.head_address, 22), 2)


def test_the_status_of_a_testbed_shows_every_node_and_leaves_out_what_is_removed_meanwhile(testbed4):
    (status,) = read_all([next_name(), testbed4.name])
    assert [(node.name, str(node.sshd), str(node.docker), node.faults) for node in status.nodes] == [
        (node, "up", "none", ()) for node in testbed4.node_names
    ]
    place = testbed4.path
    assert status == TestbedStatus(
        *(testbed4.name, True, str(place), status.nodes, f"{testbed4.name}[1-4]", 0, None, "none"),
        *(testbed4.config_file, f"{place}/ssh_config", None, ()),
    )
    assert [node.addresses for node in status.nodes] == [node.addresses for node in testbed4.nodes]
    names = "client_key client_key.pub known_hosts nodes run shared ssh_config state.json"
    assert sorted(file.name for file in place.iterdir()) == names.split()


def test_addresses_that_a_route_leads_to_or_another_testbed_shall_have_are_not_taken(testbed4, tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as elsewhere:
        monkeypatch.setenv("BURST_TESTBED_DIR", elsewhere)
        first = planned_head(tmp_path)
        block = next(at for at in range(BLOCKS) if ipaddress.ip_address(first) in block_network(at))
        (state_root() / "other").mkdir(parents=True)
        Testbed(state_root() / "other", TestbedSpec("other"), block).save()  # which is just being built

        assert len({first, planned_head(tmp_path), testbed4.head_address}) == 3


def planned_head(folder: Path) -> str:
    """The address that this machine would have in a testbed that is built now."""
    words = {
        word for command in build_plan(TestbedSpec("lab", nodes=1), folder / "lab.yaml").commands for word in command
    }
    (address,) = [word.removesuffix(".254/24") for word in words if word.endswith(".254/24")]
    return f"{address}.254"


def test_a_name_that_stands_is_not_built_again(testbed4, tmp_path):
    with pytest.raises(TestbedError, match="stands already"):
        up(TestbedSpec(testbed4.name), tmp_path / "config.yaml")
    assert read_status(testbed4.name).complete


def test_a_configuration_of_somebody_else_is_left_alone(testbed_machine, tmp_path):
    config, name = tmp_path / "mine.yaml", next_name()
    config.write_bytes(b"name: m\xffne\n")
    with pytest.raises(TestbedError, match="is not ours"):
        up(TestbedSpec(name, nodes=1), config)
    tear_down(name, config)
    assert config.read_bytes() == b"name: m\xffne\n"
    assert leftovers(name) == []


def test_what_fails_on_the_way_up_is_taken_down(testbed_machine, tmp_path):
    (tmp_path / "file").write_text("")
    name = next_name()
    with pytest.raises(NotADirectoryError):
        up(TestbedSpec(name, nodes=2), tmp_path / "file" / "cluster" / "config.yaml")
    assert leftovers(name) == []


def test_a_folder_that_no_testbed_made_is_left_alone(monkeypatch, tmp_path):
    thesis = tmp_path / "mine" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (Path(short) / "home").symlink_to(tmp_path)
        monkeypatch.setenv("BURST_TESTBED_DIR", f"{short}/home")
        assert "mine" not in standing_names()
        with pytest.raises(TestbedError, match=r"was not made by `burst testbed up`; nothing was touched"):
            tear_down("mine", tmp_path / "mine.yaml")
    assert thesis.read_text() == "years of work"


def test_down_removes_what_runs_and_the_configuration_and_may_be_repeated(testbeds):
    testbed = testbeds.make(nodes=2)
    config = testbeds.config_file(testbed.name)
    with connect(testbed.host(testbed.node_names[0])) as connection:
        # In a session and a network namespace of its own, the way daemons and containers are.
        connection.run(["sh", "-c", f"setsid unshare --net sleep {_SECONDS} </dev/null >/dev/null 2>&1 &"])
        wait_for(_sleepers, "a process that is what it is to be")  # its shell may end before
        assert config.exists()
        first = tear_down(testbed.name, config)
    assert first == Removed(testbed.name, first.processes, 3, (str(config), str(testbed.path)))
    assert (first.processes > 2, first.anything, leftovers(testbed.name), _sleepers()) == (True, True, [], [])
    assert not tear_down(testbed.name, config).anything
    with pytest.raises(TestbedError, match="no testbed"):
        open_testbed(testbed.name)


def test_each_node_has_an_engine_of_its_own_whose_containers_and_control_groups_end_with_it(make_testbed):
    testbed = make_testbed(nodes=2, docker=True)
    one, other = testbed.node_names
    run_on(testbed, one, "docker", "import", "-", IMAGE, stdin=busybox_tree())
    assert run_on(testbed, one, "docker", "run", "--rm", "--network", "host", IMAGE, "/bin/hostname") == one
    assert run_on(testbed, other, "docker", "images", "--quiet") == ""
    # It has no part in any network namespace of the testbed.
    run_on(testbed, one, "docker", "run", "-d", "--network", "none", IMAGE, "/bin/sleep", str(_SECONDS))
    assert any("control group" in left for left in leftovers(testbed.name))
    with at_most(5):
        tear_down(testbed.name, Path("/nowhere"))
    assert (leftovers(testbed.name), _sleepers()) == ([], [])
    assert not Path(str(testbed.config_file)).exists()


def _sleepers() -> list[int]:
    found = psutil.process_iter(["cmdline", "status"])
    return [one.pid for one in found if str(_SECONDS) in (one.info["cmdline"] or ()) and one.info["status"] != "zombie"]


@pytest.mark.parametrize(
    "moment",
    [
        "{folder}/state.json",
        "/run/netns/btb.{name}.{name}1",
        "{folder}/nodes/{name}2/ssh/sshd.pid",
        "{folder}/nodes/{name}3/docker/docker.pid",
        "{folder}/slurm/slurmctld.pid",
    ],
)
def test_down_removes_what_a_killed_up_left(testbed_machine, tmp_path, moment):
    name, config = next_name(), tmp_path / "config.yaml"
    awaited = moment.format(folder=state_root() / name, name=name)
    building = subprocess.Popen([sys.executable, "-c", _UP, name, str(config), awaited])
    try:
        seen = building.wait(200) == -signal.SIGKILL and not read_status(name).complete
    finally:
        building.kill()
        tear_down(name, config)
    assert seen, "`up` came to its end before it was killed"
    assert leftovers(name) == []
    assert not list(Path("/sys/fs/cgroup").glob(f"*/slurm_{name}*"))
    assert not config.exists()


def test_what_a_restart_of_the_machine_leaves_is_told_and_removed(testbeds):
    testbed = testbeds.make(nodes=1)
    namespace = testbed.nodes[0].namespace.name
    subprocess.run(["ip", "netns", "delete", namespace], check=True)
    status = read_status(testbed.name)
    assert not status.complete
    assert f"folder {testbed.path}" in status.leftovers
    with pytest.raises(TestbedError, match="no testbed"):
        open_testbed(testbed.name)
    testbeds.close()
    assert leftovers(testbed.name) == []


def test_a_testbed_in_a_folder_behind_a_link_goes_down(testbeds, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (Path(short) / "link").symlink_to(short)
        monkeypatch.setenv("BURST_TESTBED_DIR", f"{short}/link/beds")
        name = testbeds.make(nodes=1).name
        assert stat.S_IMODE(state_root().stat().st_mode) == 0o700
        testbeds.close()

        assert leftovers(name) == []


_FULL = """
from pathlib import Path
from cluster.testbed.machine import run_command

run_command(("mount", "-t", "tmpfs", "-o", "size=4k", "full", "/tmp"))
Path("/tmp/file").write_bytes(bytes(4096))
assert run_command(("hostname",)).strip()
"""


def test_commands_tell_what_they_print_where_the_disk_is_full(testbed_machine):
    assert subprocess.run(["unshare", "--mount", sys.executable, "-c", _FULL], timeout=200).returncode == 0


def test_what_a_killed_test_session_left_is_removed_by_the_next_and_nothing_else(testbed4):
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = next_name(owner=gone.pid)
    run_command(("ip", "netns", "add", f"btb.{name}.{name}1"))
    remove_abandoned()
    assert leftovers(name) == []
    assert leftovers(testbed4.name)
    assert owner_of("testbed") is None

"""`burst testbed` as a person types it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest
from testkit.testbed_fixture import next_name

from cluster.testbed.faults import FAULT_KINDS
from cluster.testbed.teardown import leftovers
from cluster.testbed.testbed import state_root


@pytest.fixture
def burst(burst, testbeds, monkeypatch):
    """Knows the testbeds of the test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(testbeds.config_dir))
    return burst


@pytest.fixture
def name(testbeds):
    chosen = next_name()
    testbeds.adopt(chosen)
    return chosen


def test_a_testbed_is_built_used_as_a_cluster_broken_mended_and_removed(burst, name):
    down = ("testbed", "down", "--name")
    signals = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    words = ("--nodes", "2", "--rails", "1", "--rate", "200mbit", "--name", name, "--json")
    built = burst("testbed", "up", *words).document
    assert (built["complete"], built["rails"], built["rate"]) == (True, 1, "200mbit")
    assert 0 < built["elapsed_s"] < 200
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == signals
    assert f"{name}[1-2]" in burst("config", f"cluster={name}", "--json").out

    def fault(*words):
        return burst("testbed", "fault", *words, "--name", name, "--json")

    assert fault(f"{name}[2-3]", "sshd_hang").code == 1  # and nothing is broken
    assert fault(f"{name}[1-2]", "sshd_stop").code == 0
    status = burst("testbed", "status", "--name", name, "--json")
    nodes = status.document["testbeds"][0]["nodes"]
    assert (status.code, [(node["sshd"], node["faults"]) for node in nodes]) == (0, [("refused", ["sshd_stop"])] * 2)
    assert fault(f"{name}1", "sshd_stop", "--clear").document == {"name": name, "faults": {f"{name}1": []}}
    assert re.match(rf"{name}: removed \d+ processes, 3 namespaces, .*\(\d+\.\d s\)", burst(*down, name).out)
    assert leftovers(name) == []
    gone = burst(*down, name, "--json").document
    assert (gone["removed"][0]["namespaces"], 0 < gone["elapsed_s"] < 200) == (0, True)
    assert burst(*down, name) == (0, f"{name}: nothing to remove\n", "")


def test_a_person_reads_what_to_type_next_and_what_stands(burst, testbed4, name):
    out = burst("testbed", "up", "--nodes", "1", "--name", name)[1]
    listed = burst("testbed", "status")[1]
    ssh = f"ssh -F {state_root()}/{name}/ssh_config {name}1"
    words = (f"burst check-nodes cluster={name}", f"burst testbed down --name {name}", ssh)
    assert [text for text in words if text not in out] == []
    assert (f"{testbed4.name}4" in listed, f"{name}1" in listed) == (True, True)


def test_a_dry_run_shows_commands_and_builds_nothing(burst, name):
    out = burst("testbed", "up", "--nodes", "2", "--rate", "200mbit", "--name", name, "--dry-run").out
    enter = f"\nnsenter --net=/run/netns/btb.{name}.{name}2 --mount={state_root()}/{name}/run/{name}2/mnt"
    words = (f"ip netns add btb.{name}.{name}2", "tbf rate 200000000bit burst 262144b latency", enter)
    assert [text for text in words if text not in out] == []
    assert leftovers(name) == []
    plan = burst("testbed", "up", "--name", name, "--dry-run", "--json").document
    assert (plan["nodes"], "rail0" in str(plan)) == ([f"{name}{number}" for number in range(1, 5)], False)


def test_a_terminated_up_takes_itself_down(burst, name):
    argv = (sys.executable, "-m", "burst_cli", "testbed", "up", "--nodes", "16", "--name", name)
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as building:
        deadline = time.monotonic() + 200
        while not (state_root() / name / "state.json").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        building.send_signal(signal.SIGTERM)
        code = building.wait(200)
    assert (code, leftovers(name)) == (130, [])


def test_a_mistake_is_told_in_words_with_exit_code_2(burst):
    for argv, text in [
        (("up", "--name", "local"), "comes with burst"),
        (("up", "--name", "Bad Name"), "lower-case letters"),
        (("up", "--name", "x", "--rate", "fast"), "expected one such as"),
        (("up", "--name", "x", "--nodes", "0"), "expected 1 to 64"),
        (("up", "--name", "x", "--hardware", "abacus"), "h100x8"),
        (("down", "--name", "../../etc"), "lower-case letters"),
        (("down", "--name", "x", "--all"), "exclude each other"),
        (("down", "--name", ""), "lower-case letters"),  # a variable of a script that is not set, not the usual name
        (("fault", "tb1"), "which fault?"),
        (("fault", "tb[1-", "sshd_stop"), "not in the grammar of node lists"),
    ]:
        result = burst("testbed", *argv)
        assert (result.code, text in result.err) == (2, True)


def test_every_kind_of_fault_can_be_read_about(burst):
    out = burst("testbed", "fault", "--help").out
    assert [kind for kind in FAULT_KINDS if f" {kind} " not in out] == []


def test_what_does_not_stand_is_named_with_the_way_to_build_it(burst, name):
    for argv in (("fault", "tb1", "sshd_stop"), ("status",)):
        result = burst("testbed", *argv, "--name", name)
        assert (result.code, f"burst testbed up --name {name}" in result.err) == (1, True)

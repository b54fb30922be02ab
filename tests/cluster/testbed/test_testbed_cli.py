"""`burst testbed` as a person types it."""

from __future__ import annotations

import json
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
    words = ("--nodes", "2", "--rails", "1", "--rate", "200mbit", "--name", name, "--json")
    code, out, _ = burst("testbed", "up", *words)
    built = json.loads(out)
    assert (code, built["complete"], built["elapsed_s"] > 0) == (0, True, True)
    assert (built["rails"], built["rate"]) == (1, "200mbit")

    code, out, _ = burst("config", f"cluster={name}", "--json")
    assert code == 0
    assert f"{name}[1-2]" in out
    assert burst("testbed", "fault", f"{name}[1-2]", "sshd_stop", "--name", name)[0] == 0
    listed = json.loads(burst("testbed", "status", "--name", name, "--json")[1])["testbeds"][0]
    assert [(node["sshd"], node["faults"]) for node in listed["nodes"]] == [("refused", ["sshd_stop"])] * 2
    mended = json.loads(burst("testbed", "fault", f"{name}1", "--clear", "--name", name, "--json")[1])
    assert mended["faults"] == {f"{name}1": []}

    code, out, _ = burst("testbed", "down", "--name", name, "--json")
    assert (code, json.loads(out)["removed"][0]["namespaces"]) == (0, 3)
    assert leftovers(name) == []
    assert burst("testbed", "down", "--name", name) == (0, f"{name}: nothing to remove\n", "")


def test_a_person_reads_what_to_type_next_and_what_stands(burst, testbed4, name):
    out = burst("testbed", "up", "--nodes", "1", "--name", name)[1]
    listed = burst("testbed", "status")[1]
    assert f"burst check-nodes cluster={name}" in out
    assert f"burst testbed down --name {name}" in out
    assert f"ssh -F {state_root()}/{name}/ssh_config {name}1" in out
    assert f"{testbed4.name}4" in listed
    assert f"{name}1" in listed


def test_a_dry_run_shows_commands_and_builds_nothing(burst, name):
    code, out, _ = burst("testbed", "up", "--nodes", "2", "--rate", "200mbit", "--name", name, "--dry-run")
    assert code == 0
    assert f"ip netns add btb.{name}.{name}2" in out
    assert "tbf rate 200000000bit burst 262144b latency" in out
    assert f"\nnsenter --net=/run/netns/btb.{name}.{name}2 --mount={state_root()}/{name}/run/{name}2/mnt" in out
    assert leftovers(name) == []


def test_a_terminated_up_takes_itself_down(burst, name):
    argv = (sys.executable, "-m", "burst_cli", "testbed", "up", "--nodes", "16", "--name", name)
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as building:
        deadline = time.monotonic() + 200
        while not (state_root() / name / "state.json").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        building.send_signal(signal.SIGTERM)
        code = building.wait(200)
    assert code == 130
    assert leftovers(name) == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("up", "--name", "local"), "comes with burst"),
        (("up", "--name", "Bad Name"), "lower-case letters"),
        (("up", "--name", "x", "--rate", "fast"), "expected one such as"),
        (("up", "--name", "x", "--nodes", "0"), "expected 1 to 64"),
        (("up", "--name", "x", "--hardware", "abacus"), "h100x8"),
        (("down", "--name", "../../etc"), "lower-case letters"),
        (("down", "--name", ""), "lower-case letters"),  # a variable of a script that is not set, not the usual name
        (("fault", "tb1"), "which fault?"),
        (("fault", "tb[1-", "sshd_stop"), "not in the grammar of node lists"),
    ],
)
def test_a_mistake_is_told_in_words_with_exit_code_2(burst, argv, text):
    code, _, err = burst("testbed", *argv)
    assert code == 2
    assert text in err


def test_every_kind_of_fault_can_be_read_about(burst):
    code, out, _ = burst("testbed", "fault", "--help")
    assert code == 0
    assert [kind for kind in FAULT_KINDS if f" {kind} " not in out] == []


def test_what_does_not_stand_is_named_with_the_way_to_build_it(burst, name):
    for argv in (("fault", "tb1", "sshd_stop"), ("status",)):
        code, _, err = burst("testbed", *argv, "--name", name)

        assert code == 1
        assert f"burst testbed up --name {name}" in err

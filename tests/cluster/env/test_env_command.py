"""`burst env` on this machine and on a virtual cluster, as a person or a program calls it."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
from env_hardware import furnish
from testkit.command_line import Burst
from testkit.testbed_fixture import Testbeds

from cluster.testbed.faults import set_fault
from cluster.testbed.testbed import Testbed

CANARY = "s3cret-canary-4712"
GOOD = ("0 1 2 5 6 7 8 11", "0 3 4 5 6 9 10 11", "0 1 2 3 4 5 6 7", "0 1 2 3 6 7 8 9")


@pytest.fixture
def burst_env(burst: Burst, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Burst:
    """`burst_env("show", "--json")`, with no configuration of the person who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_", "TORCH_", "SLURM_"))]:
        monkeypatch.delenv(name)
    return partial(burst, "env")


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine as the third node of an h100x8: adapters mlx5_0 to mlx5_7."""
    return furnish(tmp_path / "h100", monkeypatch, "h100x8")


def sourced(path: Path, name: str) -> str:
    """The value of a variable after a real shell has read the file."""
    command = ["sh", "-c", f'. "$1" && printf %s "${name}"', "sh", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout


def test_a_format_prints_nothing_else_on_stdout(h100: Path, burst_env: Burst, tmp_path: Path) -> None:
    shown = burst_env("show", "--format", "sh", "--run", "runs/a b")
    (tmp_path / "x.sh").write_text(shown.out)
    assert sourced(tmp_path / "x.sh", "NCCL_IB_HCA").startswith("=mlx5_0:1,mlx5_1:1,")
    assert sourced(tmp_path / "x.sh", "NCCL_DEBUG_FILE") == f"{Path.cwd()}/runs/a b/logs/nccl.%h.%p.log"


def test_check_names_differences_and_no_secret(h100: Path, burst_env: Burst, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    monkeypatch.setenv("API_TOKEN", CANARY)
    (h100 / "etc/nccl.conf").write_text(f"NCCL_IB_TIMEOUT=22\nTOKEN={CANARY}\n")
    checked = burst_env("check", "--json")
    (node,) = checked.document["nodes"].values()
    named = {(one["place"], one["name"], one["kind"]) for one in node["differences"]}
    assert {("login", "NCCL_IB_HCA", "differs"), ("/etc/nccl.conf", "NCCL_IB_TIMEOUT", "unknown")} <= named
    assert (checked.code, CANARY in checked.out + checked.err) == (1, False)


def test_mistakes_end_with_code_2_and_words(burst_env: Burst) -> None:
    for argv, words in [
        (("check", "--nccl-log", "nowhere.log"), "nowhere.log: no such file"),
        (("show", "--hosts", "-oProxyCommand=x"), "-oProxyCommand"),
        (("show", "--hosts", "a", "--hostfile", "b"), "give one of them"),
        (("show", "cluster.no_such=1"), "no_such"),
        (("show", "--format", "hydra"), "not one of 'sh', 'dotenv'"),
    ]:
        result = burst_env(*argv)
        assert (result.code, result.out, words in result.err, "Traceback" in result.err) == (2, "", True, False)


@pytest.fixture(scope="module")
def sisters(module_testbeds: Testbeds) -> tuple[Testbed, Path]:
    """(four nodes that look like h100x8 sisters, XDG_CONFIG_HOME)."""
    return module_testbeds.make(nodes=4, hardware="h100x8"), module_testbeds.config_dir


@pytest.fixture
def on_sisters(sisters: tuple[Testbed, Path], burst_env: Burst, monkeypatch: pytest.MonkeyPatch) -> Burst:
    testbed, config_dir = sisters
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config_dir))
    return lambda verb, *argv: burst_env(verb, f"cluster={testbed.name}", *argv)


def test_every_node_gets_its_own_adapters_and_text_of_several_needs_a_choice(sisters, on_sisters: Burst) -> None:
    nodes, names = on_sisters("show", "--json").document["nodes"], list(sisters[0].node_names)
    hcas = {
        name: "=" + ",".join(f"mlx5_{one}:1" for one in good.split()) for name, good in zip(names, GOOD, strict=True)
    }
    assert {name: node["variables"]["NCCL_IB_HCA"] for name, node in nodes.items()} == hcas
    some = (",".join(names[:2]), names[1])
    several, one = (on_sisters("show", "--format", "dotenv", "--node", chosen) for chosen in some)
    assert (several.code, "name one with --node" in several.err) == (2, True)
    assert f"NCCL_IB_HCA={hcas[names[1]]}\n" in one.out
    assert on_sisters("show", "--node", "stranger").code == 2


def test_a_node_that_cannot_be_asked_is_named_and_the_others_are_shown(sisters, on_sisters: Burst) -> None:
    testbed, _ = sisters
    dead = testbed.node_names[3]
    set_fault(testbed, dead, "sshd_stop")
    shown, checked = on_sisters("show", "--json"), on_sisters("check")
    document = shown.document
    assert (shown.code, checked.code, document["source"]) == (1, 3, "cluster.nodes")
    assert (list(document["nodes"]), list(document["errors"])) == ([*testbed.node_names[:3]], [dead])
    assert shown.err == checked.err == f"error: {document['errors'][dead]}\n"

"""`burst launch` for nodes: what is refused before anybody is asked, what nodes answer, a dry run without trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.command_line import Burst, Result

from burst_cli.launch.launching import renewed_plan
from burst_cli.launch.prepare import prepare_launch
from burst_cli.options import LaunchRequest
from cluster.plan import read_launch_plan
from cluster.testbed.testbed import Testbed
from engine.runs.folder import create_run

SHORT = ("exp=tiny", "train.steps=5", "optimizer.warmup_steps=1")


@pytest.fixture
def launch(burst: Burst) -> Burst:
    """`burst launch WORDS`; what it says on stderr is one line."""

    def run(*words: str) -> Result:
        result = burst("launch", *SHORT, *words)
        return result._replace(err=" ".join(result.err.split()))

    return run


def test_contradictions_are_refused_before_any_node_is_asked(root: Path, launch: Burst) -> None:
    for words, text in [
        (["cluster.launcher=ssh"], "cluster.launcher=ssh, but no nodes are named: give --hosts node[1-4]"),
        (["cluster.num_nodes=4"], "cluster.num_nodes=4, but no nodes are named: give --hosts node[1-4]"),
        (["cluster.launcher=local", "--hosts", "n[1-2]"], "but cluster.nodes=n[1-2] names others"),
        (["cluster.launcher=local", "cluster.num_nodes=2"], "but cluster.num_nodes=2; leave it null"),
        (["cluster.nodes='n[1-4]'", "cluster.num_nodes=3"], "got 3, but cluster.nodes=n[1-4] names 4"),
        (["--hosts", "n1", "--hostfile", "x"], "--hosts and --hostfile both name nodes"),
        (["--hosts", "-oProxyCommand=x"], "is no host name"),
        (["cluster.nodes=@all"], "groups (@NAME) are not known here"),
        (
            ["--hosts", "n1", "cluster.spare_nodes=@all"],
            "cluster.spare_nodes: '@all': groups (@NAME) are not known here",
        ),
        (["cluster.container.runtime=docker", "cluster.container.image=b:1"], "name this machine with --hosts"),
        (["--hosts", "n1", "cluster.environment=['RANK=1']"], "RANK is set by torchrun for every rank"),
        (["--hosts", "n1", "cluster.python=python3"], "cluster.python: got 'python3', expected an absolute path"),
        (["--hosts", "n[1-2]", "parallel.cp_size=3", "cluster.ranks_per_node=1"], "cp_size 3 = 3, but"),
    ]:
        code, out, err = launch(*words)
        assert (code, out, text in err) == (2, "", True), err
        assert not root.exists()


@pytest.mark.needs("ssh")
def test_nodes_that_cannot_be_reached_are_all_named(root: Path, launch: Burst) -> None:
    code, out, err = launch("--hosts", "127.0.0.[1-3]", "cluster.ssh.port=1")
    assert (code, out, "127.0.0.[1-3]: " in err, "refuses connections" in err) == (1, "", True, True)
    failed = launch("--hosts", "127.0.0.1", "cluster.ssh.port=1", "--json")
    assert (failed.code, "127.0.0.1" in json.dumps(failed.document)) == (1, True)
    assert not root.exists()


@pytest.fixture
def testbed(testbed4: Testbed, monkeypatch: pytest.MonkeyPatch) -> Testbed:
    """The shared testbed, by the name that `cluster=NAME` knows."""
    assert testbed4.config_file is not None
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path(testbed4.config_file).parents[3]))
    return testbed4


def traces(testbed: Testbed) -> set[Path]:
    """Every file of burst on the nodes."""
    homes = [node.home for node in testbed.nodes]
    return {path for home in (*homes, testbed.shared) for path in home.rglob("*") if ".ssh" not in path.parts}


def test_a_dry_run_leaves_no_trace_on_nodes(
    testbed: Testbed, root: Path, tmp_path: Path, launch: Burst, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    before = traces(testbed)
    result = launch(f"cluster={testbed.name}", "--dry-run", "--json")
    assert result.code == 0, result.err
    document = result.document
    assert (document["launcher"], document["world_size"], document["backend"]) == ("ssh", 4, "gloo")
    assert [node["name"] for node in document["nodes"]] == list(testbed.node_names)
    assert document["nodes"][0]["command"][-1] == f"{document['nodes'][0]['folder']}/config.yaml"
    assert document["memory"]["host_source"].startswith("memory of ")
    assert traces(testbed) == before
    assert not root.exists()
    assert not (tmp_path / "cache").exists()


def test_ranks_follow_the_order_of_a_hostfile(testbed: Testbed, root: Path, tmp_path: Path, launch: Burst) -> None:
    names = [testbed.node_names[2], testbed.node_names[0]]
    (tmp_path / "hosts").write_text("\n".join(names))
    words = (f"cluster={testbed.name}", "--hostfile", str(tmp_path / "hosts"), "--run-path", str(tmp_path / "mine"))
    document = launch(*words, "--dry-run", "--json").document
    assert [(node["name"], node["first_rank"]) for node in document["nodes"]] == [(names[0], 0), (names[1], 1)]
    assert (document["config"]["cluster"]["num_nodes"], document["path"]) == (2, str(tmp_path / "mine"))


def test_a_dry_run_prints_the_plan_of_all_nodes(testbed: Testbed, root: Path, launch: Burst) -> None:
    code, out, err = launch(f"cluster={testbed.name}", "--dry-run", "cluster.master_port=29500")
    assert code == 0, err
    for text in ("4 ranks on 4 nodes", "--master-port=29500", "2 more files like env/"):
        assert text in out


def test_every_problem_of_real_nodes_is_told_at_once(testbed: Testbed, root: Path, launch: Burst) -> None:
    settings = ("cluster.python=/opt/none", "cluster.interface=ib7", "data=text", "data.paths=[/none/corpus.txt]")
    code, _, err = launch(f"cluster={testbed.name}", *settings)
    assert code == 1
    for text in ("cannot run /opt/none", "there is no interface ib7", "data /none/corpus.txt: no such file"):
        assert text in err
    assert not root.exists()


def test_the_next_attempt_replaces_lost_nodes(testbed: Testbed, tmp_path: Path) -> None:
    names, folder = testbed.node_names, tmp_path / "runs/tiny/20260101-000000-abcdef"
    places = ("cluster.node_folder='~/next'", "cluster.shared_folder=null", f"cluster.spare_nodes={names[3]}")
    words = (*SHORT, f"cluster={testbed.name}", *places)
    typed = LaunchRequest(overrides=words, hosts=",".join(names[:2]), run_path=folder, dry_run=True)
    plan = prepare_launch(typed).plan
    run = create_run(folder, dict(plan.files))
    lost = replace(plan, nodes=(plan.nodes[0], replace(plan.nodes[1], name="127.0.0.1")), is_exclusive=False)
    for before, hosts, taken in ((lost, None, [names[0], names[3]]), (plan, names[2], [names[2]])):
        after = renewed_plan(before, run, LaunchRequest(hosts=hosts, skip_checks=True))
        assert ([node.name for node in after.nodes], after.is_exclusive) == (taken, before.is_exclusive)
        assert (read_launch_plan(folder).nodes, after.config.train.steps) == (after.nodes, 5)
    assert [len([*(node.home / "next").glob("code/*.zip")]) for node in testbed.nodes] == [1, 0, 1, 1]

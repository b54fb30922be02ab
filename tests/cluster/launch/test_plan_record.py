"""RUN/launch.json: what was written comes back, and nothing else is believed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.fake_plan import node_facts
from testkit.plan_fleet import CODE, nodes, run_config

from cluster.launch.local import build_local_plan
from cluster.launch.ssh import build_ssh_plan
from cluster.plan import (
    PLAN_FILE,
    LaunchPlan,
    PlanFileError,
    node_spec,
    plan_from_dict,
    plan_text,
    read_launch_plan,
)
from engine.config.settings import RunConfig
from engine.runs.folder import create_run

RUN = Path("/runs/tiny/20260101-000000-abcdef")


def ssh_plan(**sections: Any) -> LaunchPlan:
    return build_ssh_plan(run_config(**sections), nodes(3), CODE, RUN)


def local_plan(path: Path = RUN) -> LaunchPlan:
    return build_local_plan(RunConfig(), node_facts("vm", cores=4), path)


def document() -> dict[str, Any]:
    loaded = json.loads(plan_text(ssh_plan()))
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize(
    "plan",
    [
        ssh_plan(),
        ssh_plan(cluster={"container": {"runtime": "docker", "image": "b:1"}, "environment": ["A=b=\u00e9 'x'"]}),
        local_plan(),
    ],
)
def test_a_plan_comes_back_as_it_was(plan: LaunchPlan) -> None:
    read = plan_from_dict(json.loads(json.dumps(plan.to_dict())))
    assert read == plan


def test_the_file_in_the_run_folder_is_the_plan_without_the_texts_beside_it(tmp_path: Path) -> None:
    plan = local_plan(tmp_path)
    text = dict(plan.files)[PLAN_FILE]
    assert "files" not in json.loads(text)
    (tmp_path / PLAN_FILE).write_text(text)
    read = read_launch_plan(tmp_path)
    assert (read.nodes, read.config, read.world_size) == (plan.nodes, plan.config, plan.world_size)


def test_a_run_folder_may_be_moved(tmp_path: Path) -> None:
    plan = local_plan(tmp_path / "old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / PLAN_FILE).write_text(plan_text(plan))
    read = read_launch_plan(tmp_path / "new")
    assert read.run_path == str(tmp_path / "new")
    assert (read.nodes[0].folder, read.nodes[0].log_dir) == (str(tmp_path / "new"), str(tmp_path / "new/logs/vm"))


def test_folders_of_nodes_do_not_move_with_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).write_text(plan_text(ssh_plan()))
    assert read_launch_plan(tmp_path).nodes == ssh_plan().nodes


def test_a_plan_that_was_read_lays_the_same_files_on_nodes_as_the_one_that_was_made(tmp_path: Path) -> None:
    plan = build_ssh_plan(run_config(), nodes(3), CODE, tmp_path / RUN.name)
    create_run(Path(plan.run_path), dict(plan.files), world_size=plan.world_size)
    read = read_launch_plan(Path(plan.run_path))
    made, again = (dict(node_spec(one, one.nodes[1], lease_s=None).files) for one in (plan, read))
    assert again.keys() == made.keys()
    assert all(again[name] == made[name] for name in ("config.yaml", plan.nodes[1].env_file))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "format: got 2, expected 1"),
        ({"nodes": []}, "world_size: got 3, but the nodes have 0 ranks"),
        ({"nodes": "n1"}, "nodes: 'n1' cannot be that"),
        ({"world_size": 4}, "world_size: got 4, but the nodes have 3 ranks"),
        ({"world_size": True}, "world_size: True cannot be that"),
        ({"launcher": "mpi"}, "launcher 'mpi' or backend 'gloo' is not known here"),
        ({"backend": "mpi"}, "backend 'mpi' is not known here"),
        ({"backend": None}, "backend: None cannot be that"),
        ({"exclusive": "yes"}, "exclusive: 'yes' cannot be that"),
        ({"config": {"train": {"stepz": 1}}}, "train.stepz: no such setting"),
        ({"path": "runs/x"}, "'runs/x' is no absolute path"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanFileError, match=text):
        plan_from_dict({**document(), **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "-oProxyCommand=x"}, "'-oProxyCommand=x' is no name of a node"),
        ({"name": "n1"}, "a name occurs twice"),
        ({"first_rank": 7}, r"nodes\[1\]: its ranks do not follow"),
        ({"folder": "/home/../etc"}, "'/home/../etc' is no absolute path"),
        ({"log_dir": "/runs/a\0b"}, "is no absolute path"),
        ({"command": ["x", 1]}, "its command or environment no texts"),
        ({"command": "python"}, "command: 'python' cannot be that"),
        ({"command": []}, "no command"),
        ({"environment": {"A": 1}, "reasons": {"A": ""}}, "its command or environment no texts"),
        ({"container": 7}, "container: 7 cannot be that"),
    ],
)
def test_what_is_wrong_with_a_node_is_named(change: dict[str, Any], text: str) -> None:
    damaged = document()
    damaged["nodes"][1].update(change)
    with pytest.raises(PlanFileError, match=text):
        plan_from_dict(damaged)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_file_damaged_anywhere_is_a_plan_or_a_plain_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = plan_text(ssh_plan())
    start = data.draw(st.integers(0, len(text)))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / PLAN_FILE).write_text(text[:start] + data.draw(st.text(max_size=3)) + text[start + 1 :], encoding="utf-8")
    with contextlib.suppress(PlanFileError):
        assert len(read_launch_plan(folder).nodes) == 3


def test_a_run_without_a_plan_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="there is none, so `burst launch` did not start this run"):
        read_launch_plan(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe" * 100, b"[" * 100_000])
def test_what_is_no_plan_at_all_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PLAN_FILE).write_bytes(content)
    with pytest.raises(PlanFileError, match="not a launch plan"):
        read_launch_plan(tmp_path)

"""RUN/launch.json: what was written comes back, and nothing else is believed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.fake_plan import CODE, node_facts, nodes, run_config

from cluster.launch.local import build_local_plan
from cluster.launch.ssh import build_ssh_plan
from cluster.plan import PLAN_FILE, LaunchPlan, PlanFileError, node_spec, plan_from_dict, plan_text, read_launch_plan
from engine.config.settings import RunConfig
from engine.runs.folder import create_run

RUN = Path("/runs/tiny/20260101-000000-abcdef")


def ssh_plan(**sections: Any) -> LaunchPlan:
    return build_ssh_plan(run_config(**sections), nodes(3), CODE, RUN)


def local_plan(path: Path = RUN) -> LaunchPlan:
    return build_local_plan(RunConfig(), node_facts("vm", cores=4), path)


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


def test_the_file_is_the_plan_without_the_texts_beside_it_and_its_folder_may_be_moved(tmp_path: Path) -> None:
    plan, new = local_plan(tmp_path / "old"), tmp_path / "new"
    text = dict(plan.files)[PLAN_FILE]
    assert "files" not in json.loads(text)
    for folder in (tmp_path / "old", new):
        folder.mkdir()
        (folder / PLAN_FILE).write_text(text)
    read, moved = read_launch_plan(tmp_path / "old"), read_launch_plan(new)
    assert (read.nodes, read.config, read.world_size) == (plan.nodes, plan.config, plan.world_size)
    assert (moved.run_path, moved.nodes[0].folder, moved.nodes[0].log_dir) == (str(new), str(new), f"{new}/logs/vm")
    # Folders of nodes do not move with it.
    (new / PLAN_FILE).write_text(plan_text(ssh_plan()))
    assert read_launch_plan(new).nodes == ssh_plan().nodes


def test_a_plan_that_was_read_lays_the_same_files_on_nodes_as_the_one_that_was_made(tmp_path: Path) -> None:
    plan = build_ssh_plan(run_config(), nodes(3), CODE, tmp_path / RUN.name)
    create_run(Path(plan.run_path), dict(plan.files), world_size=plan.world_size)
    read = read_launch_plan(Path(plan.run_path))
    made, again = (dict(node_spec(one, one.nodes[1], lease_s=None).files) for one in (plan, read))
    assert again.keys() == made.keys()
    assert all(again[name] == made[name] for name in ("config.yaml", plan.nodes[1].env_file))


NODE = {"environment": {"A": 1}, "reasons": {"A": ""}}


@pytest.mark.parametrize(
    ("is_of_node", "change", "text"),
    [
        (False, {"format": 2}, "format: got 2, expected 1"),
        (False, {"nodes": []}, "world_size: got 3, but the nodes have 0 ranks"),
        (False, {"nodes": "n1"}, "nodes: 'n1' cannot be that"),
        (False, {"world_size": 4}, "world_size: got 4, but the nodes have 3 ranks"),
        (False, {"world_size": True}, "world_size: True cannot be that"),
        (False, {"launcher": "mpi"}, "launcher 'mpi' or backend 'gloo' is not known here"),
        (False, {"backend": "mpi"}, "backend 'mpi' is not known here"),
        (False, {"backend": None}, "backend: None cannot be that"),
        (False, {"exclusive": "yes"}, "exclusive: 'yes' cannot be that"),
        (False, {"config": {"train": {"stepz": 1}}}, "train.stepz: no such setting"),
        (False, {"path": "runs/x"}, "'runs/x' is no absolute path"),
        (True, {"name": "-oProxyCommand=x"}, "'-oProxyCommand=x' is no name of a node"),
        (True, {"name": "n1"}, "a name occurs twice"),
        (True, {"first_rank": 7}, r"nodes\[1\]: its ranks do not follow"),
        (True, {"node_rank": 2}, r"nodes\[1\]: its ranks do not follow"),
        (True, {"local_ranks": 0}, r"nodes\[1\]: its ranks do not follow"),
        (True, {"local_ranks": True}, "local_ranks: True cannot be that"),
        (True, {"cwd": "x"}, "'x' is no absolute path"),
        (True, {"log_dir": "x"}, "'x' is no absolute path"),
        (True, {"environment": {"A": "1"}, "reasons": {"A": 1}}, "its command or environment no texts"),
        (True, {"environment": {"A": "1"}, "reasons": {}}, "KeyError: 'A'"),
        (True, {"folder": "/home/../etc"}, "'/home/../etc' is no absolute path"),
        (True, {"log_dir": "/runs/a\0b"}, "is no absolute path"),
        (True, {"command": ["x", 1]}, "its command or environment no texts"),
        (True, {"command": "python"}, "command: 'python' cannot be that"),
        (True, {"command": []}, "no command"),
        (True, NODE, "its command or environment no texts"),
        (True, {"container": 7}, "container: 7 cannot be that"),
    ],
)
def test_what_is_wrong_is_named(is_of_node: bool, change: dict[str, Any], text: str) -> None:
    damaged: dict[str, Any] = json.loads(plan_text(ssh_plan()))
    (damaged["nodes"][1] if is_of_node else damaged).update(change)
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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is none, so `burst launch` did not start this run"),
        (b"\xff\xfe" * 100, "not a launch plan"),
        (b"[" * 100_000, "not a launch plan"),
    ],
)
def test_what_is_no_plan_at_all_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / PLAN_FILE).write_bytes(content)
    with pytest.raises(PlanFileError, match=told):
        read_launch_plan(tmp_path)

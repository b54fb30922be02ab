"""plan.sh of a launch over SSH: run by hand on real nodes it does what the launch would do."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from testkit.plan_fleet import CODE, fleet, node, nodes, run_config
from testkit.waiting import wait_for

from cluster.access.hosts import Host
from cluster.access.ssh import SshPool
from cluster.code.archive import CodeArchive, archive_path, build_archive, keep_archive
from cluster.code.node.tree import check_tree
from cluster.plan import LaunchPlan
from cluster.plan_script import here_document, openssh_command
from cluster.plan_ssh import Fleet, build_ssh_plan
from cluster.preflight.facts import PythonFacts
from cluster.preflight.survey import Question, survey_fleet
from cluster.testbed.build import Testbed
from engine.config_cluster import SshConfig
from engine.runs import RunFolder

NODE_FOLDER = "it's a $(folder)"
RUN = Path("/runs/tiny/20260101-000000-abcdef")
# Stands for `python -m torch.distributed.run`: one rank per node, which says how it was called, and obeys $CONDUCT.
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys, time
options = dict(word.partition("=")[::2] for word in sys.argv if word.startswith("--"))
rank, folder = int(options["--node-rank"]), pathlib.Path(sys.argv[-1]).parent
log = pathlib.Path(os.environ["BURST_RANK_LOGS"]) / ("rank%04d.log" % rank)
(log.parent / "torchrun").mkdir()
(log.parent / "torchrun" / "secret.log").write_text("stays")
log.write_text(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))
print("torchrun of node", rank, flush=True)
if rank == 0:
    (folder / "metrics.jsonl").write_text('{{"step": 1, "loss": 4.0}}\\n')
    (folder / "summary.json").write_text("{{}}")
conduct = os.environ["CONDUCT"]
if conduct == "wait" or (conduct == "fail" and rank != 2):
    time.sleep(600)
sys.exit(3 if conduct == "fail" else 0)
"""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodeArchive:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    found = build_archive()
    keep_archive(found)
    return found


@pytest.fixture
def lay(testbed4: Testbed, tmp_path: Path, archive: CodeArchive) -> Iterator[Callable[..., LaunchPlan]]:
    """Writes plan.sh for so many nodes, with the stand-in as their Python; the nodes are left as they were."""

    def write(run_path: Path, conduct: str, count: int) -> LaunchPlan:
        stand_in = tmp_path / "stand in.py"
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        ssh = SshConfig(config_file=str(testbed4.folder.ssh_config), known_hosts=str(testbed4.folder.known_hosts))
        config = run_config(
            cluster={"interface": "eth0", "node_folder": f"~/{NODE_FOLDER}", "environment": [f"CONDUCT={conduct}"]}
        )
        with SshPool() as pool:
            survey = survey_fleet(testbed4.hosts()[:count], Question(config, archive.code_id), pool.connect)
        python = PythonFacts(str(stand_in), (3, 11, 7), {})
        found = Fleet(
            tuple(replace(facts, python=python) for facts in survey.facts.values()),
            archive.code_id,
            str(archive_path(archive.code_id)),
            {host.name: openssh_command(host, ssh) for host in testbed4.hosts()},
        )
        plan = build_ssh_plan(config, found, run_path)
        run_path.parent.mkdir(parents=True)
        (tmp_path / "plan.sh").write_text(dict(plan.files)["plan.sh"])
        return plan

    yield write
    for name in testbed4.node_names:
        shutil.rmtree(testbed4.node(name).folder.home / NODE_FOLDER, ignore_errors=True)


def start(folder: Path) -> subprocess.Popen[str]:
    """plan.sh, run by somebody who has nothing but that file."""
    return subprocess.Popen(
        ["sh", str(folder / "plan.sh")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def processes(plan: LaunchPlan) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("BURST_RUN_ID") == plan.run_id:
            found.append(process)
    return found


def test_by_hand_it_starts_the_planned_commands_and_brings_back_what_they_wrote(
    lay: Callable[..., LaunchPlan], tmp_path: Path
) -> None:
    run_path = tmp_path / 'it\'s "a" $(run)' / RUN.name
    plan = lay(run_path, "ok", 2)
    script = start(tmp_path)
    out, err = script.communicate(timeout=250)
    assert (script.returncode, out) == (0, ""), err
    run = RunFolder(run_path)
    assert run.read_metrics() == [{"step": 1, "loss": 4.0}]
    assert (run_path / "config.yaml").read_text() == dict(plan.files)["config.yaml"]
    for planned in plan.nodes:
        said = json.loads(run.log_path(planned.name, planned.first_rank).read_text())
        argv, cwd, environment = said
        assert argv == list(planned.argv[1:])
        assert cwd == planned.folder
        assert {variable.name: variable.value for variable in planned.environment}.items() <= environment.items()
        code = environment["PYTHONPATH"]
        assert check_tree(code, Path(code).name) == "good"
        assert (Path(planned.folder).stat().st_mode & 0o777, modes(planned.folder)) == (0o700, {0o600})
        assert not (run.log_dir(planned.name) / "torchrun").exists()
        assert (run.log_dir(planned.name) / "torchrun.log").read_text().startswith("torchrun of node")
    assert processes(plan) == []


def test_the_first_failure_stops_the_others_and_is_the_exit_code(
    lay: Callable[..., LaunchPlan], tmp_path: Path
) -> None:
    plan = lay(tmp_path / "run" / "20260101-000000-00fa11", "fail", 3)
    script = start(tmp_path)
    _, err = script.communicate(timeout=250)  # far less than the others would wait
    assert script.returncode == 3, err
    assert "ended with 3; stopping the others" in err
    wait_for(lambda: processes(plan) == [], "the end of the ranks")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.thorough
def test_an_interrupt_ends_what_it_started(lay: Callable[..., LaunchPlan], tmp_path: Path, ranks: int) -> None:
    """Also a node that has been asked to begin and has not begun yet."""
    plan = lay(tmp_path / "run" / f"20260101-000000-00dea{ranks}", "wait", 2)
    script = start(tmp_path)
    wait_for(lambda: len(processes(plan)) >= ranks, "the start of the ranks")
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=200)
    assert script.returncode == 130
    wait_for(lambda: processes(plan) == [], "the end of the ranks")
    time.sleep(2.0)
    assert processes(plan) == []


def modes(folder: str) -> set[int]:
    """Modes of the files that a script laid in a run folder."""
    laid = [*Path(folder).glob("config.yaml"), *Path(folder).glob("env/*")]
    return {path.stat().st_mode & 0o777 for path in laid}


HOSTILE = "$(touch /tmp/pwned) `x` 'single' \"double\" \\ END_OF_FILE é"


@pytest.mark.parametrize("container", [{}, {"container": {"runtime": "docker", "image": "b:1"}}])
def test_shells_take_it_whatever_the_settings_are(container: Mapping[str, object], tmp_path: Path) -> None:
    settings = {"environment": [f"GREETING={HOSTILE}"], "node_folder": "/x", **container}
    odd = tuple(replace(one, root=f"/srv/{HOSTILE}") for one in nodes(3))
    found = Fleet(odd, CODE, "/cache/it's.tar.gz", {"n1": ("ssh", "-F", "/a b", "--", "n1")})
    plan = build_ssh_plan(run_config(cluster=settings, exp="tiny"), found, tmp_path / "it's" / RUN.name)
    script = tmp_path / "plan.sh"
    script.write_text(dict(plan.files)["plan.sh"])
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-n", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_values_of_the_environment_stand_in_no_command() -> None:
    plan = build_ssh_plan(run_config(cluster={"environment": ["TOKEN=canary-7f3a"]}), fleet(2), RUN)
    lines = dict(plan.files)["plan.sh"].splitlines()
    assert [line for line in lines if "canary-7f3a" in line] == ["  - TOKEN=canary-7f3a", *["TOKEN=canary-7f3a"] * 2]


def test_a_here_document_gives_any_text_back(tmp_path: Path) -> None:
    for text in ("a\n", "END_OF_FILE\nEND_OF_FILE_\n$HOME `x` \\\n", "no end of line\n", "\n\n"):
        script = "\n".join(here_document("cat", text))
        assert subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout == text


def test_openssh_is_called_with_the_keys_and_options_that_burst_uses() -> None:
    host = Host("n1", "10.0.0.1", known_hosts=("/home/me/my keys", "/etc/known"), connect_timeout_s=7.0)
    ssh = SshConfig(user="me", port=2222, identity_file="/key", jump="gate", config_file="/cfg")
    assert openssh_command(host, ssh) == (
        *("ssh", "-F", "/cfg", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=7"),
        *("-o", 'UserKnownHostsFile="/home/me/my keys" "/etc/known"'),
        *("-l", "me", "-p", "2222", "-i", "/key", "-J", "gate", "--", "n1"),
    )


def test_nodes_that_are_reached_differently_have_a_command_each() -> None:
    logins = {"n1": ("ssh", "-p", "1", "--", "n1"), "n2": ("ssh", "-p", "2", "--", "n2")}
    plan = build_ssh_plan(run_config(), Fleet((node("n1", 1), node("n2", 2)), CODE, "/c", logins), RUN)
    text = dict(plan.files)["plan.sh"]
    assert '    n1) ssh -p 1 -- "$@" ;;' in text
    assert '    n2) ssh -p 2 -- "$@" ;;' in text

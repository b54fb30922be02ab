"""`burst status`: how a run is, from its folder alone, whoever controls it and whatever lies in it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text
from testkit import ROOT
from testkit.fake_run import LivingRun
from testkit.run_maker import forget_process, health, make_run, plan_document, write_log, write_node
from testkit.terminal import styled
from testkit.waiting import wait_for

from burst_cli.runs.choose import choose_run
from burst_cli.runs.read import PlannedNode, RunFacts, read_facts, read_nodes, read_table
from burst_cli.runs.status import merge_statuses
from cluster.control.attempt import controlling
from cluster.control.link import NodeStatus
from engine.runs.folder import RunFolder, create_run
from engine.runs.process import process_start


def status_of(burst, *argv: str) -> dict:
    return json.loads(burst("status", "--json", *argv).out)


ID = "20260101-000000-aaaaaa"
RESUME = f"burst resume {ID}"
FOLLOW_OR_STOP = [f"burst logs -f {ID}", f"burst cancel {ID}"]


def test_exit_code_follows_the_state(burst, root: Path) -> None:
    for state, code, commands in [
        ("planned", 0, [RESUME]),
        ("starting", 0, FOLLOW_OR_STOP),
        ("running", 0, FOLLOW_OR_STOP),
        ("completed", 0, [f"burst report {ID}"]),
        ("failed", 1, [f"burst logs {ID}", RESUME]),
        ("oom", 1, [f"burst logs {ID}", RESUME]),
        ("cancelled", 130, [RESUME]),
    ]:
        make_run(root / state, state=state)
        where = ("--runs-dir", str(root / state))
        result, document = burst("status", *where), status_of(burst, *where)
        assert (result.code, result.out.splitlines()[1].split()[0]) == (code, state)
        assert (document["status"], document["exit_code"], document["next"]) == (state, code, commands)


@pytest.fixture
def busy(root: Path) -> RunFolder:
    """A run on two nodes that were heard of just now, one of them in trouble."""
    run = make_run(root, nodes={"tb2": 2, "tb1": 2}, steps=10)
    run.append_event("phase", phase="train")
    for text in (*map(str, range(17)), "first", "second", "third", "mfu [b]above[/b] 1", "fifth"):
        run.append_event("warning", message=text)
    write_node(run, "tb2", supervisor={"phase": "running"}, health=health())
    stopped = {"0": {"pid": 1, "state": "R"}, "1": {"pid": 2, "state": "T"}}
    write_node(run, "tb1", supervisor={"phase": "running"}, health=health(ranks=stopped, disk_free_bytes=2**20))
    for path in run.path.glob("nodes/*/*"):
        os.utime(path, (2**32, 2**32))  # no older than now, however slow the test is
    return run


def test_everything_a_person_asks_for_is_there(
    burst, busy: RunFolder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlling(busy):
        lines = [line.rstrip() for line in burst("status").out.splitlines()]
        monkeypatch.setenv("FORCE_COLOR", "1")
        busy.record(leftover=["tb3: no route"])
        pieces = styled(Text.from_ansi(burst("status").out))
    assert {style for text, style in pieces if re.fullmatch(r"\d+:\d\d", text)} == {"dim"}
    assert set(pieces) >= {
        *((f"tiny/{ID}", "bold"), ("ring, 2 x 2 ranks, seq 4,096", "bold dim"), ("running", "bold cyan")),
        *((text, "dim") for text in ("attempt 1", "controller", "progress", "loss", "follows its ranks")),
        *(("MFU", "dim"), ("25%", "bold"), ("tb1", "bold red"), ("running", "green"), ("warning:", "yellow")),
        ("may still run:", "yellow"),
        *(("rank 1 stopped; disk nearly full: 1 MiB free", "bold red"), (f"burst logs -f {ID}", "bold")),
    }
    assert re.fullmatch(r"running  attempt 1  \d+:\d\d", lines.pop(1))
    assert re.fullmatch(rf"controller  process {os.getpid()} on {socket.gethostname()}, since 20\S+Z", lines.pop(1))
    assert lines == [
        f"tiny/{ID}  ring, 2 x 2 ranks, seq 4,096",
        "progress  step 10/200 (5%), 6:20 left, phase train",
        "loss 0.4000 █▄▃▂▂▂▁▁▁▁   tokens/s/device –   MFU 25%   peak memory –",
        "node state   ranks   GPU load memory",
        "tb1  running 1 R 1 T 97%  1.5    25% rank 1 stopped; disk nearly full: 1 MiB free",
        "tb2  running 1 R 1 S 97%  1.5    25%",
        "warning: third",
        "warning: mfu [b]above[/b] 1",
        "warning: fifth",
        "and 19 earlier warnings",
        f"burst logs -f {ID}  follows its ranks",
        f"burst cancel {ID}  stops it",
    ]


def test_document_of_status(burst, busy: RunFolder) -> None:
    busy.record(detached=True)
    with controlling(busy):
        document = status_of(burst)
        assert burst("status").out.splitlines()[2].rstrip().endswith("Z in the background")
    assert all(document.pop(name) for name in ("started_at", "elapsed_s", "silence_s"))
    assert document["controller"].pop("since").startswith("20")
    stopped = {"0": {"pid": 1, "state": "R"}, "1": {"pid": 2, "state": "T"}}
    of_all = {"phase": "running", "heard_s": 0.0, "problem": None, "outcome": None}
    assert document == {
        **{"run_id": ID, "exp": "tiny", "path": str(busy.path), "status": "running", "lost": False, "problem": None},
        **{"exit_code": 0, "attempt": 1, "ended_at": None, "failure": None},
        "controller": {"pid": os.getpid(), "host": socket.gethostname(), "detached": True},
        **{"launcher": "ssh", "attention_preset": "ring", "seq_len": 4096, "world_size": 4},
        **{"phase": "train", "step": 10, "steps": 200, "loss": 0.4, "tokens_per_s": 512.0, "mfu": 0.25},
        **{"tokens_per_s_per_device": None, "peak_memory_bytes": None, "remaining_s": 380.0, "straggler_rank": None},
        "warnings": [*map(str, range(2, 17)), "first", "second", "third", "mfu [b]above[/b] 1", "fifth"],
        "socket_fallback": [],
        "nodes": [
            {"node": "tb2", "mark": "ok", "notes": [], "health": health(), **of_all},
            {
                **{"node": "tb1", "mark": "bad", "notes": ["rank 1 stopped", "disk nearly full: 1 MiB free"]},
                "health": health(ranks=stopped, disk_free_bytes=2**20),
                **of_all,
            },
        ],
        **{"leftover": [], "next": FOLLOW_OR_STOP},
    }


def test_status_of_a_failed_run_shows_the_failure(burst, root: Path) -> None:
    failure = {
        **{"kind": "exception", "type": "ValueError", "message": "no head"},
        **{"rank": 1, "host": "tb1", "advice": "read on"},
    }
    moments = {"started_at": "2026-01-01T00:00:00.000Z", "ended_at": "2026-01-01T00:02:05.000Z"}
    run = make_run(root, state="failed", leftover=["tb2: processes 4711"], **moments)
    write_node(run, "tb1", supervisor={"phase": "running"}, outcome={"exit_code": -9, "cause": "exit"})
    log = write_log(run, "tb1", 1, "importing\nValueError: no head\n")
    run.record(failure={**failure, "log": str(log)})
    result = burst("status")
    assert result.code == 1
    assert [line.rstrip() for line in result.out.splitlines()] == [
        f"tiny/{ID}  ring, 1 x 2 ranks, seq 4,096",
        "failed  attempt 1  2:05",
        "controller  none",
        "node state",
        "tb1  ended ended by signal 9",
        "may still run: tb2: processes 4711",
        f"FAILED tiny/{ID}: rank 1 on tb1",
        "  ValueError: no head",
        f"  last lines of {log}",
        "  │ importing",
        "  │ ValueError: no head",
        "  what to do: read on",
        f"burst logs {ID} --ranks 1  shows what was said last",
        f"{RESUME}  starts the next attempt",
    ]


def test_run_without_plan_whose_process_is_gone_is_unknown(burst, root: Path) -> None:
    run = create_run(root / "tiny" / ID, {})
    run.transition("starting")
    assert burst("status").code == 0
    forget_process(run)
    result = burst("status")
    assert result.code == 3
    assert [line.rstrip() for line in result.out.splitlines()] == [
        f"tiny/{ID}",
        "lost (run.json says starting, and the process that controlled it is gone)  attempt 1",
        "controller  none",
        "progress  step 0/?, phase starting the ranks",
        "unknown: it was started without `burst launch`, and the process that said so in run.json is gone",
        f"{RESUME}  takes it over where it still runs, else starts its next attempt",
        f"burst cancel {ID}  stops what may still run",
    ]
    forget_process(make_run(root, "tiny/20260102-000000-bbbbbb"))
    document = status_of(burst)
    assert (document["lost"], "launch.json: not a launch plan" in document["problem"]) == (True, True)
    assert burst("status", "--watch", "--plain").code == document["exit_code"] == 3


def test_newest_run_is_meant_unless_one_is_named(burst, root: Path) -> None:
    nothing = burst("status")
    assert (nothing.code, "holds no runs. Start one with `burst launch exp=tiny`" in nothing.err) == (2, True)
    for run in ("tiny/20260101-000000-aaaaaa", "tiny/20260103-000000-bbbbbb", "big/20260102-000000-cccccc"):
        make_run(root, run, state="completed")
    make_run(root, "tiny/20260101-000000-dddddd", state="completed")
    two = "2 runs begin so: tiny/20260101-000000-dddddd, tiny/20260101-000000-aaaaaa. Give more of"
    assert two in burst("status", "20260101").err
    named = {None: "bbbbbb", "tiny": "bbbbbb", "tiny/20260101-000000-aaaaaa/": "aaaaaa", "big": "cccccc"}
    assert {name: choose_run(name, root).run_id[-6:] for name in named} == named
    for day in range(4, 9):
        make_run(root, f"tiny/2026010{day}-000000-aaaaaa", state="completed")
    ambiguous = burst("status", "2026010")
    assert (ambiguous.code, "9 runs begin so: tiny/20260108-000000-aaaaaa, tiny/2026" in ambiguous.err) == (2, True)
    assert "tiny/20260101-000000-dddddd and 1 more. Give more of" in ambiguous.err
    assert "tiny/20260101-000000-aaaaaa. Give more of" in burst("status", "tiny/2026010").err  # eight


def test_nonsense_from_a_node_harms_nobody(burst, root: Path) -> None:
    run = make_run(root)
    folder = run.path / "nodes" / "tb1"
    folder.mkdir(parents=True)
    (folder.parent / "\x1b[31mred").mkdir()
    odd = '{"ranks": [1], "gpus": {"a": 1}, "load1": "high"}', '{"ranks": {"x": 3, "-1": {}}}'
    for text in ("", "{", "[]", "null", *odd):
        for name in ("supervisor", "health", "outcome"):
            (folder / f"{name}.json").write_text(text)
        result = burst("status")
        assert (result.code, "\x1b" in result.out) == (0, False)
        assert status_of(burst)["nodes"][0]["node"] == "tb1"
    write_node(run, "tb1", supervisor={"phase": "running"})
    (folder / "outcome.json").unlink()
    with (folder / "health.json").open("wb") as file:
        os.ftruncate(file.fileno(), 2**40)  # is not read
    (status,) = read_nodes(run, read_facts(run))
    assert (status.phase, status.health) == ("running", None)


def test_status_of_an_unreachable_node_is_read_from_files() -> None:
    read = [NodeStatus(name, "running", health=health(), heard_s=7.0) for name in ("tb1", "tb2", "tb3", "tb4", "tb5")]
    mute = [NodeStatus("tb2", problem="no route"), NodeStatus("tb3", "lost", problem="no route")]
    told = [
        NodeStatus("tb4", problem="it is slow", phase="running"),
        NodeStatus("tb1", "ended", outcome={"cause": "exit"}),
    ]
    merged = [told[1], *(replace(one, problem="no route") for one in read[1:3]), told[0], read[4]]
    assert merge_statuses(read, [*mute, *told]) == merged


def test_a_node_was_heard_of_when_it_wrote_last_whatever_its_launcher_wrote_since(root: Path) -> None:
    run, then = make_run(root), time.time() - 500
    write_node(run, "tb1", supervisor={"phase": "running"})
    write_node(run, "another", supervisor={"phase": "running"})
    os.utime(run.path / "nodes/tb1/supervisor.json", (then, then))
    for name in ("lease", "spec.json", "stop.json", "stacks.json"):
        (run.path / "nodes/tb1" / name).touch()
    planned, another = read_nodes(run, read_facts(run))
    assert (planned.heard_s >= 500, another.node, another.heard_s < 500) == (True, "another", True)


def test_what_a_run_was_asked_to_do_is_in_its_plan_or_else_in_its_configuration(tmp_path: Path) -> None:
    document = plan_document({"tb1": 8, "tb2": 4})
    document["config"]["cluster"] = {"hang_timeout_s": 30.0}
    document["nodes"] += [{"hostname": "tb3"}, {}]
    places = {"tb1": range(8), "tb2": range(8, 12), "tb3": range(0), "?": range(0)}
    nodes = tuple(PlannedNode(name, ranks) for name, ranks in places.items())
    planned = read_facts(create_run(tmp_path / "tiny/planned", {"launch.json": json.dumps(document)}))
    assert (planned, planned.shape) == (RunFacts(200, 4096, "ring", 12, 30.0, "ssh", nodes), "4 x 0-8")
    config = "train: {steps: 7, seq_len: 64}\nattention: {preset: burst}\ncluster: {ranks_per_node: 8}"
    bare = read_facts(create_run(tmp_path / "tiny/bare", {"config.yaml": config}))
    assert (bare, bare.shape, RunFacts().shape) == (RunFacts(7, 64, "burst", 8), "8 ranks", "")
    for more, found in ((0, {"a": 1}), (1, {})):  # bytes more than anything of ours has
        (tmp_path / "large.json").write_text('{"a": 1}'.ljust(8 * 2**20 + more))
        assert read_table(tmp_path / "large.json") == found


def test_the_resolved_preset_is_shown_in_place_of_auto(tmp_path: Path) -> None:
    run = create_run(tmp_path / "exp" / ID, {"config.yaml": "attention: {preset: auto}"}, world_size=2)
    assert read_facts(run).preset == "auto", "nothing is resolved yet"
    (run.path / "resolved.json").write_text('{"run": {"method": {"preset": "ulysses"}}}')
    assert read_facts(run).preset == "ulysses"


@pytest.mark.parametrize("width", ["40", "80"])
def test_it_fits_the_terminal(burst, root: Path, monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    run = make_run(root, nodes={f"tb{number}": 2 for number in range(64)}, steps=10)
    for number in range(64):
        write_node(run, f"tb{number}", supervisor={"phase": "running"}, health=health(load1=float(number)))
    monkeypatch.setenv("COLUMNS", width)
    lines = burst("status").out.splitlines()
    assert all(len(line.rstrip()) <= int(width) for line in lines)
    assert len(lines) < 20


def test_watch_ends_with_the_run(burst, root: Path) -> None:
    make_run(root, state="cancelled", steps=3)
    result = burst("status", "--watch", "--plain")
    assert (result.code, "step 3/200" in result.err, "cancelled" in result.out) == (130, True, True)
    assert burst("status", "-w", "--json").code == 2


def test_status_follows_a_run_without_its_controller(burst, tmp_path: Path) -> None:
    with LivingRun(tmp_path / "runs", "wait") as living:
        living.wait_steps()
        led = status_of(burst)
        assert (led["status"], led["lost"], led["controller"]["pid"]) == ("running", False, living.controller.pid)
        command = [sys.executable, "-m", "burst_cli", "status", "-w", "--plain"]
        watch = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert f"node {led['nodes'][0]['node']}: running\n" in (watch.stdout or ())
        living.kill()
        alone = burst("status")
        assert alone.code == 0
        assert "nobody controls it: its ranks end by themselves 60 s after" in alone.out
        (path,) = living.run.path.glob("nodes/*/supervisor.json")
        os.kill(supervisor := json.loads(path.read_text())["pid"], 9)
        # It dies when it is its turn to run.
        wait_for(lambda: process_start(supervisor) is None, "the end of the supervisor")
        assert burst("status").code == 1
        assert living.run.read_state()["state"] == "failed"
        assert (watch.communicate(timeout=200), watch.returncode)[1] == 1


def test_nodes_of_a_run_that_has_ended_are_shown_only_where_something_went_wrong(burst, root: Path) -> None:
    run = make_run(root, state="completed", nodes={"tb1": 2, "tb2": 2})
    assert "tb1" not in burst("status").out
    outcome = {"cause": "lease", "exit_code": 1}
    write_node(run, "tb2", supervisor={"phase": "ended"}, outcome=outcome)
    shown = burst("status").out
    assert "tb2" in shown, shown
    assert "tb1" not in shown

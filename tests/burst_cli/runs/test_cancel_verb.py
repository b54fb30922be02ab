"""`burst cancel`: runs end, wherever they are led, and it is said what ended how."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from testkit.fake_run import LivingRun
from testkit.process_table import run_processes
from testkit.run_maker import make_run
from testkit.terminal import styled
from testkit.waiting import wait_for

from burst_cli.runs.cancel import Cancelled
from cluster.control.attempt import RunState


def test_cancel_ends_the_run_with_its_controller(burst, root: Path) -> None:
    with LivingRun(root, "wait") as living:
        living.wait_steps()
        result, name = burst("cancel"), f"tiny/{living.run.run_id}"
        assert result == (0, f"cancelled {name} after step 5\n", f"{name}: asked to stop, waiting for its end\n")
        assert living.controller.wait(200) == 130
        assert run_processes(living.run.run_id) == []
        assert living.run.read_state()["exit_code"] == 130


def test_run_whose_launcher_was_killed_ends_at_once(burst, root: Path) -> None:
    with LivingRun(root, "ignore") as living:
        living.wait_steps()
        living.kill()
        assert run_processes(living.run.run_id)
        result = burst("cancel", living.run.run_id[-6:], "--now", "--json")
        document = json.loads(result.out)
        assert result.code == document["exit_code"] == 0
        assert result.err == f"tiny/{living.run.run_id}: asked to stop at once, waiting for its end\n"
        (entry,) = document["runs"]
        assert (entry["status_before"], entry["status"], entry["problem"]) == ("running", "cancelled", None)
        wait_for(lambda: run_processes(living.run.run_id) == [], "the end of all processes", 10.0)


def test_run_that_has_ended_or_never_began_is_left_or_cancelled_at_once(burst, root: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    for number, state in enumerate(("completed", "failed", "cancelled", "oom")):
        run = make_run(root, f"tiny/20260101-00000{number}-aaaaaa", state=state)
        kept = run.read_state()
        result = burst("cancel", run.run_id)
        assert (result.code, result.out) == (0, f"{state} tiny/{run.run_id}: it had already ended\n")
        assert run.read_state() == kept
    planned = make_run(root, "tiny/20260102-000000-bbbbbb", state="planned")
    assert burst("cancel", "--all").out == "All runs have ended.\n"  # of those that have begun
    assert json.loads(burst("cancel", "--all", "--json").out) == {"runs": [], "exit_code": 0}
    assert burst("cancel", planned.run_id).code == 0
    assert planned.read_state()["state"] == "cancelled"
    assert signal.getsignal(signal.SIGINT) == before


def test_mistakes_are_named(burst, root: Path) -> None:
    first = make_run(root, state="starting", steps=1)
    make_run(root, "tiny/20260102-000000-bbbbbb", state="running")
    names = "tiny/20260102-000000-bbbbbb, tiny/20260101-000000-aaaaaa"
    said = {
        ("--all", "aaaaaa"): "leave out aaaaaa",
        (): f"2 runs have not ended: {names}. Say which one",
        ("cccccc",): "cccccc: no such run",
    }
    assert {words: burst("cancel", *words).code for words in said} == dict.fromkeys(said, 2)
    assert [words for words, text in said.items() if text not in burst("cancel", *words).err] == []
    (first.path / "launch.json").unlink()
    result = burst("cancel", "aaaaaa", "--json")
    (entry,) = result.document["runs"]
    assert (result.code, entry["exit_code"], entry["status"], entry["step"]) == (1, 1, "starting", None)
    assert "`burst launch` did not start this run" in entry["problem"]
    (first.path / "run.json").write_text("{")
    result = burst("cancel", "aaaaaa")
    assert result.code == 1
    assert result.out.startswith(f"not stopped tiny/{first.run_id}\n  {first.path}/run.json")


def test_whether_it_has_ended_may_be_unknown(root: Path) -> None:
    for state, facts, lines in [
        ("cancelled", {"leftover": ["tb3: no route"]}, ["cancelled {} after step 7", "  may still run: tb3: no route"]),
        ("running", {"problem": "it has not ended"}, ["not stopped {} after step 7", "  it has not ended"]),
    ]:
        run = make_run(root / state, state=state, nodes={"tb1": 2, "tb2": 2, "tb3": 2}, steps=7)
        leftover, problem = facts.get("leftover", []), facts.get("problem")
        result = Cancelled(run, "running", RunState({"state": state, "leftover": leftover}, problem=problem))
        assert result.to_dict() == {
            **{"run_id": run.run_id, "exp": "tiny", "path": str(run.path), "step": 7, "exit_code": 3},
            **{"status": state, "status_before": "running", "problem": problem, "leftover": leftover},
        }
        assert result.text.plain.splitlines() == [line.format(f"tiny/{run.run_id}") for line in lines]
        assert styled(result.text) == [(lines[0].partition(" {}")[0], "bold yellow"), (lines[1].strip(), "yellow")]

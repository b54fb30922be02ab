"""What a node of a job of Slurm is said to do, how its job is begun and ended: Slurm's commands are scripts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from testkit.waiting import wait_for

from cluster.agent.folder import NodeFiles, make_folder, write_json
from cluster.failure import Failure
from cluster.launch.slurm.job import SlurmJob, SlurmLink

STOPPED = {"cause": "stop", "stop_cause": "SIGTERM"}
TIME_LIMIT = ("launcher", "time limit")


def node_of(job: SlurmJob, name: str = "n1", **files: dict[str, object]) -> SlurmLink:
    """The link to a node with these files."""
    paths = NodeFiles(str(job.run.path), name)
    make_folder(paths.state_dir)
    for file, content in files.items():
        write_json(getattr(paths, file), content)
    return SlurmLink(job, name)


@pytest.mark.parametrize(
    ("state", "outcome", "cause", "is_synced", "failure"),
    [
        (None, STOPPED, "SIGTERM", False, None),
        ("RUNNING", STOPPED, "SIGTERM", False, None),  # why Slurm did so shows when the job is over
        ("CANCELLED", STOPPED, "scancel", True, None),
        ("FAILED", STOPPED, "failure", True, None),
        ("TIMEOUT", STOPPED, "failure", True, ("launcher", "Slurm: TIMEOUT")),
        ("CANCELLED", {**STOPPED, "stop_cause": "Ctrl-C"}, "Ctrl-C", True, None),
        ("FAILED", {**STOPPED, "cause": "exit"}, "SIGTERM", True, None),
        ("RUNNING", {**STOPPED, "stop_cause": "time limit"}, "time limit", True, TIME_LIMIT),
    ],
)
def test_who_stopped_a_node_is_told_by_its_outcome_and_by_slurm(job, state, outcome, cause, is_synced, failure):
    one = job(f"echo JobState={state}")
    assert state is None or one.look() == (state == "RUNNING")
    seen = node_of(one, outcome=outcome).poll()

    assert (seen.phase, seen.heard_s, seen.is_synced) == ("ended", 0.0, is_synced)
    assert seen.outcome == {**outcome, "stop_cause": cause}
    assert (seen.failure and (seen.failure.kind, seen.failure.type)) == failure
    assert failure != TIME_LIMIT or seen.failure.message.startswith("Slurm job 5 came near its time limit")


@pytest.mark.parametrize(("state", "phase"), [(None, "starting"), ("PENDING", "starting"), ("RUNNING", "none")])
def test_a_node_whose_job_waits_is_about_to_start(job, state, phase):
    one = job(f"echo JobState={state}")
    assert state is None or one.look()
    assert SlurmLink(one, "n1").poll().phase == phase


def test_a_start_is_over_when_the_supervisor_is_there_or_says_why_not(job):
    one = job("echo JobState=RUNNING")
    one.look()
    link, lives = node_of(one), {"host": "elsewhere", "pid": 1, "phase": "running"}
    link.start(None)
    seen = link.poll()
    assert (seen.phase, seen.has_started, seen.refusal, seen.swept, one.is_led) == ("none", False, None, None, False)
    node_of(one, supervisor={**lives, "updated_at": 1})
    assert (link.poll().phase, link.poll().has_started) == ("running", True)
    wait_for(lambda: link.poll().heard_s > 0.3)
    for news in ({"supervisor": {**lives, "updated_at": 2}}, {"health": {"at": 1}}):
        wait_for(lambda: link.poll().heard_s > 0.3)
        node_of(one, **news)
        assert link.poll().heard_s < 0.3
    link.beat()
    assert one.is_led
    refused = node_of(one, "n2", outcome={"cause": "start_failed", "error": "no room"})
    assert refused.poll().refusal is None  # nobody has asked it to
    refused.start(None)
    assert (refused.poll().refusal.kind, str(refused.poll().refusal)) == ("command", "n2: no room")


def test_what_slurm_says_of_a_job_that_is_over_is_the_end_of_nodes_that_say_nothing(job):
    begin, jobs = time.monotonic(), []
    for number, state in enumerate(("CANCELLED", "TIMEOUT")):
        jobs.append(job(f"echo JobState={state}", number=number))
        assert not jobs[-1].look()
    links = [node_of(one) for one in jobs]
    for link, one in zip(links, jobs, strict=True):
        link.start(None)
        seen = link.poll()
        early = (seen.phase, seen.refusal, seen.swept, one.refusal())
        assert one.is_over or early == ("none", None, (), None)  # its files may come late
    wait_for(lambda: all(one.is_over for one in jobs))
    assert time.monotonic() - begin > 2.9
    cancelled, late = (link.poll() for link in links)
    outcome = {"cause": "stop", "stop_cause": "scancel"}
    assert (cancelled.phase, cancelled.is_synced, cancelled.outcome) == ("ended", True, outcome)
    assert (late.phase, late.problem, late.failure) == ("lost", jobs[1].describe_end(), jobs[1].failure())
    said = [(seen.refusal.kind, str(seen.refusal)) for seen in (cancelled, late)]
    assert said == [("command", f"n1: {one.describe_end()}") for one in jobs]
    refusal = Failure("start", "SlurmError", jobs[0].describe_end(), log=str(jobs[0].log))
    assert [one.refusal() for one in jobs] == [refusal, jobs[1].failure()]


@pytest.mark.parametrize(
    ("words", "cancelled"),
    [({}, ["scancel 5"]), ({"token": "step-abc"}, ["scancel 5.0"]), ({"job_id": None}, [])],
    ids=["job", "step", "unknown"],
)
def test_a_sweep_has_slurm_end_the_job_or_its_step_and_is_no_scancel(job, fake, tmp_path, words, cancelled):
    fake("squeue", "echo 5.0 burst-20260131-120000-abc123" if words.get("job_id", "5") else "")
    fake("scancel", "")
    one = job("echo JobState=CANCELLED", **words)
    link = node_of(one, outcome=STOPPED)
    link.sweep()
    wait_for(one.has_ended)
    asked = (tmp_path / "bin" / "asked").read_text().splitlines()

    assert [line for line in asked if line.startswith("scancel")] == cancelled
    assert link.poll().outcome["stop_cause"] == "failure"  # of another node: we have the peers ended
    link.close()
    one.watch()
    assert (tmp_path / "bin" / "asked").read_text().splitlines() == asked


def test_a_job_is_submitted_with_the_token_that_lies_in_the_run_folder(job, fake, tmp_path):
    fake("sbatch", "echo 31")
    one = job(token="", job_id=None)
    one.begin(start=False)
    assert not (one.run.path / "slurm.token").exists()
    one.begin(start=True)
    assert (one.run.path / "slurm.token").read_text() == f"{one.token}\n"
    asked = (tmp_path / "bin" / "asked").read_text()
    assert (len(one.token), asked) == (16, f"sbatch --parsable {one.run.path}/job.sbatch {one.token}\n")
    assert (one.job_id, one.run.read_state()["job"]) == ("31", "31")


def test_within_an_allocation_the_batch_file_runs_at_once_in_a_session_of_its_own(job, fake):
    inherited = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SECRET": "x"}
    one = job("echo JobState=RUNNING", "", None, **inherited)
    fake("squeue", "")
    one.run.path.joinpath("job.sbatch").write_text('cut -d" " -f6 /proc/$$/stat; echo $$; echo $1 $PWD; cat; env; exit')
    (one.run.path / "slurm-7.log").write_text("before\n")
    one.begin(start=True)
    pid = wait_for(lambda: (lines := one.log.read_text().splitlines())[-1].startswith("_=") and lines[2])
    before, session, _, said, *environment = one.log.read_text().splitlines()

    assert (before, session, said) == ("before", pid, f"{one.token} /")
    assert {"SLURM_JOB_ID=7", "SLURM_OVERLAP=1"} <= set(environment)
    assert not [line for line in environment if line.startswith(("SLURM_RESTART_COUNT", "SECRET"))]
    wait_for(lambda: not (Path(f"/proc/{pid}")).exists(), "that somebody has waited for it")
    assert one.look()  # a step that was asked for may yet begin

"""Slurm's answers become values and words; its commands have time limits and see no secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from cluster.launch.scheduler import SchedulerError
from cluster.slurm.client import (
    JobStatus,
    SlurmClient,
    client_environment,
    describe_end,
    parse_job,
)
from cluster.slurm.job import SlurmJob
from engine.config.cluster import SlurmConfig
from engine.runs.folder import RunFolder

SHOWN = (Path(__file__).parent / "fixtures" / "scontrol_show_job.txt").read_text()


@pytest.fixture
def fake(tmp_path):
    """Puts a shell script in the place of a command of Slurm; a client that finds it."""
    tools = tmp_path / "bin"
    tools.mkdir()

    def lay(name: str, script: str) -> SlurmClient:
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
        return SlurmClient({"PATH": f"{tools}:/usr/bin:/bin"})

    return lay


def test_a_running_job_is_read_from_what_scontrol_shows():
    status = parse_job(SHOWN)

    assert status == JobStatus("RUNNING", "", "sl[1-2]", 0, None, "02:00:00")
    assert status.phase == "running"


def test_what_a_user_can_choose_does_not_change_the_state():
    shown = SHOWN.replace("Command=/w/job", "Command=/w/ JobState=FAILED Reason=x /job")

    assert parse_job(shown) == parse_job(SHOWN)


@pytest.mark.parametrize(
    ("state", "phase"),
    [("CONFIGURING", "pending"), ("COMPLETING", "running"), ("OUT_OF_MEMORY", "ended"), ("A_NEW_STATE", "running")],
)
def test_every_state_has_a_phase(state, phase):
    assert JobStatus(state).phase == phase


def test_why_a_job_waits_and_how_it_ended_is_said_in_words():
    assert JobStatus("PENDING", "Resources").waits_for == "nodes that are free"
    assert JobStatus("PENDING", "Nodes_required_for_job_are_DOWN").waits_for == "Nodes required for job are DOWN"
    assert "time limit (00:10:00)" in describe_end(JobStatus("TIMEOUT", time_limit="00:10:00"))
    assert "lost a node, one of n[1-2]" in describe_end(JobStatus("NODE_FAIL", node_list="n[1-2]"))
    assert "signal 53, JobLaunchFailure" in describe_end(JobStatus("FAILED", "JobLaunchFailure", signal=53))


def test_a_submitted_job_has_a_number(fake):
    assert fake("sbatch", "echo 1234").submit(Path("/x")) == "1234"


@pytest.mark.parametrize("answer", ["", "Submitted batch job", "12; rm -rf /", "-12"])
def test_an_answer_that_is_no_number_is_refused(fake, answer):
    with pytest.raises(SchedulerError, match="expected the number of a job"):
        fake("sbatch", f"echo '{answer}'").submit(Path("/x"))


def test_a_job_that_slurm_has_forgotten_is_gone(fake):
    client = fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")

    assert client.query("5").phase == "ended"


def test_slurms_own_words_are_told_cleaned(fake):
    client = fake("sbatch", "printf 'sbatch: error: invalid \\033[31mpartition: nope\\n' >&2; exit 1")
    with pytest.raises(SchedulerError, match="invalid partition: nope") as caught:
        client.submit(Path("/x"))

    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
            "does not answer",
        ),
        ("echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1", "set SLURM_CONF"),
    ],
)
def test_slurm_that_cannot_be_used_has_an_exit_code_of_its_own(fake, script, words):
    with pytest.raises(SchedulerError, match=words) as caught:
        fake("scontrol", script).query("5")

    assert caught.value.exit_code == 3


def test_a_command_that_hangs_is_given_up(fake):
    client = fake("sinfo", "exec sleep 60")
    begin = machine_time()
    with pytest.raises(SchedulerError, match="got no answer"):
        client._run(("sinfo",), timeout_s=0.3)

    assert machine_time() - begin < 5


def test_a_machine_without_slurm_is_told_the_package():
    with pytest.raises(SchedulerError, match="slurm-client"):
        SlurmClient({"PATH": "/nowhere"}).ping()


def test_steps_are_found_by_their_name_alone(fake):
    client = fake("squeue", "printf '5.batch batch\\n5.0 burst-x\\n5.1 other\\n5.2;id burst-x\\n'")

    assert client.steps("5", "burst-x") == ("5.0",)


def test_lost_nodes_are_those_that_slurm_does_not_reach(fake):
    client = fake("sinfo", "printf 'n1 idle\\nn2 down*\\nn3 allocated\\nn4 draining\\n'")

    assert client.lost_nodes("n[1-4]") == ("n2", "n4")


def test_a_job_sees_no_secret_of_its_submitter():
    given = {"PATH": "/bin", "WANDB_API_KEY": "canary", "SLURM_CONF": "/c", "AWS_SECRET": "canary", "SLURM_NTASKS": "9"}

    assert client_environment(given) == {"PATH": "/bin", "SLURM_CONF": "/c"}


def test_defaults_of_a_site_stay_unless_the_configuration_says_otherwise():
    site = {f"SBATCH_{name}": "site" for name in ("ACCOUNT", "PARTITION", "QOS", "CONSTRAINT", "TIMELIMIT")}
    said = SlurmConfig(time_limit="1:00", options=("--partition=mine", "--qos=mine", "--contiguous"))

    assert client_environment({**site, "SBATCH_NODES": "9"}) == site
    assert client_environment(site, said) == {"SBATCH_ACCOUNT": "site", "SBATCH_CONSTRAINT": "site"}


def test_a_job_whose_number_was_not_written_down_is_found_by_its_name(fake, tmp_path):
    fake("squeue", 'echo "$@" >"$(dirname "$0")/asked"; echo 31')
    client = fake("scontrol", f"cat {Path(__file__).parent}/fixtures/scontrol_show_job.txt")
    job = SlurmJob(
        RunFolder(tmp_path / "20260131-120000-abc123"), "abc", None, environment=client.environment, poll_s=0.05
    )
    job.watch()
    wait_for(lambda: job.status)
    job.close()

    assert (job.job_id, job.status and job.status.state) == ("31", "RUNNING")
    assert "--name=burst-20260131-120000-abc123" in (tmp_path / "bin" / "asked").read_text()


def test_an_unreachable_controller_is_a_problem_and_not_the_end(fake, tmp_path):
    client = fake("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    job = SlurmJob(RunFolder(tmp_path), "abc", "5", environment=client.environment, poll_s=0.05)
    job.watch()
    wait_for(lambda: job.problem)
    job.close()

    assert "does not answer" in (job.problem or "")
    assert not job.has_ended()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("srun: error: n2: task 1: Killed\nsrun: Force Terminated StepId=1.0\n", "n2: task 1: Killed"),
        ("noise\n0: burst: n2: no address for the other nodes\nsrun: error: n2: task 1: Exited\n", "n2: no address"),
        ("bash: /py: No such file or directory\n", "No such file or directory"),
    ],
)
def test_a_failed_job_is_explained_by_the_line_of_its_log_that_says_most(tmp_path, log, words):
    (tmp_path / "slurm-5.log").write_text(log)
    job = SlurmJob(RunFolder(tmp_path), "abc", "5")
    job.status = JobStatus("FAILED", exit_code=1)

    assert words in job.describe_end()


@pytest.mark.parametrize(("token", "is_led"), [("abc", True), ("abc", False), ("step-abc", True)])
def test_a_job_that_slurm_requeues_has_ended_and_is_cancelled_by_who_leads_the_run(fake, tmp_path, token, is_led):
    fake("squeue", "echo 5.0 burst-x")
    fake("scancel", 'echo "$@" >"$(dirname "$0")/cancelled"')
    client = fake("scontrol", "echo 'JobId=5 JobState=PENDING Reason=BeginTime Requeue=1 Restarts=1 NodeList=(null)'")
    job = SlurmJob(RunFolder(tmp_path / "x"), token, "5", environment=client.environment)
    job.is_led = is_led
    job.look()
    job.close()

    failure = job.failure()
    assert job.has_ended() == (failure is not None) == (token == "abc")
    assert failure is None or (failure.kind, "requeued" in failure.message) == ("launcher", True)
    assert (tmp_path / "bin" / "cancelled").exists() == (token == "abc" and is_led)


@pytest.mark.parametrize("status", [JobStatus("FAILED", signal=53), JobStatus("FAILED", exit_code=66)])
def test_a_job_that_cannot_see_the_run_folder_is_told_what_it_needs(tmp_path, status):
    job = SlurmJob(RunFolder(tmp_path), "abc", "5")
    job.status = status

    assert "all nodes share" in job.describe_end()

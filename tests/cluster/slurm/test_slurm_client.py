"""Slurm's answers become values and words; its commands have time limits and see no secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit import write_program
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from cluster.launch.scheduler import SchedulerError
from cluster.slurm.client import JobStatus, SlurmClient, client_environment, describe_end, parse_job
from cluster.slurm.job import SlurmJob
from engine.config.cluster import SlurmConfig
from engine.runs.folder import RunFolder

FIXTURE = Path(__file__).parent / "fixtures" / "scontrol_show_job.txt"
RUNNING = JobStatus("RUNNING", "", "sl[1-2]", 0, None, "02:00:00")


@pytest.fixture
def fake(tmp_path):
    """Puts a shell script in the place of a command of Slurm; an environment in which it is found."""

    def lay(name: str, script: str) -> dict[str, str]:
        return {"PATH": f"{write_program(tmp_path / 'bin' / name, script).parent}:/usr/bin:/bin"}

    return lay


@pytest.fixture
def job(fake, tmp_path):
    """A job numbered 5 whose scontrol is a script."""

    def make(script: str = "", token: str = "abc", job_id: str | None = "5") -> SlurmJob:
        run = RunFolder(tmp_path / "20260131-120000-abc123")
        run.path.mkdir()
        return SlurmJob(run, token, job_id, environment=fake("scontrol", script), poll_s=0.05)

    return make


def test_a_running_job_is_read_from_what_scontrol_shows_whatever_its_user_called_it():
    shown = FIXTURE.read_text()

    assert parse_job(shown) == RUNNING
    assert RUNNING.phase == "running"
    assert parse_job(shown.replace("Command=/w/job", "Command=/w/ JobState=FAILED Reason=x /job")) == RUNNING


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


def test_what_slurms_commands_say_is_read(fake):
    environment = fake("sbatch", "echo 1234")
    fake("squeue", "printf '5.batch batch\\n5.0 burst-x\\n5.1 other\\n5.2;id burst-x\\n'")
    fake("sinfo", "printf 'n1 idle\\nn2 down*\\nn3 allocated\\nn4 draining\\n'")
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    client = SlurmClient(environment)

    assert client.submit(Path("/x")) == "1234"
    assert client.steps("5", "burst-x") == ("5.0",)
    assert client.lost_nodes("n[1-4]") == ("n2", "n4")
    assert client.query("5").phase == "ended"  # Slurm has forgotten it


@pytest.mark.parametrize(
    ("script", "told", "exit_code"),
    [
        *((f"echo '{said}'", "expected the number of a job", 1) for said in ("", "Submitted", "12; rm -rf /", "-12")),
        ("printf 'sbatch: error: invalid \\033[31mpartition: nope\\n' >&2; exit 1", "invalid partition: nope", 1),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", "does not answer", 3),
        ("echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1", "set SLURM_CONF", 3),
        (None, "sbatch not found: install Slurm's client.*slurm-client", 3),
    ],
)
def test_why_slurm_cannot_be_used_is_told_cleaned_and_by_the_exit_code(fake, script, told, exit_code):
    environment = {"PATH": "/nowhere"} if script is None else fake("sbatch", script)
    with pytest.raises(SchedulerError, match=told) as caught:
        SlurmClient(environment).submit(Path("/x"))

    assert caught.value.exit_code == exit_code


def test_a_command_that_hangs_is_given_up(fake):
    client = SlurmClient(fake("sinfo", "exec sleep 60"))
    begin = machine_time()
    with pytest.raises(SchedulerError, match="got no answer"):
        client._run(("sinfo",), timeout_s=0.3)

    assert machine_time() - begin < 5


def test_a_job_sees_no_secret_of_its_submitter_and_defaults_of_a_site_unless_the_configuration_says_otherwise():
    given = {"PATH": "/bin", "WANDB_API_KEY": "canary", "SLURM_CONF": "/c", "AWS_SECRET": "canary", "SLURM_NTASKS": "9"}
    site = {f"SBATCH_{name}": "site" for name in ("ACCOUNT", "PARTITION", "QOS", "CONSTRAINT", "TIMELIMIT")}
    said = SlurmConfig(time_limit="1:00", options=("--partition=mine", "--qos=mine", "--contiguous"))

    assert client_environment(given) == {"PATH": "/bin", "SLURM_CONF": "/c"}
    assert client_environment({**site, "SBATCH_NODES": "9"}) == site
    assert client_environment(site, said) == {"SBATCH_ACCOUNT": "site", "SBATCH_CONSTRAINT": "site"}


def test_a_job_whose_number_was_not_written_down_is_found_by_its_name(job, fake, tmp_path):
    fake("squeue", 'echo "$@" >"$(dirname "$0")/asked"; echo 31')
    found = job(f"cat {FIXTURE}", job_id=None)
    found.watch()
    wait_for(lambda: found.status)
    found.close()

    assert (found.job_id, found.status) == ("31", RUNNING)
    assert "--name=burst-20260131-120000-abc123" in (tmp_path / "bin" / "asked").read_text()


def test_an_unreachable_controller_is_a_problem_and_not_the_end(job):
    unreachable = job("echo 'Unable to contact slurm controller' >&2; exit 1")
    unreachable.watch()
    wait_for(lambda: unreachable.problem)
    unreachable.close()

    assert "does not answer" in (unreachable.problem or "")
    assert not unreachable.has_ended()


@pytest.mark.parametrize(
    ("status", "log", "words"),
    [
        (
            JobStatus("FAILED", exit_code=1),
            "srun: error: n2: task 1: Killed\nsrun: Force Terminated StepId=1.0\n",
            "n2: task 1: Killed",
        ),
        (
            JobStatus("FAILED", exit_code=1),
            "noise\n0: burst: n2: no address for the other nodes\nsrun: error: n2: task 1: Exited\n",
            "n2: no address",
        ),
        (JobStatus("FAILED", exit_code=1), "bash: /py: No such file or directory\n", "No such file or directory"),
        (JobStatus("FAILED", signal=53), "", "all nodes share"),
        (JobStatus("FAILED", exit_code=66), "", "all nodes share"),
    ],
)
def test_a_failed_job_is_explained_by_its_code_or_the_line_of_its_log_that_says_most(job, status, log, words):
    failed = job()
    failed.log.write_text(log)
    failed.status = status

    assert words in failed.describe_end()


@pytest.mark.parametrize(("token", "is_led"), [("abc", True), ("abc", False), ("step-abc", True)])
def test_a_job_that_slurm_requeues_has_ended_and_is_cancelled_by_who_leads_the_run(job, fake, tmp_path, token, is_led):
    fake("squeue", "echo 5.0 burst-20260131-120000-abc123")
    fake("scancel", 'echo "$@" >"$(dirname "$0")/cancelled"')
    again = job("echo 'JobId=5 JobState=PENDING Reason=BeginTime Requeue=1 Restarts=1 NodeList=(null)'", token)
    again.is_led = is_led
    again.look()
    again.close()

    failure = again.failure()
    assert again.has_ended() == (failure is not None) == (token == "abc")
    assert failure is None or (failure.kind, "requeued" in failure.message) == ("launcher", True)
    assert (tmp_path / "bin" / "cancelled").exists() == (token == "abc" and is_led)

"""Slurm's answers become values and words; its commands have time limits and see no secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from cluster.control.runner import SurveyOptions
from cluster.failure import Failure
from cluster.launch.scheduler import SchedulerError
from cluster.launch.slurm.client import JobStatus, SlurmClient, client_environment, describe_end, parse_job
from cluster.launch.slurm.job import SlurmLink
from cluster.launch.slurm.runner import RUNNER
from engine.config.cluster import ClusterConfig, SlurmConfig
from engine.config.settings import RunConfig

FIXTURE = Path(__file__).parent / "fixtures" / "scontrol_show_job.txt"
RUNNING = JobStatus("RUNNING", "", "sl[1-2]", 0, None, "02:00:00")


def test_a_running_job_is_read_from_what_scontrol_shows_whatever_its_user_called_it():
    shown = FIXTURE.read_text()

    assert parse_job(shown) == RUNNING
    assert RUNNING.phase == "running"
    assert parse_job(shown.replace("Command=/w/job", "Command=/w/ JobState=FAILED Reason=x /job")) == RUNNING


def test_what_a_job_does_not_say_is_not_known():
    assert parse_job("slurm_load_jobs error") is None
    assert parse_job("JobState=PENDING NodeList=(null)") == JobStatus("PENDING")
    assert parse_job("JobState=FAILED Reason=NonZeroExitCode ExitCode=1:9") == JobStatus("FAILED", "", "", 1, 9)


PENDING = "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT"
OUTSIDE = "TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE"  # ends that Slurm brings about
ENDED = f"COMPLETED FAILED CANCELLED REVOKED {OUTSIDE}"
REASONS = "Resources Priority ReqNodeNotAvail PartitionConfig PartitionNodeLimit PartitionTimeLimit BadConstraints"
REASONS += " Dependency BeginTime JobHeldUser JobHeldAdmin"
KEPT = "HOME USER LOGNAME SHELL TZ TMPDIR LANG LANGUAGE LC_ALL LD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX"


def test_every_state_has_a_phase():
    pending, running, ended = f"CONFIGURING {PENDING}", "COMPLETING A_NEW_STATE", f"OUT_OF_MEMORY {ENDED}"
    for phase, states in {"pending": pending, "running": running, "ended": ended}.items():
        assert {state: JobStatus(state).phase for state in states.split()} == dict.fromkeys(states.split(), phase)


def test_why_a_job_waits_and_how_it_ended_is_said_in_words():
    assert JobStatus("PENDING", "Resources").waits_for == "nodes that are free"
    assert JobStatus("PENDING", "Nodes_required_for_job_are_DOWN").waits_for == "Nodes required for job are DOWN"
    assert JobStatus("PENDING").waits_for == "its turn"
    assert not [reason for reason in REASONS.split() if JobStatus("PENDING", reason).waits_for == reason]
    known = ["OUT_OF_MEMORY", "COMPLETED", "CANCELLED", *OUTSIDE.split()]
    assert not [state for state in known if describe_end(JobStatus(state)).startswith("ended: ")]
    assert describe_end(JobStatus("COMPLETED")) == "completed"
    assert "time limit (00:10:00)" in describe_end(JobStatus("TIMEOUT", time_limit="00:10:00"))
    assert "time limit (the default of its partition)" in describe_end(JobStatus("TIMEOUT"))
    assert "lost a node, one of n[1-2]: it" in describe_end(JobStatus("NODE_FAIL", node_list="n[1-2]"))
    assert "lost a node: n1, n2: it" in describe_end(JobStatus("NODE_FAIL"), ("n1", "n2"))
    failed = JobStatus("FAILED", "JobLaunchFailure", signal=53)
    assert describe_end(failed) == "ended: FAILED, signal 53, JobLaunchFailure"
    assert describe_end(JobStatus("FAILED", exit_code=0)) == "ended: FAILED, exit code 0"


def test_what_slurms_commands_say_is_read(fake, tmp_path):
    environment = fake("sbatch", "printf 'a word of the site\\n1234\\n'")
    fake("squeue", "printf '5.batch batch\\n5.0 burst-x\\n5.1 other\\n5.2;id burst-x\\n'")
    fake("sinfo", "printf 'n1 idle\\nn2 down*\\nn3 allocated\\nn4 draining\\nn2 down*\\ndown\\n'")
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake("scancel", "")
    client = SlurmClient(environment)

    assert client.submit(Path("/x"), "token") == "1234"
    assert client.steps("5", "burst-x") == ("5.0",)
    assert client.find("burst-x") is None
    fake("squeue", "printf '5\\n6\\n'")
    assert client.find("burst-x") == "6"
    assert client.lost_nodes("n[1-4]") == ("n2", "n4")
    assert client.query("5") == JobStatus("GONE")  # Slurm has forgotten it
    client.cancel("5.0")
    client.ping()
    asked = (tmp_path / "bin" / "asked").read_text().splitlines()
    find = "squeue --noheader --me --name=burst-x --format=%A"
    assert asked == [
        *("sbatch --parsable /x token", "squeue --noheader --steps --jobs=5 --format=%i %j", find, find),
        *("sinfo --noheader --Node --nodes=n[1-4] --format=%N %T", "scontrol --oneliner show job 5", "scancel 5.0"),
        "sinfo --noheader --format=%P",
    ]
    fake("sinfo", "exit 1")
    assert client.lost_nodes("") == client.lost_nodes("n1") == ()
    refused = {"echo denied; exit 1": "denied", "exit 9": "scontrol: exit code 9", r"printf 'x\377'": "no state in"}
    for script, told in refused.items():
        fake("scontrol", script)
        with pytest.raises(SchedulerError, match=told):
            client.query("5")


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
    whole = "sbatch not found: install Slurm's client (Debian's package is slurm-client), or put it on PATH"
    assert script is not None or str(caught.value) == whole


def test_only_a_rehearsal_does_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    config = RunConfig(cluster=ClusterConfig(backend="gloo", num_nodes=2))
    assert RUNNER.survey(config, SurveyOptions(dry_run=True)).plan(config, tmp_path).world_size == 2
    with pytest.raises(SchedulerError, match="sinfo not found"):
        RUNNER.survey(config, SurveyOptions())


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
    others = SlurmConfig(options=("--account=mine", "--constraint=mine"))
    kept = dict.fromkeys(KEPT.split(), "x")

    assert client_environment(given) == {"PATH": "/bin", "SLURM_CONF": "/c"}
    assert client_environment(kept) == kept
    assert client_environment(site, others).keys() == site.keys() - {"SBATCH_ACCOUNT", "SBATCH_CONSTRAINT"}
    assert client_environment({**site, "SBATCH_NODES": "9"}) == site
    assert client_environment(site, said) == {"SBATCH_ACCOUNT": "site", "SBATCH_CONSTRAINT": "site"}


def test_a_job_whose_number_was_not_written_down_is_found_by_its_name(job, fake, tmp_path):
    fake("squeue", "echo 31")
    found = job(f"cat {FIXTURE}", job_id=None)
    found.watch()
    wait_for(lambda: found.status)
    found.close()

    assert (found.job_id, found.status) == ("31", RUNNING)
    assert (found.end_command, found.log.name) == ("scancel 31", "slurm-31.log")
    assert found.waits_for() == "Slurm job 31 runs; its nodes prepare"
    found.status = JobStatus("PENDING", "Priority")
    assert found.waits_for() == "Slurm job 31 waits for jobs of higher priority"
    found.status = None
    assert found.waits_for() == "Slurm job 31 waits for its turn"
    assert "--name=burst-20260131-120000-abc123" in (tmp_path / "bin" / "asked").read_text()


def test_an_unreachable_controller_is_a_problem_and_not_the_end(job):
    unreachable = job("echo 'Unable to contact slurm controller' >&2; exit 1")
    assert unreachable.look()
    assert "does not answer" in (unreachable.problem or "")
    assert unreachable.waits_for() == f"Slurm job 5: {unreachable.problem}"
    assert not unreachable.has_ended()


FAILED = JobStatus("FAILED", "Why", exit_code=1)


@pytest.mark.parametrize(
    ("status", "log", "words"),
    [
        (FAILED, "srun: error: n2: task 1: Killed\nsrun: Force Terminated StepId=1.0\n", "n2: task 1: Killed"),
        (FAILED, "0: burst: n1: noise\n0: burst: n2: no way\nsrun: error: n2: task 1: Exited\n", "n2: no way"),
        (FAILED, "noise\nbash: /py: No such file\n", "bash: /py: No such file"),
        (JobStatus("FAILED", signal=53), "", "all nodes share"),
        (JobStatus("FAILED", exit_code=66), "", "all nodes share"),
    ],
    ids=["task", "burst", "bash", "output", "folder"],
)
def test_a_failed_job_is_explained_by_its_code_or_the_line_of_its_log_that_says_most(job, status, log, words):
    failed = job()
    failed.log.write_text(log)
    assert failed.describe_end() == "Slurm job 5 has ended; Slurm no longer knows how"
    failed.status = status

    assert words in failed.describe_end()
    assert failed.describe_end().startswith("Slurm job 5 ")
    assert failed.failure() is None


@pytest.mark.parametrize("state", OUTSIDE.split())
def test_an_end_that_slurm_brings_about_is_a_failure(job, fake, state):
    fake("sinfo", "printf 'n1 idle\\nn2 down*\\n'")
    ended = job(f"echo JobState={state} NodeList=n[1-2]")
    assert not ended.look()
    said = f"Slurm job 5 {describe_end(JobStatus(state), ('n2',))}"
    kind, host = ("node_lost", "n2") if state == "NODE_FAIL" else ("launcher", None)
    assert ended.failure() == Failure(kind, f"Slurm: {state}", said, host=host, log=str(ended.log))


@pytest.mark.parametrize(("token", "is_led"), [("abc", True), ("abc", False), ("step-abc", True)])
def test_a_job_that_slurm_requeues_has_ended_and_is_cancelled_by_who_leads_the_run(job, fake, tmp_path, token, is_led):
    fake("squeue", "echo 5.0 burst-20260131-120000-abc123")
    fake("scancel", "")
    again = job("echo 'JobId=5 JobState=PENDING Reason=BeginTime Requeue=1 Restarts=1 NodeList=(null)'", token)
    again.is_led = is_led
    again.look()
    again.close()

    failure = again.failure()
    assert again.has_ended() == (failure is not None) == (token == "abc")
    text = "Slurm job 5 lost a node or was preempted, and Slurm has requeued it"
    assert failure in (None, Failure("launcher", "Slurm: requeued", text, log=str(again.log)))
    assert ("scancel 5\n" in (tmp_path / "bin" / "asked").read_text()) == (token == "abc" and is_led)
    if token == "step-abc":
        fake("squeue", "")
        again.look()
        assert (again.status.state, again.status.reason) == ("FAILED", "its step is over")
        assert again.has_ended()


def test_supervisors_have_time_to_end_before_slurm_ends_their_job(job, fake, tmp_path):
    fake("scancel", "")
    one, asked = job("echo JobState=RUNNING"), tmp_path / "bin" / "asked"
    SlurmLink(one, "n1").stop("Ctrl-C", 0.0)
    wait_for(lambda: asked.exists() and asked.read_text().count("scontrol") > 2)
    one.close()
    assert "scancel" not in asked.read_text()


def test_a_run_that_was_never_given_to_slurm_has_ended(job):
    one = job(token="", job_id=None)
    assert not one.look()
    assert one.describe_end() == "the run was never given to Slurm"

"""`burst launch` as its user meets it: real processes, real signals, what is printed where."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_driver import launch
from testkit import PYTHON_PATH
from testkit.command_line import Burst
from testkit.fault_rig import confirm
from testkit.fault_table import AROUND_RANKS
from testkit.process_table import kill_run, run_processes, wait_until_gone
from testkit.terminal import on_terminal
from testkit.waiting import wait_for

from burst_cli.compose import compose
from burst_cli.launch.launching import conclude
from cluster.control.link import LaunchOutcome, Leftover
from engine.config.settings import RunConfig, dump_config
from engine.data.tokenizers import train_bpe
from engine.runs.folder import RunFolder, create_run, list_runs

ROOT = Path(__file__).parents[3]
DRIVER = Path(__file__).parent / "launch_driver.py"
END_S = 60.0  # start of torchrun on a busy machine takes up to ten seconds
GONE_S = 5.0


class Launch:
    """One `burst launch` with the fake trainer, as a process of its own."""

    def __init__(self, folder: Path, mode: str, *flags: str, **streams: Any) -> None:
        self.runs_dir = folder / "runs"
        environment = {**os.environ, "FAKE_MODE": mode, "PYTHONPATH": PYTHON_PATH}
        environment.pop("COLUMNS", None)
        streams = streams or {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, str(DRIVER), str(self.runs_dir), *flags]
        self.process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **streams)
        self.stdout = self.stderr = ""

    @property
    def run(self) -> RunFolder:
        (run,) = list_runs(self.runs_dir)
        return run

    def wait_until(self, condition: Callable[[RunFolder], bool]) -> None:
        """Return once it is so of a run that is being led; else end all of it."""
        try:
            wait_for(lambda: self.process.poll() is not None or any(map(condition, list_runs(self.runs_dir))))
            assert self.process.poll() is None, self.process.communicate()
        except AssertionError:
            self.process.kill()
            for run in list_runs(self.runs_dir):
                kill_run(run.run_id)
            raise

    def end(self) -> int:
        """The exit code; afterwards no process of the run may be left."""
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=END_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        left = wait_until_gone(self.run.run_id, GONE_S)
        kill_run(self.run.run_id)
        assert left == []
        return self.process.returncode


def all_steps_done(run: RunFolder) -> bool:
    return len(run.read_metrics()) == 5


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    launch = Launch(tmp_path_factory.mktemp("completed"), "ok", "--real")
    assert launch.end() == 0
    return launch


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    launch = Launch(tmp_path_factory.mktemp("failed"), "raise")
    assert launch.end() == 1
    return launch


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Ctrl-C while torchrun, two ranks and a grandchild in its own session are alive."""
    launch = Launch(tmp_path_factory.mktemp("interrupted"), "sleep", "--real")
    launch.wait_until(all_steps_done)
    assert len(run_processes(launch.run.run_id)) >= 4
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == 130
    return launch


# --- a run that completes ---------------------------------------------------------------------------------------------


def test_run_folder_is_complete(completed: Launch) -> None:
    run = completed.run
    names = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()}
    host = run.read_state()["host"]
    assert names >= {"config.yaml", "overrides.txt", "run.json", "provenance.json", "plan.sh", f"env/{host}.env"}
    assert names >= {f"logs/{host}/rank000{rank}.log" for rank in (0, 1)}
    assert names >= {"events.jsonl", "metrics.jsonl", "summary.json"}
    assert (run.path / "overrides.txt").read_text() == "exp=tiny\n"
    assert (run.path / "checkpoints").is_dir()


def test_provenance_tells_versions_and_hardware(completed: Launch) -> None:
    provenance = json.loads((completed.run.path / "provenance.json").read_text())
    assert provenance is not None
    assert provenance["versions"]["torch"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (provenance["git"] or {"sha": ""})["sha"] == head.stdout.strip()  # no checkout, no commit
    assert provenance["hardware"]["cores"] == os.cpu_count()


def test_output_that_is_no_terminal_is_plain_lines(completed: Launch) -> None:
    assert "\x1b" not in completed.stderr + completed.stdout
    assert "\r" not in completed.stderr
    assert re.search(r"^step 5/5  loss 0\.8000 ", completed.stderr, re.MULTILINE)
    assert "\ntrain\n" in completed.stderr


def test_result_goes_to_stdout_and_progress_to_stderr(completed: Launch) -> None:
    assert completed.stdout.startswith("completed tiny/")
    assert f"burst report {completed.run.run_id}" in completed.stdout
    assert "step 5/5" not in completed.stdout


def test_plan_script_runs_the_same_ranks_again(completed: Launch) -> None:
    run = completed.run
    environment = {**os.environ, "FAKE_MODE": "ok"}
    subprocess.run(["sh", run.path / "plan.sh"], env=environment, cwd="/", check=True, timeout=END_S)
    state = run.read_state()
    assert (state["state"], state["attempt"]) == ("completed", 2)
    assert len(run.read_metrics()) == 5
    assert (run.path / "attempts" / "1" / "metrics.jsonl").exists()


def launched_here(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, *flags: str) -> int:
    """The exit code of a launch by this very process."""
    monkeypatch.setenv("FAKE_MODE", mode)
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    return launch(folder / "runs", *flags)


def test_json_is_the_only_thing_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched_here(tmp_path, monkeypatch, "ok", "--json") == 0
    out, err = capsys.readouterr()
    document, (run,) = json.loads(out), list_runs(tmp_path / "runs")
    assert (
        document.items()
        >= {
            **{"run_id": run.run_id, "exp": "tiny", "path": str(run.path), "status": "completed", "lost": False},
            **{"steps": 5, "step_time_s": 0.5, "mfu": None, "exit_code": 0, "failure": None},
        }.items()
    )
    assert (document["leftover"], document["socket_fallback"]) == ([], [])
    assert re.search(r"^step 5/5  loss 0\.8000 ", err, re.MULTILINE)  # news of the node may come before or after
    heading = f"tiny/{run.run_id}  2 ranks, gloo (on the CPU: 0 visible GPUs for 2 ranks)"
    assert [heading, str(run.path)] == [line for line in err.splitlines() if run.run_id in line]


# --- a run that fails -------------------------------------------------------------------------------------------------


def test_failing_rank_gives_one_readable_block(failed: Launch) -> None:
    assert failed.stderr.count("FAILED") == 1
    block = failed.stderr[failed.stderr.index("FAILED") :]
    assert "rank 1 on " in block
    assert "step 3, phase forward" in block
    assert "ValueError: the tenth expert [bold]is missing" in block
    assert "rank0001.log" in block
    assert "what to do: " in block
    assert failed.stdout == ""


def test_block_holds_no_terminal_escapes_of_the_ranks(failed: Launch) -> None:
    assert "\x1b" in failed.run.log_path(failed.run.read_state()["host"], 1).read_text()
    assert "\x1b" not in failed.stderr


def test_failed_run_with_json_still_prints_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched_here(tmp_path, monkeypatch, "config", "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["status"], document["exit_code"]) == ("failed", 2)
    assert "train.seq_len is odd" in document["failure"]["message"]


# --- a run that is stopped --------------------------------------------------------------------------------------------


def test_ctrl_c_cancels_and_leaves_no_process(interrupted: Launch) -> None:
    state = interrupted.run.read_state()
    assert (state["state"], state["exit_code"]) == ("cancelled", 130)
    assert "Ctrl-C: stopping the ranks" in interrupted.stderr
    assert "Traceback" not in interrupted.stderr
    assert interrupted.stdout.startswith("cancelled tiny/")


def test_terminal_that_is_closed_does_not_hurt_the_run(tmp_path: Path) -> None:
    (row,) = (row for row in AROUND_RANKS if row.do == "close stdout")
    reader, writer = os.pipe()
    launch = Launch(tmp_path, "ok", "--plain", stdout=writer, stderr=writer)
    os.close(writer)
    os.close(reader)
    code = launch.end()
    confirm(row, launch.run, code, ())


# --- on a terminal ----------------------------------------------------------------------------------------------------


def shown(tmp_path: Path, *flags: str) -> str:
    """What a terminal of 100 columns receives."""
    launches: list[Launch] = []
    text = on_terminal(lambda end: launches.append(Launch(tmp_path, "ok", *flags, stdin=end, stdout=end, stderr=end)))
    assert launches[0].end() == 0
    return text


def test_terminal_shows_a_block_that_is_redrawn(tmp_path: Path) -> None:
    text = shown(tmp_path)
    assert "\x1b[" in text
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text  # the cursor is shown again
    assert "completed" in text


def test_plain_never_redraws_on_a_terminal(tmp_path: Path) -> None:
    text = shown(tmp_path, "--plain")
    assert "\x1b[2K" not in text
    assert "step 5/5" in text


# --- the command line -------------------------------------------------------------------------------------------------


def test_dry_run_prints_the_plan_and_creates_nothing(tmp_path: Path, burst: Burst) -> None:
    code, output, _ = burst("launch", "exp=tiny", "train.steps=3", "--dry-run")
    assert code == 0
    assert "optimizer.warmup_steps is 3, not 10: the run has 3 steps" in output
    assert "torch.distributed.run" in output
    assert "OMP_NUM_THREADS=" in output
    assert "seq_len:" in output
    assert list(tmp_path.iterdir()) == []


def test_dry_run_as_json_is_the_plan(tmp_path: Path, burst: Burst) -> None:
    document = burst("launch", "exp=tiny", "--dry-run", "--json", "--runs-dir", str(tmp_path)).document
    (node,) = document["nodes"]
    assert node["command"][-1] == f"{document['path']}/config.yaml"
    assert document["files"]["plan.sh"].rstrip().endswith("config.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_job_of_kubernetes_is_printed_alone_and_creates_nothing(tmp_path: Path, burst: Burst) -> None:
    pods = ("cluster=k8s", "cluster.kubernetes.claim=runs", "cluster.container.image=registry.example/burst:1")
    result = burst("launch", "exp=tiny", *pods, "--as", "kubernetes", "--dry-run")
    assert (result.code, yaml.safe_load(result.out)["kind"]) == (0, "JobSet")
    assert list_runs(tmp_path / "runs") == []
    assert "add --dry-run" in burst("launch", "exp=tiny", *pods, "--as", "skypilot").err


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (("model.vocab_size=270",), 2, "model.vocab_size=270 is too small: the data has tokens up to 279"),
        (("train.seq_len=100000", "--force"), 1, "train.seq_len"),
    ],
)
def test_data_that_does_not_suit_the_model_leaves_no_run(
    burst: Burst, tmp_path: Path, settings: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not to be\n" * 500)
    train_bpe(["the quick brown fox jumps over the lazy dog " * 20], 280).save(tmp_path)
    paths = (f"data.paths=[{tmp_path}/corpus.txt]", f"data.tokenizer={tmp_path}/tokenizer.json")
    data = ("data=text", *paths, f"data.prepared_dir={tmp_path}/ready")
    result = burst("launch", "exp=tiny", *data, "data.validation_fraction=0.2", *settings)
    assert (result.code, said in result.err) == (code, True), result.err
    assert not (tmp_path / "runs").exists()


EVALUATED = {
    **{"evaluated_run": "20260101-000000-bbbbbb", "evaluated_step": 80, "seq_len": 8192},
    **{"final_validation_loss": 2.5, "final_validation_bits_per_byte": 1.25},
}


@pytest.mark.parametrize(
    ("state", "summary", "saved", "told"),
    [
        (
            "completed",
            {
                **{"steps": 120, "dropped_steps": 3, "final_train_loss": 2.0, "tokens_per_s_per_device": 12345.0},
                **{"final_validation_loss": 2.5, "mfu": 0.25, "peak_memory_bytes": 2**30},
            },
            None,
            [
                "120 steps (3 dropped)  train loss 2.0000  validation loss 2.5000  tokens/s per device 12.3K  MFU 25%"
                "  peak memory 1 GiB",
                "more: burst report 20260101-000000-abcdef",
                "weights: nothing was saved; train.checkpoint.at_end=true saves them",
            ],
        ),
        (
            "cancelled",
            EVALUATED,
            None,
            [
                "weights of 20260101-000000-bbbbbb after step 80",
                "validation loss 2.5000  bits/byte 1.2500 on sequences of 8,192 tokens",
                "more: burst report 20260101-000000-abcdef",
            ],
        ),
        (
            "completed",
            {"steps": 120},
            "/shared/step-00000120",
            [
                "120 steps",
                "more: burst report 20260101-000000-abcdef",
                "weights: /shared/step-00000120",
            ],
        ),
    ],
)
def test_the_end_tells_figures_of_a_training_and_findings_of_an_evaluation(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: str,
    summary: dict[str, Any],
    saved: str | None,
    told: list[str],
) -> None:
    run = create_run(tmp_path / "tiny" / "20260101-000000-abcdef", {"config.yaml": dump_config(RunConfig())})
    for step in ("starting", "running"):
        run.transition(step)
    run.write_summary(summary)
    run.transition(state)
    conclude(run, LaunchOutcome(state, 0, leftover=(Leftover("tb1", (4711,)),)), 65.0, saved, as_json=False)
    out, err = capsys.readouterr()
    assert [line.rstrip() for line in out.splitlines()] == [f"{state} tiny/{run.run_id} in 1:05", *told]
    assert err == "warning: may still run: tb1: processes 4711\n"


@pytest.mark.parametrize("exp", ["extend_128k", "extend_1m", "sft_128k", "toy_8k"])
def test_recipes_that_go_on_with_a_model_do_not_start_without_one(burst: Burst, exp: str) -> None:
    small = ["model=tiny", "memory=none", "cluster=local4", "train=tiny", "train.seq_len=64", "data=stdlib"]
    assert burst("config", f"exp={exp}", *small).code == 0
    result = burst("launch", f"exp={exp}", *small, "--dry-run")
    assert (result.code, "model.init_from: null" in result.err) == (2, True)
    again = burst("launch", f"exp={exp}", *small, "model.require_init_from=false", "--dry-run", "--force")
    assert again.code == 0, again.err


@pytest.mark.parametrize("exp", ["tiny", "small"])
def test_the_first_runs_of_people_save_at_the_end(exp: str) -> None:
    assert compose([f"exp={exp}"], []).config.train.checkpoint.at_end

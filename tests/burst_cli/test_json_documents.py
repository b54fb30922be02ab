"""Every verb and subverb with --json: exactly one JSON document on stdout, whatever it has to say."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from testkit.run_maker import make_run, write_log
from testkit.saved_checkpoints import MODEL, WEIGHTS, hugging_face_folder, save_checkpoint

from burst_cli.app import VERBS
from engine.config.settings import RunConfig, dump_config

NODE = ("--hosts", "127.0.0.1", "cluster.ssh.port=1")  # where nobody listens
NO_ENGINE = ("cluster.container.command=/nowhere/docker", "--image", "app:1")
SMALL_BENCH = ("--ranks", "1", "--seq-lens", "64", "--heads", "2", "--head-dim", "8", "--repeats", "1", "--warmup", "0")
SMALL_MACHINE = ("--ranks", "1", "--heads", "2", "--head-dim", "8", "--seconds", "1")
TEXT = ("data=text", "data.paths=[corpus.txt]", "data.tokenizer=bytes", "data.validation_fraction=0.2")

# verb: (words after it, exit code). What needs nodes is asked of one that does not answer, or only planned; the plan of
# the run that is resumed cannot be read.
ROWS: dict[str, tuple[tuple[str, ...], int]] = {
    "launch": (("exp=tiny", "--dry-run", "--skip-checks"), 0),
    "sweep": (("exp=tiny", "train.seq_len=512,1024", "--dry-run"), 0),
    "runs": ((), 0),
    "status": ((), 0),
    "logs": ((), 0),
    "cancel": (("mine",), 0),
    "resume": (("mine",), 1),
    "checkpoint list": ((), 0),
    "checkpoint verify": ((), 0),
    "checkpoint fetch": (("mine",), 0),
    "checkpoint prune": (("--dry-run",), 0),
    "checkpoint export": (("mine", "exported"), 0),
    "eval": (("exp=tiny", "train.checkpoint.resume_from=/some/where", "--dry-run", "--skip-checks"), 0),
    "model": (("model",), 0),
    "plan": (("exp=tiny", "train.seq_len=512", "--memory-by", "none"), 0),
    "report": ((), 0),
    "bench attention": (SMALL_BENCH, 0),
    "bench machine": (SMALL_MACHINE, 0),
    "config": (("exp=tiny",), 0),
    "data prepare": (TEXT, 0),
    "data show": (TEXT, 0),
    "check-nodes": (("--only", "host.memory_free", *NODE), 1),
    "env show": ((), 0),
    "env check": (("--nccl-log", "nccl.log"), 0),  # not of what else runs on this machine
    "image build": (("--dry-run",), 0),
    "image push": ((*NODE, *NO_ENGINE), 1),
    "image status": ((*NODE, *NO_ENGINE), 3),
    "hosts list": (NODE, 0),
    "hosts trust": ((*NODE, "--yes"), 1),
    "hosts forget": (NODE, 0),
    "testbed up": (("--nodes", "2", "--dry-run"), 0),
    "testbed status": (("--name", "nosuch"), 1),
    "testbed down": (("--name", "nosuch"), 0),
    "testbed fault": (("nosuch1", "sshd_stop", "--name", "nosuch"), 1),
}
SLOW = ("bench attention", "bench machine")  # most are asked in test_bench_command.py, too
NEEDS = {verb: ("ssh",) for verb, (words, _) in ROWS.items() if NODE[0] in words} | {
    "testbed up": ("ip",),
    **dict.fromkeys(("testbed status", "testbed down", "testbed fault"), ("root", "ip", "sshd", "ssh-keygen")),
}


def leaves(command: Any, words: tuple[str, ...]) -> Iterator[str]:
    """The verb, or its subverbs, as they are typed."""
    parts = getattr(command, "commands", None)
    if not parts:
        yield " ".join(words)
    for name, part in (parts or {}).items():
        yield from leaves(part, (*words, name))


def test_every_verb_has_a_row() -> None:
    commands = {verb.name: typer.main.get_command(importlib.import_module(verb.module).app) for verb in VERBS}
    assert [leaf for name, command in commands.items() for leaf in leaves(command, (name,))] == list(ROWS)


def test_what_a_flag_does_nobody_gets_without_typing_it() -> None:
    commands = [typer.main.get_command(importlib.import_module(verb.module).app) for verb in VERBS]
    parts = [part for one in commands for part in (getattr(one, "commands", None) or {"": one}).values()]
    flags = [(part.name, flag) for part in parts for flag in part.params if getattr(flag, "is_flag", False)]
    assert len(flags) > len(VERBS)
    assert [(verb, flag.opts) for verb, flag in flags if flag.default] == []


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus, a model, and a run that has ended, with a log and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "nccl.log").write_bytes(b"\xff" * 99 + b"\nvm:7:7 [0] NCCL INFO Using network Socket\n")
    (tmp_path / "corpus.txt").write_text("to be or not to be that is the question\n" * 200)
    hugging_face_folder(tmp_path / "model")
    run = make_run(tmp_path / "runs", "mine/20260101-000000-abcdef", state="completed", steps=3)
    (run.path / "config.yaml").write_text(dump_config(RunConfig(model=MODEL)))
    write_log(run, "tb1", 0, "hello\n")
    save_checkpoint(run.path / "checkpoints", 7, WEIGHTS)
    return tmp_path


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(verb, marks=[pytest.mark.needs(*NEEDS.get(verb, ())), *[pytest.mark.thorough] * (verb in SLOW)])
        for verb in ROWS
    ],
)
def test_json_is_one_document(burst, world: Path, verb: str) -> None:
    words, code = ROWS[verb]
    result = burst(*verb.split(), *words, "--json")
    document = json.loads(result.out)
    assert (result.code, type(document)) == (code, dict), result.out + result.err
    if verb.startswith(("image", "testbed", "hosts")):  # what people get: of others it is read elsewhere
        assert not burst(*verb.split(), *words).out.startswith("{")

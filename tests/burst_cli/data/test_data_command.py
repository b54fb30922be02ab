"""`burst data prepare` as a user types it: in a process of its own, results on stdout, everything else on stderr."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from testkit.command_line import Burst

from burst_cli.data.progress import show_progress
from engine.data.build import Progress


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))  # no configuration of the person who runs the tests
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"text number {index}\n" * 30)
    return folder


def overrides(corpus: Path) -> list[str]:
    return ["data=text", f"data.paths=[{corpus}]", "data.tokenizer=bytes", "data.validation_fraction=0.1"]


def test_prepare_shows_a_table_with_exact_counts(corpus: Path, burst: Burst) -> None:
    code, out, err = burst("data", "prepare", *overrides(corpus))
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["split", "documents", "text", "tokens", "bytes", "per", "token", "shards"]
    assert [(line[0], line[1]) for line in lines[1:3]] == [("train", "18"), ("validation", "2")]
    assert str(corpus.parent / "cache") in out
    assert "writing tokens" in err


def test_json_is_one_document_and_the_second_call_finds_the_data(corpus: Path, burst: Burst) -> None:
    calls = [burst("data", "prepare", "--json", *overrides(corpus)) for _ in range(2)]
    first, second = (call.document for call in calls)
    text_bytes = sum(path.stat().st_size for path in corpus.iterdir())
    splits = first["splits"]
    assert splits["train"]["text_bytes"] + splits["validation"]["text_bytes"] == text_bytes
    assert splits["train"]["tokens"] == splits["train"]["text_bytes"] + splits["train"]["documents"]
    assert (first["vocab_size"], first["tokenizer"], first["format"]) == (256, "bytes", "text")
    assert Path(first["path"]).is_dir()
    assert {**first, "elapsed_s": 0} == {**second, "elapsed_s": 0}
    assert calls[1].err == ""


def test_lengths_of_documents_are_shown_when_classes_are_set(corpus: Path, burst: Burst) -> None:
    (corpus / "long.txt").write_text("z" * 9000)
    given = [*overrides(corpus), "data.validation_fraction=0.01", "train.seq_len=100"]
    given += ["data.length_buckets=[1000,100000]", "data.length_weights=[0.5,0.4,0.1]"]
    _, out, err = burst("data", "prepare", *given)
    tokens = burst("data", "prepare", "--json", *given).document
    samples = (tokens["splits"]["train"]["tokens"] - 1) // 100
    classes = tokens["length_classes"]
    assert sum(one["samples"] for one in classes) == samples
    assert [(one["at_least"], one["below"], one["weight"]) for one in classes] == [
        (1, 1000, 0.5),
        (1000, 100000, 0.4),
        (100000, None, 0.1),
    ]
    assert classes[1]["samples"] in (89, 90, 91)
    assert classes[1]["tokens"] == 100 * classes[1]["samples"]
    row = next(line.split() for line in out.splitlines() if line.startswith("1,000 to 99,999"))
    seen = 0.4 / (classes[1]["samples"] / samples)
    assert row[3:] == [str(classes[1]["samples"]), f"{classes[1]['tokens']:,}", row[5], "40%", "x", f"{seen:.3g}"]
    assert "warning: no sample is of documents of 100,000 and more tokens" in err
    refused = burst("launch", *given, "cluster=local", "cluster.ranks_per_node=1", "attention=single")
    assert refused.code == 1
    assert "no sample of 100 tokens lies mostly in a document of 100,000 and more tokens" in refused.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["data=jsonl", "data.paths=[BAD]"], 1, "bad.jsonl:1: bad JSON"),
        (["data=parquet", "data.paths=[BAD]"], 1, "cannot be read as parquet"),
        (["data=text", "data.paths=[]"], 2, "data.paths"),
        (
            ["data=jsonl", "data.paths=[CHATS]", "data.messages_field=messages", "data.chat_template=chatml"],
            1,
            "'robot'",
        ),
        (["data=jsonl", "data.paths=[CHATS]", "data.messages_field=messages"], 2, "set data.chat_template=chatml"),
        (["data.length_buckets=[10]"], 2, "data.length_weights: got 0 numbers, expected 2"),
        (["data.validation_fraction=2"], 2, "data.validation_fraction"),
        (["data.tokeniser=bytes"], 2, "data.tokenizer"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_mistakes_are_one_message_and_an_exit_code(
    tmp_path: Path, burst: Burst, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("{nonsense\n")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "robot", "content": "x"}]}\n')
    files = {"BAD": str(tmp_path / "bad.jsonl"), "CHATS": str(tmp_path / "chats.jsonl")}
    given = [argument.replace("BAD", files["BAD"]).replace("CHATS", files["CHATS"]) for argument in arguments]
    told = burst("data", "prepare", *given)
    assert (told.code, told.out) == (code, "")
    assert message in told.err
    assert "Traceback" not in told.err
    assert not list(tmp_path.glob("cache/data/[!.]*"))


STAGES = [Progress("waiting"), Progress("survey", 1 << 20), Progress("encode", 1 << 20, 1 << 21)]


def test_pipes_get_one_line_per_stage() -> None:
    stream = StringIO()
    with show_progress(Console(file=stream, force_terminal=False)) as progress:
        for stage in [*STAGES, *STAGES[1:]]:
            progress(stage)
    assert stream.getvalue().splitlines()[:3] == [
        "waiting for another process",
        "reading the corpus",
        "writing tokens (2 MiB)",
    ]


def test_terminals_get_figures() -> None:
    stream = StringIO()
    with show_progress(Console(file=stream, force_terminal=True, width=80)) as progress:
        for stage in STAGES:
            progress(stage)
    assert "1 MiB of 2 MiB" in stream.getvalue()

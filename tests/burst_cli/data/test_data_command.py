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


def test_prepare_shows_exact_counts_in_a_table_and_as_one_document_and_finds_the_data_again(
    corpus: Path, burst: Burst
) -> None:
    code, out, err = burst("data", "prepare", *overrides(corpus))
    assert (code, "writing tokens" in err) == (0, True), err
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["split", "documents", "text", "tokens", "bytes", "per", "token", "shards"]
    assert [(line[0], line[1]) for line in lines[1:3]] == [("train", "18"), ("validation", "2")]
    assert str(corpus.parent / "cache") in out
    again = burst("data", "prepare", "--json", *overrides(corpus))
    found, text_bytes = again.document, sum(path.stat().st_size for path in corpus.iterdir())
    train = found["splits"]["train"]
    assert train["text_bytes"] + found["splits"]["validation"]["text_bytes"] == text_bytes
    assert train["tokens"] == train["text_bytes"] + train["documents"]
    assert (found["vocab_size"], found["tokenizer"], found["format"]) == (256, "bytes", "text")
    assert (Path(found["path"]).is_dir(), found["elapsed_s"] > 0, again.err) == (True, True, "")


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


@pytest.mark.parametrize(("is_terminal", "told"), [(False, "writing tokens (2 MiB)\n"), (True, "1 MiB of 2 MiB")])
def test_pipes_get_one_line_per_stage_and_terminals_figures(is_terminal: bool, told: str) -> None:
    stages = [Progress("waiting"), Progress("survey", 1 << 20), Progress("encode", 1 << 20, 1 << 21)]
    stream = StringIO()
    with show_progress(Console(file=stream, force_terminal=is_terminal, width=80)) as progress:
        for stage in [*stages, *stages[1:]]:
            progress(stage)
    assert told in stream.getvalue()
    lines = ["waiting for another process", "reading the corpus", "writing tokens (2 MiB)"]
    assert is_terminal or stream.getvalue().splitlines()[:3] == lines

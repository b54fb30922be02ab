"""`burst data prepare` as a user types it: in a process of its own, results on stdout, everything else on stderr."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from testkit.command_line import Burst

from burst_cli.data.progress import show_progress
from engine.data.build import Progress
from engine.runs.figures import binary_bytes

OF_CHATS = ["data=jsonl", "data.paths=[chats.jsonl]", "data.messages_field=messages"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))  # no configuration of the person who runs the tests
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (folder := tmp_path / "corpus").mkdir()
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"text number {index}\n" * 30)
    return folder


def overrides(corpus: Path) -> list[str]:
    return ["data=text", f"data.paths=[{corpus}]", "data.tokenizer=bytes", "data.validation_fraction=0.1"]


def test_prepare_reports_exact_counts(corpus, burst) -> None:
    code, out, err = burst("data", "prepare", *overrides(corpus))
    assert (code, "writing tokens" in err) == (0, True), err
    again = burst("data", "prepare", "--json", *overrides(corpus))
    found, text_bytes = again.document, sum(path.stat().st_size for path in corpus.iterdir())
    train, validation = found["splits"].values()
    assert (train["text_bytes"] + validation["text_bytes"], train["tokens"]) == (text_bytes, train["text_bytes"] + 18)
    assert found.items() >= {"tokenizer": "bytes", "vocab_size": 256, "format": "text", "length_classes": None}.items()
    assert (Path(found["path"]).is_dir(), 0 < found["elapsed_s"] < 60, again.err) == (True, True, "")
    assert len(found["content_hash"]) == 64
    rows = [("train", 18, train), ("validation", 2, validation)]
    sizes = [(name, n, binary_bytes(one["text_bytes"]), f"{one['tokens']:,}") for name, n, one in rows]
    split = "{:10}  {:>9}  {:>8}  {:>6}  {:>15}  {:>6}"
    assert [line.rstrip() for line in out.splitlines()][:6] == [
        split.format("split", "documents", "text", "tokens", "bytes per token", "shards"),
        *(split.format(*row, "1.00", 1) for row in sizes),
        f"source     {found['source']}",
        "tokenizer  bytes, vocabulary of 256",
        f"folder     {found['path']}",
    ]


def test_lengths_of_documents_are_shown_when_classes_are_set(corpus: Path, burst: Burst) -> None:
    (corpus / "long.txt").write_text("z" * 9000)
    given = [*overrides(corpus), "data.validation_fraction=0.01", "train.seq_len=100"]
    given += ["data.length_buckets=[1000,100000,200000]", "data.length_weights=[0.5,0.4,0.1,0]"]
    _, out, err = burst("data", "prepare", *given)
    tokens = burst("data", "prepare", "--json", *given).document
    samples = (tokens["splits"]["train"]["tokens"] - 1) // 100
    classes = tokens["length_classes"]
    assert sum(one["samples"] for one in classes) == samples
    edges = [(1, 1000, 0.5), (1000, 100000, 0.4), (100000, 200000, 0.1), (200000, None, 0)]
    assert [(one["at_least"], one["below"], one["weight"]) for one in classes] == edges
    assert classes[1]["samples"] in (89, 90, 91)
    assert classes[1]["tokens"] == 100 * classes[1]["samples"]
    row = next(line.split() for line in out.splitlines() if line.startswith("1,000 to 99,999"))
    seen = 0.4 / (classes[1]["samples"] / samples)
    assert row[3:] == [str(classes[1]["samples"]), f"{classes[1]['tokens']:,}", row[5], "40%", "x", f"{seen:.3g}"]
    last = next(line for line in out.splitlines() if line.startswith("200,000"))
    assert last.split()[3:] == ["0", "0", "0%", "0%", "–"]
    assert err.splitlines()[-1].startswith("warning: no sample is of documents of 100,000 to 199,999 tokens, but")
    refused = burst("launch", "--yes", *given, "cluster=local", "cluster.ranks_per_node=1", "attention=single")
    words = "no sample of 100 tokens is mostly in a document of 100,000 to 199,999 tokens"
    assert (refused.code, words in refused.err) == (1, True)


def test_mistakes_are_one_message(tmp_path, burst, monkeypatch) -> None:
    for arguments, code, message in [
        (["data=jsonl", "data.paths=[bad.jsonl]"], 1, "bad.jsonl:1: bad JSON"),
        (["data=parquet", "data.paths=[bad.jsonl]"], 1, "cannot be read as parquet"),
        (["data=text", "data.paths=[]"], 2, "data.paths"),
        ([*OF_CHATS, "data.chat_template=chatml"], 1, "the assistant has no text"),
        (OF_CHATS, 2, "set data.chat_template=chatml"),
        (["data.length_buckets=[10]"], 2, "data.length_weights: got 0 numbers, expected 2"),
        (["data.validation_fraction=2"], 2, "data.validation_fraction"),
        (["data.tokeniser=bytes"], 2, "data.tokenizer"),
        (["--nonsense"], 2, "--nonsense"),
    ]:
        (tmp_path / "bad.jsonl").write_text("{nonsense\n")
        (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "robot", "content": "x"}]}\n')
        monkeypatch.chdir(tmp_path)
        told = burst("data", "prepare", *arguments)
        assert (told.code, told.out, message in told.err, "Traceback" in told.err) == (code, "", True, False)
        assert not list(tmp_path.glob("cache/data/[!.]*"))


@pytest.mark.parametrize(("is_terminal", "told"), [(False, "writing tokens (2 MiB)\n"), (True, "1 MiB of 2 MiB")])
def test_progress_of_each_stage_is_shown(is_terminal: bool, told: str) -> None:
    stages = [Progress("waiting"), Progress("tokenizer"), Progress("survey", 1 << 20)]
    stages.append(Progress("encode", 1 << 20, 1 << 21))
    stream = StringIO()
    with show_progress(Console(file=stream, force_terminal=is_terminal, width=80)) as progress:
        for stage in [*stages, *stages[1:]]:
            progress(stage)
    assert told in stream.getvalue()
    lines = ["waiting for another process", "training the tokenizer", "reading the corpus", "writing tokens (2 MiB)"]
    assert is_terminal or stream.getvalue().splitlines() == lines


def test_rows_left_out_are_counted_with_their_places(tmp_path: Path, burst: Burst) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{bad\n{"text": "two"}\n{"text": 5}\n')
    given = ["data=jsonl", f"data.paths=[{tmp_path / 'rows.jsonl'}]", "data.on_bad_row=skip"]
    _, out, err = burst("data", "prepare", *given)
    assert "bad rows   2 left out" in out, err
    assert "rows.jsonl:2: bad JSON" in out
    found = burst("data", "prepare", "--json", *given).document["skipped_rows"]
    assert (found["count"], len(found["first"])) == (2, 2)

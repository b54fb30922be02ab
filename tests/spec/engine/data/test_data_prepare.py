"""Preparation: the same configuration finds the same data, whoever asks, and nothing is ever half there."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from testkit.corpora import write_token_set

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.build import Progress
from engine.data.prepare import PreparedData, config_facts, open_prepared, prepare
from engine.data.shards import TokenShards
from engine.data.tokenizers import train_bpe

TEXTS = [f"document {index}: größe € {'words and more ' * (index % 7)}\n" for index in range(60)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index, text in enumerate(TEXTS):
        (folder / f"{index:03d}.txt").write_text(text)
    return folder


def text_config(folder: Path, **settings: Any) -> DataConfig:
    return DataConfig(**{"format": "text", "paths": (str(folder),), "validation_fraction": 0.1, **settings})


def texts_in(prepared: PreparedData, *splits: TokenShards) -> list[str]:
    """All documents of these splits, or of both, sorted."""
    found: list[str] = []
    for shards in splits or (prepared.train, prepared.validation):
        tokens, tokenizer = shards.read(0, shards.token_count), prepared.load_tokenizer()
        found += [tokenizer.decode(part) for part in np.split(tokens, shards.document_offsets(0, tokens)[1:])]
    return sorted(found)


def prepared_in(cache: Path) -> list[Path]:
    """All that lies there but locks."""
    return list((cache / "data").glob("[!.]*"))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_every_format_gives_the_documents_back(corpus: Path, tmp_path: Path, kind: Any, tokenizer: str) -> None:
    paths = {"text": corpus, "jsonl": tmp_path / "c.jsonl", "parquet": tmp_path / "c.parquet"}
    paths["jsonl"].write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    pq.write_table(pa.table({"text": TEXTS}), paths["parquet"])
    prepared = prepare(text_config(paths[kind], format=kind, tokenizer=tokenizer, bpe_vocab_size=280))
    assert texts_in(prepared) == sorted(TEXTS)
    assert prepared.token_bytes is not None
    for shards in (prepared.train, prepared.validation):
        assert prepared.token_bytes[shards.read(0, shards.token_count)].sum() == shards.text_bytes
    assert prepared.train.manifest.vocab_size == (256 if tokenizer == "bytes" else 280)
    assert (prepared.validation.text_bytes or 0) >= 0.1 * len("".join(TEXTS).encode())


def test_the_standard_library_needs_no_paths() -> None:
    prepared = prepare(DataConfig(max_bytes=300_000))
    assert (prepared.train.text_bytes or 0) + (prepared.validation.text_bytes or 0) == 300_000
    assert prepared.validation.token_count > 1
    assert any(text.startswith('"""') for text in texts_in(prepared))


def test_bpe_is_trained_on_training_text_only(corpus: Path, tmp_path: Path) -> None:
    first = prepare(text_config(corpus, tokenizer="bpe", bpe_vocab_size=400))
    train_bpe(texts_in(first, first.train), 400).save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (first.path / "tokenizer.json").read_bytes()


def test_progress_adds_up_per_stage(corpus: Path) -> None:
    seen: list[Progress] = []
    prepare(text_config(corpus, tokenizer="bpe", bpe_vocab_size=400), progress=seen.append)
    total = len("".join(TEXTS).encode())
    last = {progress.stage: (progress.text_bytes, progress.total_text_bytes) for progress in seen}
    assert list(last.items()) == [("survey", (total, None)), ("tokenizer", (total, total)), ("encode", (total, total))]


FACTS = (
    "format paths text_suffixes on_bad_row text_field prompt_field messages_field chat_template tokenizer bos "
    "bpe_vocab_size validation_fraction max_bytes"
)


def test_a_second_call_writes_nothing(corpus: Path, cache: Path) -> None:
    config = text_config(corpus)
    first = prepare(config)
    record = first.path / "prepared.json"
    facts, made = record.stat().st_mtime_ns, json.loads(record.read_text())
    assert re.fullmatch("[0-9a-f]{64}", made["identity"].pop("files_hash"))
    unnamed = {"tokenizer_hash": None, "template_hash": None}
    assert made == {"identity": {"version": 2, "config": config_facts(config), **unnamed}}
    assert len(first.path.name) == 16
    assert set(config_facts(config)) == set(FACTS.split())
    seen: list[Progress] = []
    second = prepare(config, progress=seen.append)
    assert second.path == first.path
    assert second.content_hash == first.content_hash
    assert seen == []
    assert (first.path / "prepared.json").stat().st_mtime_ns == facts
    assert prepared_in(cache) == [first.path]


@pytest.mark.parametrize(
    ("name", "value", "when"),
    [
        ("format", "jsonl", None),
        ("tokenizer", "bpe", None),
        ("validation_fraction", 0.2, None),
        ("max_bytes", 9, None),
        ("paths", ("b",), None),
        ("on_bad_row", "skip", None),
        ("prompt_field", "p", None),
        ("messages_field", "m", None),
        ("text_field", "t", {"format": "jsonl"}),
        ("bpe_vocab_size", 300, {"tokenizer": "bpe"}),
        ("bos", "off", {"tokenizer": "a.json"}),
        ("chat_template", "chatml", {"messages_field": "m"}),
    ],
)
def test_facts_are_the_settings_that_change_tokens(name: str, value: Any, when: Any) -> None:
    plain = DataConfig(format="text", paths=("a",))
    needed = replace(plain, **(when or {}))
    assert config_facts(replace(needed, **{name: value})) != config_facts(needed)
    assert when is None or config_facts(replace(plain, **{name: value})) == config_facts(plain)


def test_changed_sources_are_prepared_again_in_the_cache(corpus: Path) -> None:
    config = text_config(corpus)
    first = prepare(config)
    (corpus / "000.txt").write_text("something new")
    second = prepare(config)
    assert second.path != first.path
    assert second.content_hash != first.content_hash
    assert "something new" in texts_in(second)


def test_chosen_folder_holds_the_same_data_as_the_cache(corpus: Path, tmp_path: Path) -> None:
    config = text_config(corpus)
    assert prepare(replace(config, prepared_dir=str(tmp_path / "out"))).content_hash == prepare(config).content_hash


@pytest.mark.parametrize("call", [prepare, open_prepared])
def test_chosen_folder_made_with_other_settings_is_refused(corpus: Path, tmp_path: Path, call: Any) -> None:
    chosen = text_config(corpus, prepared_dir=str(tmp_path / "out"))
    prepare(chosen)
    with pytest.raises(DataError, match=r"(?s)tokenizer: made with 'bytes', now 'bpe'\n.*max_bytes: made"):
        call(replace(chosen, tokenizer="bpe", max_bytes=5))


def test_chosen_folder_made_from_other_sources_is_refused(corpus: Path, tmp_path: Path) -> None:
    chosen = text_config(corpus, prepared_dir=str(tmp_path / "out"))
    prepare(chosen)
    (corpus / "000.txt").write_text("something new")
    with pytest.raises(DataError, match="files_hash: made with"):
        prepare(chosen)


def test_chosen_folder_that_holds_other_files_is_left_alone(corpus: Path) -> None:
    with pytest.raises(DataError, match="holds other things"):
        prepare(text_config(corpus, prepared_dir=str(corpus)))
    assert len(list(corpus.iterdir())) == len(TEXTS)


def test_unprepared_data_is_an_error(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not prepared: nothing at .*out\. Run `burst data prepare`"):
        open_prepared(text_config(corpus, prepared_dir=str(tmp_path / "out")))


def test_ranks_open_prepared_data_without_its_sources(corpus: Path, tmp_path: Path) -> None:
    train_bpe(TEXTS, 280).save(tmp_path)
    config = text_config(corpus, tokenizer=str(tmp_path / "tokenizer.json"), prepared_dir=str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    made = prepare(config)
    assert made.path == tmp_path / "out"
    assert made.train.manifest.vocab_size == 280
    for path in (*corpus.iterdir(), tmp_path / "tokenizer.json"):
        path.unlink()
    opened = open_prepared(config)
    assert opened.content_hash == made.content_hash
    assert texts_in(opened) == sorted(TEXTS)


def test_a_damaged_cache_is_prepared_again(corpus: Path) -> None:
    config = text_config(corpus)
    (prepare(config).path / "train" / "tokens-00000.bin").write_bytes(b"\0")
    assert texts_in(prepare(config)) == sorted(TEXTS)


def test_a_damaged_chosen_folder_is_an_error(corpus: Path, tmp_path: Path) -> None:
    chosen = text_config(corpus, prepared_dir=str(tmp_path / "out"))
    (prepare(chosen).path / "train" / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"no manifest at .*train/manifest\.json"):
        prepare(chosen)


def test_a_folder_of_another_program_is_an_error(corpus: Path, tmp_path: Path) -> None:
    chosen = text_config(corpus, prepared_dir=str(tmp_path / "out"))
    prepare(chosen)
    (tmp_path / "out/prepared.json").write_text('{"identity": {"config": []}}')
    with pytest.raises(DataError, match="was not written by burst"):
        prepare(chosen)


@pytest.mark.parametrize("content", ["", "x"])
def test_a_corpus_without_text_for_both_splits_is_an_error(tmp_path: Path, cache: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(DataError, match=r"the corpus is empty: 1 files .*a\.txt|leaves no text for train"):
        prepare(text_config(tmp_path / "a.txt"))
    assert prepared_in(cache) == []


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    line = "a line of text that is repeated\n"
    (tmp_path / "big.txt").write_text(line * 900_000)
    config = text_config(tmp_path / "big.txt")
    tracemalloc.start()
    try:
        prepare(config)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 29 MB of text are 230 MB as int64 ids; a group of chunks needs about ten bytes per byte of its 4 to 6 MiB.
    assert peak < 90e6


def test_a_read_only_folder_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot prepare data: .*/file.*data\.prepared_dir or BURST_CACHE_DIR"):
        prepare(text_config(corpus, prepared_dir=str(tmp_path / "file" / "out")))


# --- several processes ------------------------------------------------------------------------------------------------


def prepare_and_die(config: DataConfig) -> None:
    def die(progress: Progress) -> None:
        if progress.stage == "encode":
            os.kill(os.getpid(), signal.SIGKILL)

    prepare(config, progress=die)


def test_prepare_recovers_from_a_killed_process(corpus: Path, cache: Path) -> None:
    config = text_config(corpus)
    process = multiprocessing.get_context("spawn").Process(target=prepare_and_die, args=(config,))
    process.start()
    process.join(timeout=200)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in (cache / "data").iterdir() if ".tmp-" in path.name]
    path = prepare(config).path
    assert prepared_in(cache) == [path]


def test_only_what_killed_processes_left_of_this_very_folder_is_cleared(corpus: Path, tmp_path: Path) -> None:
    left, *others = (tmp_path / name for name in (f"o*.tmp-{'ab' * 8}", f"oo.tmp-{'ab' * 8}", "o*.tmp-mine"))
    for path in (left, *others):
        path.mkdir()
    prepare(text_config(corpus, prepared_dir=str(tmp_path / "o*")))
    assert [path.exists() for path in (left, *others)] == [False, True, True]


def test_source_files_that_change_meanwhile_are_noticed(corpus: Path, cache: Path) -> None:
    def meddle(progress: Progress) -> None:
        if progress.stage == "encode":
            (corpus / "000.txt").write_text("changed")

    with pytest.raises(DataError, match="source files changed while they were read"):
        prepare(text_config(corpus), progress=meddle)
    assert prepared_in(cache) == []


def prepare_in_process(config: DataConfig, cache: str, barrier: Any, results: Any) -> None:
    os.environ["BURST_CACHE_DIR"] = cache
    barrier.wait()
    built = []
    prepared = prepare(config, progress=lambda progress: built.append(progress.stage))
    results.put((str(prepared.path), prepared.content_hash, "encode" in built))


def test_processes_that_prepare_together_share_one_result(corpus: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (text_config(corpus), str(cache), barrier, results)
    processes = [context.Process(target=prepare_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join(timeout=200)
    assert len({answer[:2] for answer in answers}) == 1
    assert sum(built for *_, built in answers) == 1
    assert len(prepared_in(cache)) == 1


def test_a_waiting_process_reports_repeatedly(corpus: Path, tmp_path: Path) -> None:
    waits: list[Progress] = []
    with (tmp_path / ".out.lock").open("ab") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)

        def give_way(progress: Progress) -> None:
            waits.extend([progress] * (progress.stage == "waiting"))
            if len(waits) == 2:
                fcntl.flock(holder, fcntl.LOCK_UN)

        prepare(text_config(corpus, prepared_dir=str(tmp_path / "out")), progress=give_way)
    assert waits == [Progress("waiting")] * 2


# --- tokens made elsewhere --------------------------------------------------------------------------------------------


def shards_config(path: Path) -> DataConfig:
    return DataConfig(format="shards", paths=(str(path),), validation_fraction=0.25)


@pytest.mark.parametrize("opener", [prepare, open_prepared])
def test_prepared_folders_open_as_shards(corpus: Path, opener: Any) -> None:
    made = prepare(text_config(corpus, tokenizer="bpe", bpe_vocab_size=300))
    opened = opener(shards_config(made.path))
    assert opened.content_hash == made.content_hash
    assert np.array_equal(opened.token_bytes, made.token_bytes)
    assert texts_in(opened) == sorted(TEXTS)


def test_a_single_set_is_split_at_its_tail(tmp_path: Path) -> None:
    folder = write_token_set(tmp_path / "s", list(range(40)), eod_id=99)
    prepared = prepare(shards_config(folder / "manifest.json"))
    assert prepared.path == folder  # where its tokenizer would be
    assert prepared.train.token_count == 30
    assert prepared.validation.token_count == 10
    assert prepared.validation.read(0, 2).tolist() == [30, 31]
    assert prepared.train.manifest.eod_id == 99
    assert prepared.token_bytes is None
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        prepared.load_tokenizer()


def test_foreign_shards_are_read_through_in_prepare_only(tmp_path: Path) -> None:
    config = shards_config(write_token_set(tmp_path / "s", [1] * 39 + [100]))
    open_prepared(config)  # as ranks do
    with pytest.raises(DataError, match="token 39"):
        prepare(config)


def test_missing_foreign_shards_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest at .*nowhere"):
        open_prepared(shards_config(tmp_path / "nowhere"))


def test_splits_of_foreign_shards_must_have_one_vocabulary(tmp_path: Path) -> None:
    for split, vocab_size in (("train", 50), ("validation", 60)):
        write_token_set(tmp_path / "p" / split, [1, 2], vocab_size=vocab_size)
    with pytest.raises(DataError, match="vocab_size of train is 50 but of validation 60"):
        prepare(shards_config(tmp_path / "p"))


def test_data_prepared_meanwhile_by_another_process_are_used(corpus: Path) -> None:
    """On a file system without locks."""
    config = text_config(corpus, tokenizer="bytes")
    first = prepare(config)
    aside = shutil.move(first.path, first.path.with_name("aside"))

    def finish_first(_: Progress) -> None:
        if not first.path.exists():
            shutil.copytree(aside, first.path)

    assert prepare(config, progress=finish_first).content_hash == first.content_hash

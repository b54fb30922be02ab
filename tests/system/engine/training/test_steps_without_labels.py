"""A batch may lack labels: the step changes nothing and the run continues."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.corpora import write_token_set
from testkit.ranks import Pools
from testkit.whole_runs import events_of, trained, whole_config

from engine.config.errors import DataError
from engine.config.settings import CheckpointConfig, DataConfig
from engine.data.prepare import open_training_data, prepare
from engine.runs.checkpoints import read_manifest
from engine.runs.folder import RunFolder

SEQ_LEN = 30


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Prompts of five samples' length before answers of ten bytes: most samples hold no label."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = (json.dumps({"q": f"{n:03d} " * 38, "a": f"answer {n:03d}"}) for n in range(40))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    fields = {"text_field": "a", "prompt_field": "q", "prepared_dir": str(folder / "prepared")}
    data = DataConfig(format="jsonl", paths=(str(folder / "pairs.jsonl"),), **fields)
    prepare(data)
    return data


def steps_with_labels(data: DataConfig, samples_per_step: int, steps: int) -> list[bool]:
    """Whether any byte of an answer is the next token somewhere in the samples of each step, from the files."""
    prepared = open_training_data(data)
    sampler = prepared.sampler(SEQ_LEN, seed=3, grad_accum_steps=1)
    ranges = prepared.main.path / "train" / "prompts.bin"
    edges = [int.from_bytes(ranges.read_bytes()[at : at + 8], "little") for at in range(0, ranges.stat().st_size, 8)]
    read_only = {token for first, after in zip(edges[::2], edges[1::2], strict=True) for token in range(first, after)}

    def has_label(number: int) -> bool:
        _, sample = sampler.locate(number)
        return any(token not in read_only for token in range(sample * SEQ_LEN + 1, (sample + 1) * SEQ_LEN + 1))

    return [any(has_label(step * samples_per_step + row) for row in range(samples_per_step)) for step in range(steps)]


def run_of(ranks: Pools, data: DataConfig, folder: Path, size: int = 1, **sections: Any) -> RunFolder:
    train = {"steps": 12, **sections.pop("train", {})}
    return trained(ranks, size, whole_config(data, train=train, **sections), folder)


def test_a_step_without_labels_has_no_loss(ranks: Pools, long_prompts: DataConfig, tmp_path: Path) -> None:
    rows = run_of(ranks, long_prompts, tmp_path).read_metrics()
    expected = steps_with_labels(long_prompts, 1, 12)
    assert set(expected) == {False, True}, "the test needs steps of both kinds"
    assert [row["loss"] is not None for row in rows] == expected
    assert [row.get("dropped") is None for row in rows] == expected


def test_a_step_without_labels_leaves_the_weights_alone(ranks: Pools, long_prompts: DataConfig, tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(every_steps=1, keep_last=20)
    run = run_of(ranks, long_prompts, tmp_path, train={"checkpoint": checkpoint})
    manifests = [read_manifest(run.path / "checkpoints" / f"step-{step:08d}") for step in range(1, 13)]
    hashes = [tuple(file.sha256 for file in manifest.files.values()) for manifest in manifests]
    changed = [before != after for before, after in pairwise(hashes)]
    assert changed == steps_with_labels(long_prompts, 1, 12)[1:]


def test_an_event_names_the_samples_without_labels(ranks: Pools, long_prompts: DataConfig, tmp_path: Path) -> None:
    run = run_of(ranks, long_prompts, tmp_path)
    empty = [step for step, labels in enumerate(steps_with_labels(long_prompts, 1, 12)) if not labels]
    assert events_of(run, "dropped", "step") == [step + 1 for step in empty]
    assert events_of(run, "dropped", "first_sample") == empty
    assert set(events_of(run, "dropped", "reason")) == {"no token of its batch has a label"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "sections"),
    [
        (2, {"parallel": {"cp_size": 2}, "attention": {"preset": "ring"}}),
        (2, {"parallel": {"dp_shard_size": 2}}),
        (1, {"train": {"grad_accum_steps": 2}}),
        (1, {"memory": {"optimizer_store": "host"}}),
        (1, {"memory": {"optimizer_in_backward": True}, "optimizer": {"max_grad_norm": None}}),
        (1, {"train": {"guard": {"on_nonfinite": "skip", "spike_deviations": 5.0, "on_spike": "skip"}}}),
    ],
    ids=["ring", "fsdp", "accumulation", "host updates", "updates in backward", "guard"],
)
def test_steps_without_labels_are_skipped_by_every_kind_of_update(
    ranks: Pools, long_prompts: DataConfig, tmp_path: Path, size: int, sections: dict[str, Any]
) -> None:
    rows = run_of(ranks, long_prompts, tmp_path, size, **sections).read_metrics()
    per_step = 2 if "dp_shard_size" in str(sections) or "grad_accum" in str(sections) else 1
    assert [row["loss"] is not None for row in rows] == steps_with_labels(long_prompts, per_step, 12)


def test_a_step_without_labels_has_no_speed(ranks: Pools, long_prompts: DataConfig, tmp_path: Path) -> None:
    rows = [row for row in run_of(ranks, long_prompts, tmp_path).read_metrics() if row["loss"] is None]
    assert {(row["mfu"], row["tokens_per_s"], row["grad_norm"]) for row in rows} == {(None, None, None)}


def test_validation_without_labels_has_no_loss(ranks: Pools, long_prompts: DataConfig, tmp_path: Path) -> None:
    run = run_of(ranks, long_prompts, tmp_path)  # one sample: the beginning of a prompt
    last = run.read_metrics()[-1]
    assert last["validation_loss"] is None
    assert run.read_summary()["final_validation_loss"] is None


def test_data_without_any_label_is_refused(tmp_path: Path) -> None:
    prompts = [0, 60]  # all tokens of the set
    np.array(prompts, dtype="<i8").tofile(tmp_path / "p.bin")
    write_token_set(tmp_path, range(60), prompts_file="p.bin", prompt_count=1)
    with pytest.raises(DataError, match="no token of its 54 training tokens is learned"):
        prepare(DataConfig(format="shards", paths=(str(tmp_path),), validation_fraction=0.1))


def test_labels_past_the_last_whole_sample_are_not_enough(tmp_path: Path) -> None:
    np.array([0, 35], dtype="<i8").tofile(tmp_path / "p.bin")  # one sample of 30 tokens, and labels of 35 to 53
    write_token_set(tmp_path, range(60), prompts_file="p.bin", prompt_count=1)
    data = DataConfig(format="shards", paths=(str(tmp_path),), validation_fraction=0.1)
    prepare(data)
    with pytest.raises(DataError, match="no token of the 1 training samples of seq_len=30"):
        open_training_data(data).sampler(SEQ_LEN, seed=0, grad_accum_steps=1)

"""Mistakes of a user: exit code 2, words that name the mistake and the remedy, no traceback, no run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.command_line import Result

from engine.predict.machine import machine_fields

# Override, what is told of it: the mistake as given, and what to write instead. Those of a list are told in one breath.
BAD_OVERRIDES = [
    [
        ("train.seqlen=4096", "train.seqlen: no such setting", "did you mean train.seq_len?"),
        ("steps=4", "steps: no such setting", "did you mean train.steps?"),
        ("Train.Steps=4", "Train.Steps: no such setting", "did you mean train.steps?"),
        ("qqqqqq=4", "qqqqqq: no such setting", "burst config --fields"),
        ("train.wheels=4", "train.wheels: no such setting", "train has checkpoint, guard, seq_len, steps,"),
        ("exp=tinny", "exp has no option 'tinny'", "did you mean exp=tiny?"),
        ("attention=ulyses", "attention has no option 'ulyses'", "did you mean attention=ulysses? Options: "),
        ("modle=tiny", "modle: no such setting", "did you mean model?"),
        ("model=null", "model is a group of files", "takes the name of one"),
        ("train={steps:4}", "train is a group of files", "train.NAME=VALUE"),
        ("train.steps", "'train.steps': expected KEY=VALUE", "train.steps=50"),
        ("=4", "'=4': expected KEY=VALUE", "exp=tiny"),
        ("train..steps=4", "not in the grammar of overrides", "in quotes"),
        ("+train.steps=4", "exists already", "write it without the +: train.steps=4"),
        ("~train.steps=4", "take a setting back to its default", "write ~train.steps"),
        ("hydra.run.dir=/", "settings of Hydra itself have no effect", "leave it out"),
        ("hydra=x", "hydra=x: settings of Hydra itself have no effect", "leave it out"),
        ("hydra/launcher=x", "hydra/launcher=x: settings of Hydra itself have no effect", "leave it out"),
        ("exp=''", "exp='': exp is a group of files", "takes the name of one"),
        ("train.seq_len=2048,4096", "train.seq_len=2048,4096: a list of values is a sweep", "give one value, or quote"),
        ("data.paths=a,b", "data.paths=a,b: a list of values is a sweep", "data.paths=[a,b]"),
        ("train.warmup_metric_steps=5", "no such setting any more", "leave the first 3 steps out"),
    ],
    [
        ("train.steps=many", "train.steps: expected a whole number, got the text 'many'", ""),
        ("train.seq_len=128KB", "train.seq_len: expected a whole number, got the text '128KB'", ""),
        ("train.compile=1", "train.compile: expected true or false, got the number 1", ""),
        ("model.name=7", "model.name: expected text, got the number 7", "put it in quotes: \"model.name='7'\""),
        ("data.paths=corpus", "data.paths: expected a list", "put it in brackets: data.paths=[corpus]"),
        ("optimizer=5", "optimizer: expected a table of settings, got the number 5", ""),
        ("attention.layout=zig", "legal: contiguous, zigzag, striped, ", "did you mean zigzag?"),
        ("loss.z_loss=-1", "loss.z_loss: got -1.0", "expected 0 or more"),
        ("data.validation_fraction=1", "data.validation_fraction: got 1.0", "more than 0, below 1"),
        ("model.num_kv_heads=3", "model.num_kv_heads: got 3", "a divisor of model.num_heads=4: 1, 2, 4"),
        ("model.head_dim=63", "model.head_dim: got 63", "expected an even number"),
        ("model.vocab_size=100", "data.tokenizer=bpe gives 2048 different tokens", "set model.vocab_size=2048 or more"),
        ("parallel.cp_size=3", "x cp_size 3 = 3, but there are 4 ranks", "leave parallel.cp_size=null"),
        ("cluster.topology_nodes=3", "3 nodes cannot share 4 ranks", "choose a divisor: 1, 2, 4"),
    ],
    [
        ("train.steps=1.5", "train.steps: expected a whole number, got the number 1.5", ""),
        ("optimizer.schedule=cosin", "'cosin' is not a legal value; legal: cosine, constant, wsd", "mean cosine?"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate: got 0.0", "expected more than 0"),
        ("train.profile=8:5", "train.profile: got '8:5'", "expected START:STOP"),
        ("data=text", "data.format=text reads files, but none was given", "add data.paths=[FILE,FOLDER,GLOB]"),
        ("data.tokenizer=my.json", "data.tokenizer: got 'my.json'", "bytes, bpe or the path of a tokenizer.json"),
        ("parallel.dp_shard_size=3", "does not divide the 4 ranks", "choose degrees that do"),
    ],
    [
        ("train.steps=99999999999999999999", "train.steps: expected a whole number", ""),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate: got nan", "expected more than 0"),
        ("optimizer.decay_steps=5", "optimizer.decay_steps: only optimizer.schedule=wsd", "null or choose wsd"),
        ("data.paths=[/etc]", "data.format=stdlib reads no files", "data=text, data=jsonl"),
        ("attention=single", "4 ranks share it", "choose attention=burst"),
    ],
    [
        ("train.steps=1K", "train.steps: expected a whole number, got the text '1K'", ""),
        ("attention.ring_inner_size=3", "4 ranks share a", "nearest legal head x inner x outer: 1 x 4 x 1, 1 x 2 x 2"),
    ],
    [("optimizer.warmup_steps=100000", "optimizer.warmup_steps: got 100000", "expected at most train.steps=")],
    [("train.steps=${oc.env:NO_SUCH_VARIABLE}", "train.steps: ", "'NO_SUCH_VARIABLE' not found")],
]

BAD_ARGUMENTS = [
    (["lanch"], "No such command 'lanch'", "Did you mean 'launch'"),
    (["config", "--josn"], "No such option: --josn", "See `burst config --help`."),
    (["config", "--config-dir", "/no/such"], "--config-dir /no/such: no such folder", "give one that holds"),
    (["config", "--config-dir"], "Option '--config-dir' requires an argument", "See `burst config --help`."),
    (["report", "--compare", "a"], "Option '--compare' requires 2 arguments", "See `burst report --help`."),
    (["hosts", "trust", "-w"], "Option '-w' requires an argument", "See `burst hosts trust --help`."),
    (["report", "--runs-dir", __file__], "--runs-dir", f"{__file__!r} is a file"),
    (["config", "--groups", "exp=tiny"], "--groups lists what there is", "leave out exp=tiny"),
    (["config", "--fields", "exp=tiny"], "--fields lists what there is", "leave out exp=tiny"),
]


def assert_refused(result: Result, *words: str) -> None:
    assert (result.code, result.err.startswith("error: "), "Traceback" in result.err) == (2, True, False)
    assert [word for word in words if word not in result.err] == []


@pytest.mark.parametrize("rows", BAD_OVERRIDES, ids=lambda rows: rows[0][0])
def test_bad_overrides_are_each_named_with_the_remedy(burst, rows: list[tuple[str, str, str]]) -> None:
    result = burst("config", "exp=tiny", *(override for override, _, _ in rows))
    assert_refused(result)
    told = [" ".join(text.split()) for text in result.err.split("\n  • ")][1:] or [result.err]
    assert (len(told), result.out) == (len(rows), "")
    for _, mistake, remedy in rows:
        assert any(mistake in line and remedy in line for line in told), mistake


def test_masks_and_methods_are_tried_before_ranks_start(burst, tmp_path: Path, monkeypatch) -> None:
    for overrides, mistake, remedy in [
        (["attention=auto", "attention.layout=chunk_cyclic"], "orders tokens by chunks", "set attention.chunk_tokens"),
        (
            ["attention.mask=blocks", f"attention.blocks_file={tmp_path}/pairs.json"],
            "pairs.json",
            'an object with a list "pairs"',
        ),
    ]:
        (tmp_path / "pairs.json").write_text("[[0, 0]]")
        monkeypatch.chdir(tmp_path)
        assert_refused(burst("launch", "exp=tiny", *overrides), mistake, remedy)
        assert not (tmp_path / "runs").exists()


NO_ROOM = [
    ("memory.device_bytes=200000", ["a rank needs ", "195 KiB of ", "Largest: ", "--force"]),
    ("memory.host_bytes=800000", ["more than the 195 KiB", "What helps: ", "a smaller model: weights, gradients and"]),
]


@pytest.mark.parametrize(("override", "words"), NO_ROOM)
def test_run_that_cannot_fit_is_refused_before_anything_is_created(burst, tmp_path: Path, override: str, words) -> None:
    overrides = (override, *(["memory.activation_checkpoint=auto"] if "host" in override else ()))
    assert_refused(burst("launch", "exp=tiny", *overrides), *words)
    assert not (tmp_path / "runs").exists()


def test_steps_of_minutes_on_the_cpu_are_refused(burst, tmp_path: Path) -> None:
    one_core = ("cluster.backend=gloo", "cluster.ranks_per_node=1", "cluster.threads_per_rank=1")
    result = burst("launch", "exp=small", *one_core)
    # 1.0e14 FLOPs by the counts of engine.predict.flops; a core of the table gives 55 to 80 GFLOP/s.
    assert_refused(result, "too slow: 28.4 min per step is expected on the CPU", "or a shorter sequence")
    free = ",".join(f"'{name}={'inf' if name.endswith('_per_s') else 0}'" for name in machine_fields())
    (tmp_path / "bad.jsonl").write_text("{nonsense")  # for what is not refused
    data = ("data=jsonl", f"data.paths=[{tmp_path}/bad.jsonl]", "train.seq_len=64", "model.num_layers=1")
    for step_s, told, how in ((60, "expected: 1 min per step, ", ["--dry-run"]), (300, "bad JSON", [])):
        rates = f"cluster.machine.rates=[{free},'kernel_block_rows=1','step_overhead_s={step_s}']"
        result = burst("launch", "exp=tiny", *one_core, *data, rates, *how)
        assert told in result.out + result.err
    assert not (tmp_path / "runs").exists()


def test_dry_run_shows_what_auto_chose_from(burst) -> None:
    result = burst("launch", "exp=tiny", "memory.activation_checkpoint=auto", "--dry-run")
    words = ("memory.activation_checkpoint=auto: none", "attn_out_every 4")
    assert (result.code, [text for text in words if text not in result.out]) == (0, [])


@pytest.mark.parametrize(("argv", "mistake", "remedy"), BAD_ARGUMENTS, ids=[" ".join(row[0]) for row in BAD_ARGUMENTS])
def test_bad_argument_is_named_with_its_remedy(burst, argv: list[str], mistake: str, remedy: str) -> None:
    assert_refused(burst(*argv), mistake, remedy)


def test_bad_file_is_named_with_its_mistake(burst, tmp_path: Path) -> None:
    for text, words in [
        ("# @package _global_\ntrain: {steps: 4\n", ["mine.yaml", "line 2"]),
        ("train:\n  steps: 4\n", ["mine.yaml", "# @package _global_"]),
        ("# @package _global_\ntrain:\n  setps: 4\n", ["train.setps: no such setting; did you mean", "mine.yaml"]),
        ("# @package _global_\ntrain:\n  steps: many\n", ["train.steps: expected a whole number", "mine.yaml"]),
        ("# @package _global_\ntrain:\n  steps: 3\n  steps: 4\n", ["duplicate key steps", "mine.yaml"]),
        ("# @package _global_\nseed: ???\n", ["seed: must be given", "mine.yaml, line 2", "add seed=VALUE"]),
        ("# @package _global_\ntrain:\n  steps: ???\n", ["train.steps: must be given", "mine.yaml, line 3"]),
        ("# @package _global_\ndata:\n  paths:\n    - ???\n", ["data.paths[0]: must be given", "mine.yaml, line 4"]),
        ("# @package _global_\ntrain: ???\n", ["train: must be given", "mine.yaml, line 2"]),
        (
            "# @package _global_\ntrain:\n  steps: ${train.stepz}\n",
            ["train.steps: ", "'train.stepz' not found", "mine.yaml, line 3"],
        ),
        (
            "# @package _global_\ndefaults:\n  - override /model: nope\n",
            ["mine.yaml, line 3", "'model/nope'", "llama7b"],
        ),
        (
            "# @package _global_\ndefaults:\n  - override /none: nope\n",
            ["mine.yaml, line 3", "there is no group 'none'"],
        ),
        ("# @package _global_\ntrain:\n  _target_: os.system\n", ["train._target_: no such setting", "mine.yaml"]),
        ("- a\n", ["mine.yaml, line 1: expected settings such as `seed: 0`, got a list"]),
        ("\udcff\udcfe", ["mine.yaml: not UTF-8 text", "save the file as UTF-8"]),
    ]:
        (tmp_path / "exp").mkdir(exist_ok=True)
        (tmp_path / "exp" / "mine.yaml").write_bytes(text.encode(errors="surrogateescape"))
        assert_refused(burst("config", "--config-dir", str(tmp_path), "exp=mine"), *words)


def test_a_mark_for_a_missing_value_is_refused_on_the_command_line(burst) -> None:
    assert_refused(
        burst("config", "exp=tiny", "train.steps=???"), "train.steps=??? says ???", "Write train.steps=VALUE"
    )


def test_a_missing_value_may_be_given_on_the_command_line(burst, tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text("# @package _global_\ntrain:\n  steps: ???\n")
    done = burst("config", "--config-dir", str(tmp_path), "exp=mine", "train.steps=7")
    assert done.code == 0, done.err

"""Composition: every experiment, where values come from, which folder wins, and no trace left behind."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from burst_cli.compose import compose
from burst_cli.overrides import builtin_conf_dir, list_options, search_path, user_conf_dir
from engine.config.errors import ConfigError
from engine.config.schema import to_plain, walk_fields
from engine.config.settings import RunConfig, config_from_dict

GROUPS = list_options((builtin_conf_dir(),))
READS_FILES = {"text", "jsonl", "parquet", "shards"}
WSD = "# @package _global_\noptimizer: {schedule: wsd, warmup_steps: 10, decay_steps: 8}\n"
PODS = ("cluster.kubernetes.claim=runs", "cluster.container.image=registry.example/burst:1")  # what k8s cannot guess


def parameters(config: RunConfig) -> int:
    """Weights of the model by the textbook formula."""
    model = config.model
    heads = model.head_dim * model.hidden_size * 2 * (model.num_heads + model.num_kv_heads)
    layer = heads + 3 * model.hidden_size * model.ffn_hidden_size + 2 * model.hidden_size
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return model.num_layers * layer + tables + model.hidden_size


@pytest.mark.parametrize("name", sorted(GROUPS["exp"]))
def test_every_experiment_composes_and_is_named_after_its_file(name: str) -> None:
    config = compose([f"exp={name}"]).config
    assert (config.exp, config_from_dict(to_plain(config))) == (name, config)


@pytest.mark.parametrize(
    "choice",
    [f"{group}={name}" for group in GROUPS if group != "exp" for name in GROUPS[group] if name not in READS_FILES],
)
def test_every_option_of_every_group_composes(choice: str) -> None:
    # One rank and the widest vocabulary: legal for every option of every group.
    compose([choice, "cluster.ranks_per_node=1", "data.tokenizer=bytes", *(PODS if choice == "cluster=k8s" else ())])


@pytest.mark.parametrize("name", sorted(READS_FILES))
def test_data_from_files_composes_once_the_files_are_named(name: str) -> None:
    assert compose([f"data={name}", "data.paths=[/usr]"]).config.data.paths == ("/usr",)


@pytest.mark.parametrize("text", ["${HOME}", r"\${x}", r"a\\${train.steps}${", r"C:\x\$y{z}", "'\"\\", "???a"])
def test_what_a_saved_setting_holds_stands_for_itself(text: str) -> None:
    saved = config_from_dict({"data": {"text_field": text}, "cluster": {"environment": [f"A={text}"]}})
    config = compose(["train.steps=3"], base=saved).config
    assert (config.data.text_field, config.cluster.environment) == (text, (f"A={text}",))


def test_every_file_has_a_description() -> None:
    described = {f"{group}/{name}": option.description for group in GROUPS for name, option in GROUPS[group].items()}
    cut = {name: text for name, text in described.items() if not text.endswith(".")}
    assert not cut  # a whole sentence, also where the comment breaks its line


def test_models_have_the_sizes_in_their_names() -> None:
    # 1%: the published sizes are rounded.
    for exp, billions in {"small": 0.098, "llama7b_1m": 6.74, "llama8b_1m": 8.03, "llama14b_1m": 13.0}.items():
        assert parameters(compose([f"exp={exp}"]).config) == pytest.approx(billions * 1e9, rel=0.01)


def test_million_token_experiments_have_a_million_tokens() -> None:
    for exp in (name for name in GROUPS["exp"] if name.endswith("_1m")):
        config = compose([f"exp={exp}"]).config
        assert (config.train.seq_len, config.attention.preset) == (1048576, "burst")


def test_every_value_has_the_source_that_set_it() -> None:
    sources = compose(["exp=tiny", "train.steps=70", "attention=ring", "optimizer={beta1: 0.8}"]).sources
    wanted = {
        "train.steps": "train.steps=70",
        "attention.preset": "conf/attention/ring.yaml",
        "train.compute_dtype": "conf/train/tiny.yaml",
        "optimizer.warmup_steps": "conf/exp/tiny.yaml",
        "optimizer.beta1": "optimizer={beta1: 0.8}",
        "exp": "exp=tiny",
        "optimizer.beta2": None,
    }
    assert {key: sources.get(key) for key in wanted} == wanted


def test_sources_name_only_settings_that_exist_and_what_has_none_is_the_default() -> None:
    defaults = {spec.key: spec.default for spec in walk_fields(RunConfig)}
    for name in GROUPS["exp"]:
        composed = compose([f"exp={name}"])
        assert set(composed.sources) <= set(defaults)
        values = {key: functools.reduce(getattr, key.split("."), composed.config) for key in defaults}  # type: ignore[arg-type]
        assert [key for key in defaults if key not in composed.sources and values[key] != defaults[key]] == []


def test_a_deleted_setting_has_its_default_again_and_a_deleted_experiment_leaves_a_custom_one() -> None:
    composed, plain = compose(["~train.seq_len", "~optimizer"]), RunConfig()
    assert (composed.config.train.seq_len, composed.config.optimizer) == (plain.train.seq_len, plain.optimizer)
    assert not [key for key in composed.sources if key.startswith(("train.seq_len", "optimizer"))]
    assert compose(["~exp", "model=small"]).config.exp == "custom"


def test_few_steps_shorten_what_files_say_of_warm_up() -> None:
    for overrides, steps, notes in [
        (["exp=tiny", "train.steps=3"], 3, ["optimizer.warmup_steps is 3, not 10"]),
        (["exp=small", "train.steps=1"], 1, ["optimizer.warmup_steps is 1, not 50"]),
        (["exp=tiny", "optimizer.warmup_steps=2", "train.steps=4"], 2, []),
        (["exp=tiny", "train.steps=10"], 10, []),
        (["exp=small", "train.steps=40"], 40, ["optimizer.warmup_steps is 40, not 50"]),
    ]:
        composed = compose(overrides)
        assert composed.config.optimizer.warmup_steps == steps
        assert [note.partition(":")[0] for note in composed.notes] == notes
        assert not notes or composed.sources["optimizer.warmup_steps"] == overrides[-1]


@pytest.mark.parametrize(("text", "tokens"), [("128K", 131072), ("1M", 1048576), ("4096", 4096)])
def test_tokens_are_counted_in_binary_thousands(text: str, tokens: int) -> None:
    lists = (f"data.length_buckets=[100,{text}]", "data.length_weights=[0.5,0.25,0.25]")
    config = compose([f"train.seq_len={text}", f"attention.window_tokens={text}", *lists]).config
    found = (config.train.seq_len, config.attention.window_tokens, config.data.length_buckets)
    assert found == (tokens, tokens, (100, tokens))


def write(folder: Path, name: str, text: str) -> Path:
    (path := folder / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_last_folder_given_wins_then_the_users_then_the_built_in(tmp_path: Path, monkeypatch) -> None:
    own, first, last = user_conf_dir(), tmp_path / "first", tmp_path / "last with 'quote"
    for index, folder in enumerate((own, first, last), start=1):
        write(folder, "model/mine", f"num_layers: {index}\nvocab_size: 4096\n")
        found = compose(["model=mine"], [path for path in (first, last) if path.is_dir()])
        assert found.config.model.num_layers == index
    assert search_path([first, last]) == (last, first, own, builtin_conf_dir())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose(["model=mine"]).sources["model.num_layers"] == "~/xdg/burst/conf/model/mine.yaml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert user_conf_dir() == tmp_path / ".config/burst/conf"


@pytest.mark.parametrize(
    ("name", "text", "overrides", "key", "value", "exp"),
    [
        ("exp/tiny", "# @package _global_\nseed: 5\n", ["exp=tiny"], "seed", 5, "tiny"),  # in place of ours
        ("exp/a/deep", "# @package _global_\nseed: 9\n", ["exp=a/deep"], "seed", 9, "a-deep"),  # can name a folder
        ("config", "defaults: [model: small, _self_]\nseed: 8\ndata: {tokenizer: bytes}\n", [], "seed", 8, "custom"),
        ("machine/own", "# @package _global_\nseed: 3\n", ["+machine=own"], "seed", 3, "tiny"),  # a group of its own
        ("exp/wsd", WSD, ["exp=wsd", "train.steps=12"], "optimizer.decay_steps", 2, "wsd"),  # after the warm-up
        ("exp/wsd", WSD, ["exp=wsd", "train.steps=12"], "optimizer.warmup_steps", 10, "wsd"),
    ],
)
def test_a_file_of_ones_own_may_be_an_experiment_a_group_or_the_root(
    tmp_path: Path, name: str, text: str, overrides: list[str], key: str, value: int, exp: str
) -> None:
    path = write(tmp_path, name, text)
    composed = compose(overrides, [tmp_path])
    found: object = functools.reduce(getattr, key.split("."), composed.config)  # type: ignore[arg-type]
    assert (found, composed.config.exp) == (value, exp)
    assert composed.sources[key] in (str(path), "train.steps=12")


@pytest.mark.parametrize("override", ["exp=small.yaml", "exp=small"])
def test_an_option_may_be_given_with_its_ending(override: str) -> None:
    composed = compose([override])
    assert (composed.config.exp, composed.sources["optimizer.warmup_steps"]) == ("small", "conf/exp/small.yaml")


def test_composing_reads_the_environment_and_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURST_TEST_NAME", "mine")
    assert compose(["exp=tiny", "model.name=${oc.env:BURST_TEST_NAME}"]).config.model.name == "mine"
    with pytest.raises(ConfigError):
        compose(["exp=tiny", "model=nope"])
    assert (Path.cwd(), list(tmp_path.iterdir()), GlobalHydra.instance().is_initialized()) == (tmp_path, [], False)


def test_keys_of_a_json_setting_can_be_changed_or_added() -> None:
    rope = "model.hf_config.rope_parameters"
    composed = compose(["exp=qwen3_30b_a3b_1m", f"{rope}.rope_type=yarn", f"+{rope}.factor=4.0"])
    assert composed.config.model.hf_config is not None
    assert composed.config.model.hf_config["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    assert composed.sources["model.hf_config"] == f"+{rope}.factor=4.0"

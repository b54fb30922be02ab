"""`burst model` and `burst checkpoint export` as a person types them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from testkit.saved_checkpoints import MODEL, WEIGHTS, hugging_face_folder, save_checkpoint

from engine.config.settings import DataConfig, ModelConfig, RunConfig, dump_config
from engine.data.tokenizers import train_bpe
from engine.runs.folder import create_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hugging_face_folder(tmp_path / "[b]mine")


def test_a_model_is_shown_as_a_configuration_that_can_be_written(burst, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 2048, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    done = burst("model", str(folder))
    settings = yaml.safe_load(done.out)
    found = replace(ModelConfig(**settings), name="mine", init_from=None)
    assert (done.code, found, settings["name"], settings["init_from"]) == (0, MODEL, "[b]mine", str(folder))
    shape = ["name", "vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads"]
    assert list(settings) == [*shape, "head_dim", "qkv_bias", "init_from"]
    told = [
        f"its tokenizer: data.tokenizer={folder}",
        "its window: attention.mask=window attention.window_tokens=2048",
        "trained on 4,096 tokens; for longer sequences stretch RoPE, as with model.rope_scaling.kind=yarn "
        "model.rope_scaling.factor=4 model.rope_scaling.original_seq_len=4096",
    ]
    facts = {"folder": str(folder), "model": settings, "mask_layers": ["window"], "window_tokens": 2048}
    facts |= {"seq_len": 4096, "notes": told}
    assert (burst("model", str(folder), "--json").document, done.err.splitlines()) == (facts, told)
    missing = burst("model", str(tmp_path))
    assert (missing.code, "expected the folder of a Hugging Face model" in missing.err) == (2, True)
    (folder / "model.safetensors").unlink()
    without = burst("model", str(folder))
    assert (without.code, yaml.safe_load(without.out)) == (
        0,
        {key: settings[key] for key in settings if key != "init_from"},
    )
    assert "no weights to begin with" in without.err


def test_a_truncated_tokenizer_is_refused_by_file(burst, folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:-100])
    done = burst("model", str(folder))
    assert done.code == 2
    assert str(file) in done.err, "the damaged file is named"
    assert "line" in done.err, "the place in the file is named"


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_chat_template_that_is_no_jinja_is_refused_by_file(burst, folder: Path, name: str) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{{ bos_token }}\n{% for message in messages %}\n{{ message }\n{% endfor %}")
    done = burst("model", str(folder))
    assert done.code == 2
    assert f"line 3: the chat template {folder / name} is not valid Jinja" in done.err


def test_a_model_is_saved_as_an_option_of_the_group_model(burst, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder.parent / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    done = burst("model", str(folder), "--save", "mine")
    place = home / ".config" / "burst" / "conf" / "model" / "mine.yaml"
    assert done.code == 0, done.err
    assert yaml.safe_load(place.read_text())["init_from"] == str(folder)
    place.write_text("other: 1\n")
    again = burst("model", str(folder), "--save", "mine")
    assert (again.code, place.read_text()) == (2, "other: 1\n"), "an existing file is not replaced"
    assert "--force" in again.err
    assert burst("model", str(folder), "--save", "mine", "--force").code == 0
    assert "other" not in place.read_text()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a b"])
def test_a_name_that_is_no_option_is_refused(burst, folder: Path, name: str) -> None:
    assert burst("model", str(folder), "--save", name).code == 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint, of a model of one weight."""
    config = {"config.yaml": dump_config(RunConfig(model=MODEL))}
    run = create_run(tmp_path / "runs" / "mine" / "20260101-000000-abcdef", config)
    save_checkpoint(run.path / "checkpoints", 7, WEIGHTS)
    return run.path


def test_weights_are_exported(burst, run: Path, tmp_path: Path) -> None:
    done = burst("checkpoint", "export", str(run), str(tmp_path / "out"), "--dtype", "float32", "--json")
    assert done.code == 0, done.err
    assert (json.loads(done.out)["step"], json.loads(done.out)["files"]) == (7, 1)
    found = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], np.arange(24, dtype=np.float32).reshape(6, 4))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen2"


def test_a_bar_of_progress_leaves_no_lines_in_a_pipe(burst, run: Path, tmp_path: Path) -> None:
    done = burst("checkpoint", "export", str(run), str(tmp_path / "out"))
    lines = done.err.splitlines()
    assert "" not in lines, f"empty lines on stderr: {lines}"


def test_an_exported_model_of_conversations_has_its_chat_template(burst, run: Path, tmp_path: Path) -> None:
    tokenizer = train_bpe(["the quick brown fox"], 270)
    tokenizer.save(tmp_path)
    special = {"bos_token": "<s>", "eos_token": "q", "chat_template": "{{ bos_token }}..."}  # a turn ends with a q
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    data = DataConfig(format="jsonl", messages_field="messages", tokenizer=str(tmp_path / "tokenizer.json"))
    (run / "config.yaml").write_text(dump_config(RunConfig(model=MODEL, data=data)))
    assert burst("checkpoint", "export", str(run), str(tmp_path / "out")).code == 0
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == special
    ends = json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]
    assert ends == tokenizer.encode(["q"])[0][0]
    (tmp_path / "tokenizer_config.json").unlink()
    done = burst("checkpoint", "export", str(run), str(tmp_path / "other"))
    assert (done.code, "the folder gets no chat template" in done.err) == (0, True)
    assert not (tmp_path / "other" / "chat_template.jinja").exists()


def test_what_cannot_be_exported_is_named(burst, run: Path, tmp_path: Path) -> None:
    for words, text in [
        (["--step", "8"], "has no checkpoint of step 8; it has 7"),
        (["--dtype", "float16"], "'float16' is not one of 'bfloat16', 'float32'"),
        (["--file-gib", "inf"], "--file-gib"),
        (["--file-gib", "nan"], "--file-gib"),
    ]:
        done = burst("checkpoint", "export", str(run), str(tmp_path / "out"), *words)
        assert (done.code != 0, text in done.err, (tmp_path / "out").exists()) == (True, True, False)


def test_an_export_writes_a_new_folder_of_an_undamaged_checkpoint(burst, run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    export = ("checkpoint", "export", str(run), str(tmp_path / "out"))
    assert "exists; export writes a new folder" in burst(*export).err
    (tmp_path / "out").unlink()
    (run / "checkpoints" / "step-00000007" / "rank00000.safetensors").write_bytes(b"")
    assert "has no undamaged checkpoint" in burst(*export).err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]

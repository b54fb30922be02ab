"""A folder of every family in, trained, exported: only weights and what training changed differ from the original."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.pretrained_helpers import config_of, train_and_save
from testkit.ranks import Pools
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from engine.config.settings import RopeScalingConfig, RunConfig
from engine.export.hugging_face import ExportOrder, export
from engine.runs.checkpoints import read_manifest

pytestmark = pytest.mark.thorough
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": [258, 256],
    "pad_token_id": 257,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 40}),
    "qwen 2": ("qwen2", {"rope_parameters": YARN}),
    "qwen 2.5 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen 3": ("qwen3", {"head_dim": 16}),
}
WEIGHTS = "model.safetensors"


def instruct_folder(folder: Path, name: str) -> Path:
    """A model as transformers saves it, with tokenizer, chat template, sampling settings and a licence."""
    family, settings = FOLDERS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **settings))
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|pad|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>", model_max_length=64
    )
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "rag": "{{ documents }}"}
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text("You may.\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_cache": False, "house_key": [1]}))
    return folder


def exported(ranks: Pools, folder: Path, root: Path, **settings: Any) -> tuple[Path, torch.Tensor, tuple[str, ...]]:
    """(the folder that was written, logits of the trained model on the first batch, warnings)."""
    config: RunConfig = config_of(folder, train={"seq_len": 30})
    config = replace(config, model=replace(config.model, **settings))
    logits = ranks(1).run(train_and_save, config, str(root / "checkpoints"))[0]
    saved = root / "checkpoints" / "step-00000005"
    order = ExportOrder(saved, config, root / "out", dtype="float32", base=folder, tokenizer=folder)
    return root / "out", logits, export(order, read_manifest(saved)).warnings


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", FOLDERS)
def test_only_weights_differ(ranks: Pools, tmp_path: Path, name: str) -> None:
    folder = instruct_folder(tmp_path / "base", name)
    out, _, warnings = exported(ranks, folder, tmp_path)
    before, after = files_of(folder), files_of(out)
    assert before.keys() == after.keys()
    assert [file for file in before if before[file] != after[file]] == [WEIGHTS]
    assert warnings == ()


@pytest.mark.parametrize("name", ["llama 2", "mistral", "qwen 2", "qwen 3"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_a_stretched_model_is_the_one_that_was_trained(ranks: Pools, tmp_path: Path, name: str, spelling: str) -> None:
    folder = instruct_folder(tmp_path / "base", name)
    if spelling == "rope_scaling":  # as transformers 4 wrote it
        config = json.loads((folder / "config.json").read_text())
        rope = config.pop("rope_parameters")
        theta = rope.pop("rope_theta")
        scaling = None if rope["rope_type"] == "default" else rope
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": theta, "rope_scaling": scaling}))
    scaling = RopeScalingConfig(kind="yarn", factor=8.0, original_seq_len=16)
    out, logits, warnings = exported(ranks, folder, tmp_path, rope_scaling=scaling)
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 8 * 16, "what transformers 4 computes the factor from"
    assert warnings == ()
    before = json.loads((folder / "config.json").read_text())
    rope_keys = {"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"}
    assert {key: config[key] for key in config.keys() - rope_keys} == {
        key: before[key] for key in before.keys() - rope_keys
    }
    changed = [file for file, content in files_of(folder).items() if files_of(out)[file] != content]
    assert changed == ["config.json", WEIGHTS]
    peer = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert peer.config.rope_parameters["factor"] == 8.0
    from testkit.tiny_training import random_batches

    tokens = torch.from_numpy(random_batches(0, sequences=1).tokens.astype("int64"))
    torch.testing.assert_close(logits, peer(input_ids=tokens).logits.detach(), rtol=1e-5, atol=1e-5)


def test_the_exported_tokenizer_equals_that_of_the_base(ranks: Pools, tmp_path: Path) -> None:
    folder = instruct_folder(tmp_path / "base", "qwen 2")
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (exported(ranks, folder, tmp_path)[0], folder))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    assert ours.model_max_length == 64
    assert ours.eos_token == "<|im_end|>"
    assert ours.pad_token == "<|pad|>"

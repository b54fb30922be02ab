"""Models of transformers come in, train and go out with the same logits and gradients, whatever family and ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from testkit.pretrained_helpers import config_of, facts, imported_weights, train_and_save
from testkit.ranks import Pools, RankFailedError
from testkit.tiny_training import random_batches, tiny_config
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.export.hugging_face import ExportOrder, bfloat16_bits, export, weight_bytes
from engine.pretrained.shape import read_pretrained
from engine.runs.checkpoints import CheckpointError, read_manifest

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
PEERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama 3 tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=16, rms_norm_eps=1e-5)
    ),
    "llama linear": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LINEAR)),
    "mistral window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=7)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen 2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters=YARN)),
    "qwen 2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen 3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN)),
    "qwen 3 tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
}
RANKS = {
    "one rank": (1, {}),
    "2 fsdp": (2, {"dp_shard_size": 2}),
    "2 tp": (2, {"tp_size": 2}),
    "2 cp": (2, {"cp_size": 2}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family as transformers saves it, with random weights; some in several files."""
    torch.manual_seed(0)
    found = {}
    for index, (name, build) in enumerate(PEERS.items()):
        peer = build()
        with torch.no_grad():
            for value in peer.parameters():
                if value.ndim == 1:  # norms and biases, which begin alike
                    value.add_(torch.randn_like(value) / 3)
        found[name] = tmp_path_factory.mktemp("model")
        peer.save_pretrained(found[name], max_shard_size="10KB" if index % 2 else "1GB")
    return found


@pytest.mark.parametrize("name", PEERS)
def test_an_imported_model_equals_transformers(ranks: Pools, folders: dict[str, Path], name: str) -> None:
    logits, gradients = ranks(1).run(facts, config_of(folders[name]))[0]
    peer = AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager")
    batch = random_batches(0, sequences=1)
    tokens, labels = (torch.from_numpy(array.astype(np.int64)) for array in (batch.tokens, batch.labels))
    found = peer(input_ids=tokens).logits
    torch.testing.assert_close(logits, found.detach(), **TOLERANCE)
    torch.nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten()).backward()
    theirs = {key: value.grad for key, value in peer.named_parameters()}
    assert gradients.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(gradients[key], value, **TOLERANCE)


@pytest.mark.parametrize("kind", RANKS)
@pytest.mark.parametrize("name", ["llama 3 tied", "qwen 2", "qwen 3"])
def test_every_rank_reads_its_part(ranks: Pools, folders: dict[str, Path], name: str, kind: str) -> None:
    world_size, parallel = RANKS[kind]
    attention = {"preset": "ring"} if "cp_size" in parallel else {}
    config = config_of(folders[name], parallel=parallel, attention=attention)
    expected = dict(AutoModelForCausalLM.from_pretrained(folders[name]).named_parameters())
    for found in ranks(world_size).run(imported_weights, config):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", PEERS)
def test_an_exported_model_has_our_logits_in_transformers(
    ranks: Pools, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    world_size = 2 if "tied" in name else 1
    config = config_of(folders[name], parallel={"dp_shard_size": world_size})
    logits = ranks(world_size).run(train_and_save, config, str(tmp_path / "checkpoints"))[0]
    saved = tmp_path / "checkpoints" / "step-00000005"
    order = ExportOrder(saved, config, tmp_path / "out", dtype="float32", file_bytes=10_000)
    manifest, seen = read_manifest(saved), []
    result = export(order, manifest, seen.append)
    assert sum(seen) == weight_bytes(manifest)
    assert result.files > 1
    assert result.warnings == ()
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert peer.config.model_type == json.loads((folders[name] / "config.json").read_text())["model_type"] or (
        name == "mistral"  # without a window it is a Llama
    )
    tokens = torch.from_numpy(random_batches(0, sequences=1).tokens.astype(np.int64))
    torch.testing.assert_close(logits, peer(input_ids=tokens).logits.detach(), **TOLERANCE)
    again = read_pretrained(tmp_path / "out")
    assert vars(again.model) | {"name": ""} == vars(config.model) | {"name": "", "init_from": None}


def test_bfloat16_is_what_torch_rounds_to() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32)
    wide = np.concatenate([bits.view(np.float32), np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38], np.float32)])
    expected = torch.from_numpy(wide).to(torch.bfloat16)
    found = torch.from_numpy(bfloat16_bits(wide).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(
        found.nan_to_num(0.0, float("inf"), -float("inf")), expected.nan_to_num(0.0, float("inf"), -float("inf"))
    )


@pytest.fixture
def exported(ranks: Pools, folders: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    """A function that exports a checkpoint into a folder of `tmp_path`."""
    config = config_of(folders["llama"])
    ranks(1).run(train_and_save, config, str(tmp_path / "checkpoints"))
    checkpoint = tmp_path / "checkpoints" / "step-00000005"
    manifest = read_manifest(checkpoint)
    return lambda name, **how: export(ExportOrder(checkpoint, config, tmp_path / name, **how), manifest)


def test_export_in_bf16_is_rounded_float32_in_one_file(exported: Callable[..., Any], tmp_path: Path) -> None:
    wide, narrow = exported("wide", dtype="float32"), exported("narrow")
    assert narrow.files == 1
    assert narrow.bytes == wide.bytes // 2
    whole, rounded = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("wide", "narrow")
    )
    assert rounded.dtype == torch.bfloat16
    for (name, value), (_, other) in zip(whole.named_parameters(), rounded.named_parameters(), strict=True):
        assert torch.equal(value.to(torch.bfloat16), other), name


def test_export_into_an_existing_folder_is_refused(exported: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists; export writes a new folder"):
        exported("there")


def test_failed_export_leaves_no_files(exported: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000005" / "rank00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank00000\.safetensors cannot be read"):
        exported("out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_another_shape_is_refused_before_anything_is_read(ranks: Pools, folders: dict[str, Path]) -> None:
    config = tiny_config(model={"init_from": str(folders["qwen 2"]), "vocab_size": 65})
    with pytest.raises(RankFailedError, match=r"holds another model: model\.vocab_size is 65, in the folder 64"):
        ranks(1).run(imported_weights, config)

"""Which decoders of transformers the trainer takes, and what it names of those that it refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from testkit.hub_models import FAMILIES, hf_config, hub_config, reference_model, shape_of
from testkit.model_helpers import causal_attention

from engine.activations.checkpointed import apply_policies
from engine.activations.layer_call import LayerExecution
from engine.activations.store import DeviceStore
from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, CheckpointKind
from engine.hugging_face.decoder import HuggingFaceDecoder
from engine.hugging_face.head import logits_scale
from engine.model.decoder import persistent_buffers
from engine.model.init import init_weights
from engine.parallel.parallelize import build_decoder
from engine.planning.checkpoint_policy import LayerPolicy


def refused(family: str, **changes: Any) -> str:
    """The message with which a tiny model of a family is refused."""
    with pytest.raises(ConfigError) as error:
        HuggingFaceDecoder(shape_of(hf_config(family, **changes)))
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_built_without_memory(family: str) -> None:
    decoder = HuggingFaceDecoder(shape_of(hf_config(family)))
    assert {parameter.device.type for parameter in decoder.parameters()} == {"meta"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "granite"])
def test_parameters_have_the_names_of_transformers(family: str) -> None:
    document = hf_config(family)
    names = [name for name, _ in HuggingFaceDecoder(shape_of(document)).named_parameters()]
    assert sorted(names) == sorted(name for name, _ in reference_model(document).named_parameters())


@pytest.mark.parametrize(
    ("family", "changes", "scale"),
    [("granite", {"logits_scaling": 8.0}, 1 / 8), ("cohere2", {"logit_scale": 0.0625}, 0.0625), ("llama", {}, 1.0)],
)
def test_factor_of_the_logits_is_found_by_values(family: str, changes: dict[str, Any], scale: float) -> None:
    assert logits_scale(reference_model(hf_config(family, **changes)), "model", "lm_head") == pytest.approx(scale)


def test_cap_on_logits_is_refused() -> None:
    model = reference_model(hf_config("gemma3_text", final_logit_softcapping=30.0))
    with pytest.raises(ConfigError, match="more than a constant factor"):
        logits_scale(model, "model", "lm_head")


def test_functional_dropout_is_refused() -> None:
    assert "draws random numbers in training" in refused("seed_oss", residual_dropout=0.1)


def test_attention_dropout_is_refused() -> None:
    assert "attention_dropout is 0.1" in refused("qwen3", attention_dropout=0.1)


def test_unknown_family_is_refused_by_its_name() -> None:
    document = {**hf_config("llama"), "model_type": "llama99"}
    with pytest.raises(ConfigError, match="cannot build llama99"):
        HuggingFaceDecoder(shape_of(document))


@pytest.mark.parametrize(("setting", "value"), [("vocab_size", 65), ("num_heads", 8), ("tie_embeddings", False)])
def test_shape_that_is_not_that_of_hf_config_is_refused(setting: str, value: Any) -> None:
    shape = replace(shape_of(hf_config("qwen3")), **{setting: value})
    with pytest.raises(ConfigError, match=re.escape(setting)):
        HuggingFaceDecoder(shape)


def test_windows_that_are_not_those_of_the_model_are_refused() -> None:
    config = hub_config("gemma3_text")
    with pytest.raises(ConfigError, match=r"layer 0 has causal, but by .* a sliding window of 6 tokens"):
        build_decoder(replace(config, attention=AttentionConfig()))


def test_initial_weights_have_the_spread_of_transformers() -> None:
    document = hf_config("qwen3_moe", vocab_size=2000, initializer_range=0.05)
    decoder = HuggingFaceDecoder(shape_of(document))
    decoder.to_empty(device="cpu")
    init_weights(decoder, seed=1)
    torch.manual_seed(1)
    expected = dict(reference_model(document).named_parameters())
    for name, parameter in decoder.named_parameters():
        error = 6 / math.sqrt(parameter.numel())  # six standard errors of the difference of two standard deviations
        assert parameter.std().item() == pytest.approx(expected[name].std().item(), rel=error), name


def test_buffers_are_those_of_transformers() -> None:
    document = hf_config("gemma3_text")
    decoder = HuggingFaceDecoder(shape_of(document))
    decoder.to_empty(device="cpu")
    decoder.fill_buffers(torch.device("cpu"))
    for name, buffer in reference_model(document).named_buffers():
        assert torch.equal(dict(decoder.named_buffers())[name], buffer), name


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("family", ["qwen3", "granite", "glm4_moe"])
def test_loss_on_one_device_is_that_of_transformers(family: str, policy: CheckpointKind) -> None:
    document = hf_config(family)
    decoder = HuggingFaceDecoder(shape_of(document))
    apply_policies(decoder, [LayerExecution(LayerPolicy(policy), DeviceStore())] * len(decoder.layers))
    decoder.to_empty(device="cpu")
    decoder.fill_buffers(torch.device("cpu"))
    init_weights(decoder, seed=1)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    loss = decoder.head(decoder(tokens, torch.arange(12), causal_attention(12)), tokens)
    loss.backward()
    model = reference_model(document, {**dict(decoder.named_parameters()), **persistent_buffers(decoder)})
    logits = model(input_ids=tokens, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = dict(decoder.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name].grad, parameter.grad, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "minimax_m2"])
def test_load_of_experts_counts_the_rows_that_each_computes(family: str) -> None:
    decoder = HuggingFaceDecoder(shape_of(hf_config(family)))
    apply_policies(decoder, [LayerExecution(LayerPolicy("none"), DeviceStore())] * len(decoder.layers))
    decoder.to_empty(device="cpu")
    decoder.fill_buffers(torch.device("cpu"))
    init_weights(decoder, seed=1)
    for name, buffer in decoder.named_buffers():
        if "correction_bias" in name:  # which makes the choice another than that of the largest probabilities
            buffer.copy_(torch.arange(len(buffer)) % 3)
    chosen: list[torch.Tensor] = []
    for layer in decoder.layers:
        for router in (module for name, module in layer.named_modules() if name.endswith(("gate", "router"))):
            router.register_forward_hook(lambda _module, _args, output: chosen.append(output[2].flatten()))
    routing = decoder.routing(torch.ones(12, dtype=torch.bool))
    assert routing is not None
    decoder(torch.arange(12)[None], torch.arange(12), causal_attention(12), routing=routing)
    assert routing.counts.tolist() == [each.bincount(minlength=routing.counts.shape[1]).tolist() for each in chosen]


def saved_folder(family: str, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> HuggingFaceDecoder:
    """A decoder on the CPU, beside a folder of its weights that `change` has damaged."""
    document = hf_config(family)
    reference_model(document).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    decoder = HuggingFaceDecoder(shape_of(document))
    decoder.to_empty(device="cpu")
    return decoder


def test_weights_of_integers_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    decoder = saved_folder("qwen3", tmp_path, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} has dtype I8"):
        decoder.load(tmp_path)


def test_a_folder_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    decoder = saved_folder("qwen3_moe", tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=r"experts.gate_up_proj cannot be made of 7 weights of the folder"):
        decoder.load(tmp_path)


def test_decay_of_linear_layers_is_drawn_as_transformers_does() -> None:
    decoder = HuggingFaceDecoder(shape_of(hf_config("qwen3_next", linear_num_value_heads=64)))
    decoder.to_empty(device="cpu")
    init_weights(decoder, seed=1)
    values = decoder.get_parameter("model.layers.0.linear_attn.A_log").detach().exp()
    assert 0.01 <= float(values.min()) < 2.0 < 12.0 < float(values.max()) <= 16.0, "expected uniform in [0.01, 16]"


def test_masks_that_give_attention_to_linear_layers_are_refused() -> None:
    config = replace(hub_config("lfm2"), attention=AttentionConfig())
    with pytest.raises(ConfigError, match="config no attention"):
        build_decoder(config)


def test_sequences_longer_than_the_learned_positions_are_refused() -> None:
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "tie_word_embeddings": True}
    document = {"model_type": "gpt2", **sizes, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    config = replace(hub_config("qwen3", train={"seq_len": 256}), model=shape_of(document))
    with pytest.raises(ConfigError, match=r"train.seq_len=256 exceeds the \d+ learned positions of the model \(wpe\)"):
        build_decoder(config)


def test_a_key_that_was_removed_from_hf_config_is_noticed(tmp_path: Path) -> None:
    document = hf_config("granite", logits_scaling=4.0)
    reference_model(document).save_pretrained(tmp_path)
    decoder = HuggingFaceDecoder(shape_of({key: value for key, value in document.items() if key != "logits_scaling"}))
    decoder.to_empty(device="cpu")
    with pytest.raises(ConfigError, match=r"logits_scaling is 1.0, in the folder 4.0"):
        decoder.load(tmp_path)

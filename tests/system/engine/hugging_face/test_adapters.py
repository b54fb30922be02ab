"""Adapters on frozen models of transformers: gradients, checkpoints and exports are those of peft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from testkit.hub_models import Facts, document_of, hub_config, randomise_adapters, reference_model
from testkit.hub_runs import losses_and_weights
from testkit.ranks import Pools
from testkit.tiny_training import accumulated, full_weights, own_part, random_batches, start_run, whole

from engine.checkpoint.state import frozen_digest
from engine.config.model_parts import LoraConfig
from engine.config.settings import RunConfig
from engine.data.sampler import IGNORE_INDEX
from engine.export.hugging_face import ExportOrder, export
from engine.runs.checkpoints import read_manifest

# peft asks transformers by a name that the next version of transformers drops.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.thorough,  # every worker imports transformers, which takes seconds
]
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CASES: dict[str, tuple[str, LoraConfig]] = {
    "lora": ("qwen3", LoraConfig(rank=4, alpha=8.0)),
    "dora": ("llama", LoraConfig(rank=2, dora=True, target_modules=("q_proj", "v_proj"))),
    "experts": ("qwen3_moe", LoraConfig(rank=4, target_modules=("q_proj",), target_parameters=EXPERTS)),
}


def adapted_config(case: str, base: Path, **sections: Any) -> RunConfig:
    """A run that trains adapters on the model in `base`, which it saves there first if it is not there."""
    family, lora = CASES[case]
    config = hub_config(family, attention={"preset": "burst"}, parallel={"cp_size": 2}, **sections)
    if not base.exists():
        torch.manual_seed(1)
        reference_model(document_of(config)).save_pretrained(base)
    return replace(config, model=replace(config.model, lora=lora, init_from=str(base)))


def with_peft(config: RunConfig, weights: dict[str, torch.Tensor]) -> Any:
    """peft's model in one process, with these weights."""
    lora = config.model.lora
    modules = list(lora.target_modules)
    stated = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=modules[0] if modules == ["all-linear"] else modules,
        target_parameters=list(lora.target_parameters) or None,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(reference_model(document_of(config)), stated)
    model.base_model.model.load_state_dict(weights, strict=False)
    return model


def adapter_facts(config: RunConfig) -> Facts:
    """Facts of one step of the trainer, with random adapters."""
    run = start_run(config)
    randomise_adapters(run.model)
    weights = full_weights(run.model)
    loss, labels = accumulated(run, own_part(random_batches(0, sequences=1, ignored=(3,)), run.mesh))
    gradients = {name: whole(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}
    return Facts(weights, loss.item() / labels, gradients)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_adapters_are_those_of_peft(ranks: Pools, tmp_path: Path, case: str) -> None:
    config = adapted_config(case, tmp_path / "base", memory={"activation_checkpoint": "attn_out"})
    found = ranks(2).run(adapter_facts, config)[0]
    model = with_peft(config, found.weights)
    batch = random_batches(0, sequences=1, ignored=(3,))
    out = model(input_ids=torch.from_numpy(batch.tokens), use_cache=False)
    labels, document = torch.from_numpy(batch.labels).flatten(), document_of(config)
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels, ignore_index=IGNORE_INDEX)
    if document.get("output_router_logits"):
        loss = loss + document["router_aux_loss_coef"] * out.aux_loss
    loss.backward()
    expected = {
        name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    assert found.gradients.keys() == expected.keys(), "parameters with a gradient"
    for name, gradient in expected.items():
        error = ((found.gradients[name] - gradient).norm() / gradient.norm()).item()
        assert error < 1e-5, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_has_adapters_alone(ranks: Pools, tmp_path: Path, case: str) -> None:
    config = adapted_config(case, tmp_path / "base", train={"micro_batch_size": 2})
    ranks(2).run(losses_and_weights, config, range(1), str(tmp_path / "checkpoints"), False, True)
    names = read_manifest(tmp_path / "checkpoints" / "step-00000001").tensors
    assert all(".lora_" in name for name in names), sorted(names)


@pytest.mark.parametrize("case", CASES)
def test_adapters_trained_on_two_ranks_resume_on_four(ranks: Pools, tmp_path: Path, case: str) -> None:
    config = adapted_config(case, tmp_path / "base", train={"micro_batch_size": 2})
    on_four = replace(config, parallel=replace(config.parallel, cp_size=4))
    whole_run, _ = ranks(2).run(losses_and_weights, config, range(4), str(tmp_path / "whole"), False, False)[0]
    root = str(tmp_path / "checkpoints")
    ranks(2).run(losses_and_weights, config, range(2), root, False, True)
    resumed, _ = ranks(4).run(losses_and_weights, on_four, range(2, 4), root, True, False)[0]
    assert resumed == pytest.approx(whole_run[2:], rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_exported_adapters(ranks: Pools, tmp_path: Path, case: str) -> None:
    config = adapted_config(case, tmp_path / "base", train={"micro_batch_size": 2})
    root = tmp_path / "checkpoints"
    _, weights = ranks(2).run(losses_and_weights, config, range(3), str(root), False, True)[0]
    checkpoint = root / "step-00000003"
    export(ExportOrder(checkpoint, config, tmp_path / "out", "float32"), read_manifest(checkpoint))
    loaded = peft.PeftModel.from_pretrained(reference_model_of(tmp_path / "base"), str(tmp_path / "out")).eval()
    tokens = torch.from_numpy(random_batches(0, sequences=1).tokens)
    with torch.no_grad():
        expected = with_peft(config, weights).eval()(input_ids=tokens).logits
        assert torch.allclose(loaded(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)


def reference_model_of(folder: Path) -> Any:
    """The model of a folder, loaded by transformers."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def digest_of(config: RunConfig) -> str:
    """Digest of the frozen weights of a run."""
    return frozen_digest(start_run(config).model)


def test_digest_of_frozen_weights_is_that_of_the_base_on_any_ranks(ranks: Pools, tmp_path: Path) -> None:
    config = adapted_config("lora", tmp_path / "base")
    replicas: Any = replace(config.parallel, cp_size=2, dp_replicate_size=2)
    found = {
        *ranks(2).run(digest_of, config),
        *ranks(4).run(digest_of, replace(config, parallel=replace(config.parallel, cp_size=4))),
        *ranks(4).run(digest_of, replace(config, parallel=replicas)),
    }
    assert len(found) == 1, found
    other = replace(config, seed=7, model=replace(config.model, init_from=None))
    assert ranks(2).run(digest_of, other)[0] not in found, "another base has the same digest"

"""Runs of transformers' decoders: trained like transformers' own loop, killed, resumed on other ranks, exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testkit.hub_models import document_of, hub_config, reference_model
from testkit.hub_runs import losses_and_weights
from testkit.ranks import Pools
from testkit.tiny_training import full_weights, random_batches, start_run

from engine.config.settings import RunConfig
from engine.data.sampler import IGNORE_INDEX
from engine.export.hugging_face import ExportOrder, export
from engine.runs.checkpoints import read_manifest

pytestmark = pytest.mark.thorough  # every worker imports transformers, which takes seconds
STEPS = 20
HALF = 10


def transformers_losses(config: RunConfig, weights: dict[str, torch.Tensor]) -> list[float]:
    """Losses of transformers' model in one process under torch's AdamW, with the same batches and clipping."""
    document, optimizer = document_of(config), config.optimizer
    model = reference_model(document, weights)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=(optimizer.beta1, optimizer.beta2), eps=1e-8)
    losses = []
    for step in range(STEPS):
        batch = random_batches(step, sequences=2)
        tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
        out = model(input_ids=tokens, use_cache=False)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        auxiliary = document["router_aux_loss_coef"] * out.aux_loss if document.get("output_router_logits") else 0.0
        (loss + auxiliary).backward()
        assert optimizer.max_grad_norm is not None
        torch.nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


def first_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """Initial weights, which depend on the seed alone."""
    return full_weights(start_run(config).model)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3_text", "glm4_moe"])
def test_resumed_on_other_ranks_a_run_has_the_losses_of_transformers_loop(
    ranks: Pools, tmp_path: Path, family: str
) -> None:
    sections: dict[str, Any] = {"train": {"micro_batch_size": 2}, "memory": {"activation_checkpoint": "attn_out"}}
    on_two = hub_config(family, attention={"preset": "burst"}, parallel={"cp_size": 2}, **sections)
    on_four = hub_config(family, attention={"preset": "ring"}, parallel={"cp_size": 4}, **sections)
    single = hub_config(family, **sections)
    expected = transformers_losses(on_two, ranks(1).run(first_weights, single)[0])
    root = str(tmp_path / "checkpoints")
    first, _ = ranks(2).run(losses_and_weights, on_two, range(HALF), root, False, True)[0]
    second, _ = ranks(4).run(losses_and_weights, on_four, range(HALF, STEPS), root, True, False)[0]
    assert [*first, *second] == pytest.approx(expected, rel=2e-4)  # AdamW divides by small second moments
    assert expected[-1] < expected[0] - 0.1, "the oracle did not learn"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "cohere2"])
def test_exported_model_has_the_logits_of_the_run(ranks: Pools, tmp_path: Path, family: str) -> None:
    import transformers

    config = hub_config(family, attention={"preset": "burst"}, parallel={"cp_size": 2}, train={"micro_batch_size": 2})
    root = tmp_path / "checkpoints"
    _, weights = ranks(2).run(losses_and_weights, config, range(2), str(root), False, True)[0]
    checkpoint = root / "step-00000002"
    export(ExportOrder(checkpoint, config, tmp_path / "out", "float32"), read_manifest(checkpoint))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.from_numpy(random_batches(0, sequences=1).tokens)
    with torch.no_grad():
        expected = reference_model(document_of(config), weights).eval()(input_ids=tokens).logits
        assert torch.allclose(loaded.eval()(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "mixtral", "granitemoe"])
def test_weights_saved_by_transformers_are_read_by_every_rank(ranks: Pools, tmp_path: Path, family: str) -> None:
    config = hub_config(family, attention={"preset": "burst"}, parallel={"cp_size": 2})
    torch.manual_seed(1)
    model = reference_model(document_of(config))
    model.save_pretrained(tmp_path / "model")
    model_config = replace(config.model, init_from=str(tmp_path / "model"))
    found = ranks(2).run(first_weights, replace(config, model=model_config))[0]
    expected = {name: value for name, value in model.state_dict().items() if name in found}
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, value in found.items():
        assert torch.equal(value, expected[name]), f"{name} was read wrongly"

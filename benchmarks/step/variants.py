"""The variants: the same training step by this engine under a policy of memory, and by transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory.cell import read_memory
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.schema import JsonObject
from engine.config.settings import Dtype, LossConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from engine.resolve.legality import check_run

OURS = "burst"
HUB = "hf"  # this engine with the model's code of transformers
REFERENCE = "transformers"
CHECKPOINT_REFERENCE = "transformers_checkpoint"
PEERS = {
    REFERENCE: "LlamaForCausalLM, SDPA, fp32 weights under autocast",
    CHECKPOINT_REFERENCE: "the same with its own gradient checkpointing (non-reentrant)",
    "transformers_cast": "LlamaForCausalLM, SDPA, weights and AdamW state in --dtype (no master weights)",
}
SEED = 0

Step = Callable[[], float]  # one training step; returns its loss


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: ModelConfig
    seq_len: int
    dtype: Dtype
    threads: int
    device: str

    def run_config(self, variant: str) -> RunConfig:
        """The engine's configuration of burst, hf (policy none) or NAME:POLICY[:FIELD=VALUE]...; ConfigError if bad."""
        name, _, policy = variant.partition(":")
        config = RunConfig(
            seed=SEED,
            model=self.hub_model() if name == HUB else self.model,
            memory=read_memory(policy or "none"),
            loss=LossConfig(),
            optimizer=OptimizerConfig(schedule="constant"),
            train=TrainConfig(seq_len=self.seq_len, compute_dtype=self.dtype),
            cluster=ClusterConfig(backend="gloo" if self.device == "cpu" else "nccl"),
        )
        check_run(config)
        return config

    def hub_model(self) -> ModelConfig:
        """The same shape, computed by transformers' code."""
        return replace(self.model, implementation="hf", hf_config=JsonObject(llama_config(self).to_diff_dict()))

    def tokens(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[1, seq_len] random tokens, the same for every variant."""
        return np.random.default_rng(SEED).integers(0, self.model.vocab_size, (1, self.seq_len))


def is_ours(variant: str) -> bool:
    """Whether this engine runs the variant."""
    return variant.partition(":")[0] in (OURS, HUB)


def check_variant(variant: str, case: Case) -> None:
    """Raise ConfigError for what cannot be built, before anything is measured."""
    if is_ours(variant):
        case.run_config(variant)
    elif variant not in PEERS:
        raise ConfigError(
            f"--variants: unknown {variant}; legal are {', '.join((*PEERS, OURS, HUB))}, the last two with a policy, too, "
            f"as in {OURS}:attn_out:tile_tokens=1024"
        )


def describe(variant: str) -> str:
    """What a variant is, in words."""
    name, _, policy = variant.partition(":")
    code = " with transformers' LlamaForCausalLM" if name == HUB else ""
    return PEERS.get(variant, f"this engine{code}, memory policy {policy or 'none'}")


def build(variant: str, case: Case) -> tuple[Step, Any, Any]:
    """(step, model, optimizer) of a variant."""
    if is_ours(variant):
        return build_burst(variant, case)
    return build_transformers(case, checkpoint=variant == CHECKPOINT_REFERENCE, cast=variant == "transformers_cast")


def build_burst(variant: str, case: Case) -> tuple[Step, Any, Any]:
    """(step, model, optimizer) of this engine on a group of one rank."""
    from engine.attention.library import resolve_here
    from engine.data.sampler import Batch
    from engine.distributed.mesh import build_mesh, choose_device, read_placement, start_process_group
    from engine.parallel.parallelize import build_model
    from engine.training.train_step import TrainStep

    config = case.run_config(variant)
    placement = read_placement({})
    start_process_group(choose_device(config.cluster, placement), placement)
    mesh = build_mesh(config.parallel, config.cluster)
    model, attention = build_model(resolve_here(config, mesh), mesh)
    if variant.partition(":")[0] == HUB:
        with tempfile.TemporaryDirectory() as folder:
            initial_transformers(case).save_pretrained(folder)
            model.load(Path(folder))
    train_step = TrainStep(config, mesh, model, attention)
    tokens = case.tokens()
    labels = np.concatenate([tokens[:, 1:], [[-100]]], axis=1)
    batch = Batch(tokens, labels, (np.zeros(1, dtype=np.int64),))
    return lambda: train_step(0, [batch]).loss, model, train_step.optimizer


def build_transformers(case: Case, *, checkpoint: bool, cast: bool) -> tuple[Step, Any, Any]:
    """(step, model, optimizer) of transformers with the engine's initial weights and optimizer settings."""
    from engine.optim.adamw import build_optimizer

    model = initial_transformers(case).train()
    dtype = getattr(torch, case.dtype)
    model.to(device=case.device, dtype=dtype if cast else torch.float32)
    if checkpoint:
        enable_checkpointing(model)
    config = case.run_config(OURS).optimizer
    optimizer = build_optimizer(model, config)
    tokens = torch.from_numpy(case.tokens()).to(case.device)
    autocast = nullcontext() if cast or dtype == torch.float32 else torch.autocast(case.device, dtype)

    def step() -> float:
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step, model, optimizer


def initial_transformers(case: Case) -> Any:
    """LlamaForCausalLM with the weights with which the engine starts."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config(case))
    copy_initial_weights(case.model, model)
    return model


def llama_config(case: Case) -> Any:
    """The case's model as transformers describes it, with SDPA."""
    from transformers import LlamaConfig

    shape = case.model
    settings = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=case.seq_len,
        use_cache=False,
    )
    settings._attn_implementation = "sdpa"
    return settings


def enable_checkpointing(model: Any) -> None:
    """Turns transformers' gradient checkpointing on; its newer releases call it activation checkpointing."""
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def copy_initial_weights(shape: ModelConfig, target: Any) -> None:
    """Gives transformers' model the weights with which the engine starts."""
    from engine.model.init import init_weights
    from engine.model.llama import LlamaModel

    source = LlamaModel(shape)
    init_weights(source, SEED)
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, weight in source.named_parameters():
            kind, _, rest = name.partition(".")
            prefix = {"embedding": "model.embed_tokens", "head": "lm_head"}.get(kind, f"model.{kind}")
            parameters[f"{prefix}.{rest}"].copy_(weight)

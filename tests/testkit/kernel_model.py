"""A small model's loss and gradients, with whatever kernels the process has."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.activations.checkpointed import apply_policies
from engine.activations.layer_call import LayerExecution
from engine.activations.store import DeviceStore
from engine.attention.context import AttentionGroup, build_context
from engine.attention.transport import DistributedTransport
from engine.config.settings import LossConfig, ModelConfig
from engine.kernels.attention.reference import ReferenceKernel
from engine.model.dropout import Dropout, row_keys
from engine.model.init import init_weights
from engine.model.llama import LlamaModel
from engine.planning.checkpoint_policy import LayerPolicy
from engine.planning.methods.layers import LayerAttention
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask

TOKENS = 12
MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    ffn_hidden_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    qk_norm=True,
    init_std=0.3,
)
# Chunks of keys of their own, so that tiles are merged.
METHOD = AttentionMethod("fpdt", "chunk_cyclic", 1, 1, "kv", "float32", chunk_tokens=5, chunk_store="host")


def loss_and_gradients(device: str, tile_tokens: int | None, dropout: float) -> dict[str, Tensor]:
    """Float64, on the CPU: the loss and every parameter's gradient; `tile_tokens` None: autograd keeps everything."""
    model = LlamaModel(MODEL, LossConfig(chunk_tokens=7, z_loss=0.01)).to(device, torch.float64)
    init_weights(model, 0)
    if tile_tokens is not None:
        execution = LayerExecution(LayerPolicy("attn_out"), DeviceStore(), tile_tokens)
        apply_policies(model, [execution] * MODEL.num_layers)
    group = AttentionGroup(0, Topology(1, 1), DistributedTransport({}, (0,), Topology(1, 1), 0), ReferenceKernel())
    context = build_context(group, [LayerAttention(Mask(TOKENS), METHOD)], TOKENS)
    positions = torch.from_numpy(context.layout.positions(0)).to(device)
    tokens = torch.arange(2 * TOKENS, device=device).view(2, TOKENS) * 37 % MODEL.vocab_size
    keys = None if dropout == 0 else Dropout(dropout, row_keys(3, [5, 6], positions))
    hidden = model(tokens[:, positions], positions, context.functions(MODEL.num_layers), keys)
    loss = model.head(hidden, tokens.roll(-1, 1)[:, positions])
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach().cpu()} | {name: x.cpu() for name, x in found.items() if x is not None}

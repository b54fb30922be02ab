"""What layers really keep, and what they never make: bytes in the store, FLOPs in backward, sizes of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from testkit.operations import Operations
from testkit.ranks import Pools
from testkit.resolved import method_of
from testkit.tiny_training import loss_of, mesh_of, own_part, random_batches, start_run, tiny_config
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from engine.activations.checkpointed import apply_policies
from engine.activations.store import DeviceStore, SavedTensors
from engine.attention.library import ContextParallel, resolve_here
from engine.config.settings import ModelConfig, RunConfig
from engine.model.init import init_weights
from engine.model.llama import LlamaModel
from engine.parallel.parallelize import layer_executions
from engine.planning.topology import Topology
from engine.predict.policy_cost import policy_cost
from engine.training.train_step import rank_batch

MODEL = ModelConfig(
    name="test",
    vocab_size=1000,
    hidden_size=32,
    ffn_hidden_size=900,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
SEQ_LEN = 512
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpoint": "full"},
    "attn_out": {"activation_checkpoint": "attn_out"},
    "rho 0.25": {"activation_checkpoint": "seq_fraction", "saved_fraction": 0.25},
    "rho 0.5": {"activation_checkpoint": "seq_fraction", "saved_fraction": 0.5},
    "every 2": {"activation_checkpoint": "attn_out_every", "every_layers": 2},
    "layers": {"checkpoint_layers": ("full", "attn_out", "attn_out_every", "attn_out_every", "seq_fraction")},
}


class CountingStore:
    """A DeviceStore that remembers how much it was given."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._store = DeviceStore()

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        kept = self._store.save(tensors)
        self.kept_bytes += sum(tensor.untyped_storage().nbytes() for tensor in kept.fetch())
        return kept


def config_of(preset: str, memory: dict[str, Any], **attention: Any) -> RunConfig:
    return tiny_config(
        model=MODEL,
        attention={"preset": preset, **attention},
        memory=memory,
        train={"seq_len": SEQ_LEN},
        parallel={"cp_size": 1 if preset == "single" else 4},
    )


def kept_bytes(config: RunConfig) -> int:
    """Bytes in the store of this rank between forward and backward, whole model in bf16."""
    mesh = mesh_of(config.parallel, config.cluster)
    attention = ContextParallel.of_run(resolve_here(config, mesh), mesh)
    model = LlamaModel(config.model, config.loss)
    init_weights(model, 0)
    model.to(torch.bfloat16)
    store = CountingStore()
    executions = [replace(execution, store=store) for execution in layer_executions(config, attention.method, mesh)]
    apply_policies(model, executions)
    (batch,) = own_part(random_batches(0, sequences=1, seq_len=config.train.seq_len), mesh)
    local = rank_batch(batch, model, attention, mesh)
    loss_of(model, local).backward()
    return store.kept_bytes


@pytest.mark.parametrize(
    ("preset", "names"),
    [("burst", [*POLICIES]), ("loongtrain", ["attn_out", "every 2"]), ("ring", ["rho 0.25", "layers"])],
    ids=["burst", "loongtrain", "ring"],
)
def test_saved_bytes_equal_the_documented_table(ranks: Pools, preset: str, names: list[str]) -> None:
    for name in names:
        # A ring of contiguous blocks: the ranks with the end of the sequence keep most of it.
        config = config_of(preset, POLICIES[name], **({"layout": "contiguous"} if preset == "ring" else {}))
        config = replace(config, train=replace(config.train, seq_len=128, compute_dtype="bfloat16"))
        expected = policy_cost(config, method_of(config, Topology(1, 4))).saved_bytes
        assert max(ranks(4).run(kept_bytes, config)) == expected, name


def largest_tensor(config: RunConfig) -> int:
    """The most elements of any tensor that an operation makes."""
    elements: list[int] = []

    def see(func: Any, args: Any, result: Any) -> None:
        made = result if isinstance(result, (tuple, list)) else [result]
        elements.extend(x.numel() for x in made if isinstance(x, Tensor))

    run = start_run(config)
    batches = own_part(random_batches(0, sequences=1, seq_len=SEQ_LEN), run.mesh)
    with Operations(see):
        run.train_step(0, batches)
    return max(elements)


@pytest.mark.parametrize("policy", ["none", "full", "attn_out", "seq_fraction", "attn_out_every"])
@pytest.mark.thorough_for("full", "attn_out", "seq_fraction")
def test_with_tiles_nothing_has_as_many_elements_as_rows_times_ffn_or_vocabulary(ranks: Pools, policy: str) -> None:
    whole = SEQ_LEN * MODEL.ffn_hidden_size  # and more for the vocabulary
    tiled = config_of("single", {"activation_checkpoint": policy, "tile_tokens": 32})
    (largest,) = ranks(1).run(largest_tensor, tiled)
    assert largest < whole / 4  # all weights of a layer, which FSDP gathers in one piece
    (untiled,) = ranks(1).run(largest_tensor, config_of("single", {"activation_checkpoint": policy}))
    assert untiled >= whole


def matmul_flops(config: RunConfig) -> int:
    """FLOPs that torch counts in one forward and backward pass; the reference kernel's tiles included.

    Its own counter follows modules by hooks, which ask for a graph everywhere.
    """
    counted: list[int] = []

    def see(func: Any, args: Any, result: Any) -> None:
        if func._overloadpacket in flop_registry:
            counted.append(flop_registry[func._overloadpacket](*args, out_val=result))

    run = start_run(replace(config, attention=replace(config.attention, kernel="reference")))
    (batch,) = own_part(random_batches(0, sequences=1, seq_len=SEQ_LEN), run.mesh)
    local = rank_batch(batch, run.model, run.attention, run.mesh)
    with Operations(see):
        loss_of(run.model, local).backward()
    return sum(counted)


@pytest.mark.parametrize("name", ["attn_out", "every 2"])
def test_recomputed_products_equal_the_counted_ones(ranks: Pools, name: str) -> None:
    """The counter sees all products, so a single one of attention's would show."""
    config = config_of("single", POLICIES[name])
    method = method_of(config, Topology(1, 1))
    again = sum(policy_cost(config, method).layer_matrices)
    (kept,) = ranks(1).run(matmul_flops, config_of("single", {"activation_checkpoint": "none"}))
    (found,) = ranks(1).run(matmul_flops, config)
    assert found - kept == 2 * again * SEQ_LEN

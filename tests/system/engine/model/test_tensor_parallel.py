"""Tensor and sequence parallel ranks: float64 gradients and weights, messages, slices.

That they train as one rank is shown by training/test_parity.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from testkit.operations import Operations
from testkit.ranks import Pools
from testkit.tiny_training import TinyRun, own_part, random_batches, start_run, tiny_config

from engine.config.settings import RunConfig
from engine.data.sampler import Batch
from engine.model.rope import rope_table
from engine.parallel.shard import LocalBatch
from engine.training.train_step import rank_batch

SEQ_LEN = 32
SEQUENCES = 2

GQA: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": GQA,
    "mha": {"num_heads": 4, "num_kv_heads": 4},
    "tied": {**GQA, "tie_embeddings": True},
}


def config_of(shape: str, **sections: Any) -> RunConfig:
    train = {"seq_len": SEQ_LEN, **sections.pop("train", {})}
    return tiny_config(model=SHAPES[shape], train=train, **sections)


def own_batch(run: TinyRun, sequences: int = SEQUENCES, ignored: tuple[int, ...] = ()) -> Batch:
    """This rank's rows of the first global batch."""
    return own_part(random_batches(0, sequences=sequences, seq_len=SEQ_LEN, ignored=ignored), run.mesh)[0]


def local_rows(run: TinyRun, batch: Batch) -> LocalBatch:
    return rank_batch(batch, run.model, run.attention, run.mesh).rows


@dataclass
class Sent:
    """A rank's messages: all-gathers and reduce-scatters with the bytes it sends in them, all-reduces beside them."""

    calls: int = 0
    sent_bytes: float = 0.0
    all_reduces: int = 0

    def see(self, func: Any, args: Any, _: Any) -> None:
        """Counts a collective of four ranks, each of which sends its part to all others."""
        name = str(func.overloadpacket)
        self.all_reduces += "all_reduce" in name or "allreduce" in name
        whole_tensor = {"c10d._allgather_base_": 0, "c10d._reduce_scatter_base_": 1}.get(name)
        if whole_tensor is not None:
            self.calls += 1
            self.sent_bytes += args[whole_tensor].nbytes * 3 / 4


def messages_of_the_layers(policy: str, dtype: str) -> list[Sent]:
    """[forward, backward] of the layers alone: embedding and head are left out."""
    sections = {"memory": {"activation_checkpoint": policy}, "train": {"compute_dtype": dtype}}
    run = start_run(config_of("mha", parallel={"tp_size": 4}, **sections))
    local = local_rows(run, own_batch(run, sequences=1))
    hidden = run.model.embedding(local.tokens).detach().requires_grad_()
    cos, sin = rope_table(local.positions, run.model.config.head_dim, run.model.config.rope_theta)
    forward, backward = Sent(), Sent()
    with Operations(forward.see):
        for layer in run.model.layers:
            hidden = layer(hidden, cos, sin, run.attention.run_context())
    with Operations(backward.see):
        hidden.sum().backward()
    return [forward, backward]


@pytest.mark.parametrize(
    ("policy", "backward_times", "dtype"), [("none", 4, "float32"), ("full", 7, "bfloat16")], ids=["none", "full"]
)
def test_a_layer_sends_its_rows_four_times_per_pass(ranks: Pools, policy: str, backward_times: int, dtype: str) -> None:
    layers, rows, width, size = 2, 32, 32, 4
    once = (size - 1) / size * rows * width * {"float32": 4, "bfloat16": 2}[dtype]
    for forward, backward in ranks(size).run(messages_of_the_layers, policy, dtype):
        assert forward == Sent(4 * layers, 4 * layers * once)
        # A recomputed layer stops before its last reduce-scatter, whose result nobody saved.
        messages = backward_times * layers
        assert backward == Sent(messages, messages * once, all_reduces=2 * layers)  # those of the norms' gains


def layer_input_rows(tp_size: int) -> int:
    run = start_run(config_of("gqa", parallel={"tp_size": tp_size}))
    rows = []
    run.model.layers[1].input_layernorm.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    local = local_rows(run, own_batch(run, sequences=1))
    run.model(local.tokens, local.positions, run.attention.run_context())
    return rows[0]


def test_between_layers_a_rank_holds_its_part_of_the_rows(ranks: Pools) -> None:
    assert ranks(4).run(layer_input_rows, 4) == [8] * 4


def local_shapes(tp_size: int) -> dict[str, tuple[int, ...]]:
    run = start_run(config_of("gqa", parallel={"tp_size": tp_size, "cp_size": 1}))
    return {name: tuple(parameter.to_local().shape) for name, parameter in run.model.named_parameters()}


def test_every_matrix_is_sliced(ranks: Pools) -> None:
    one, four = ranks(1).run(local_shapes, 1)[0], ranks(4).run(local_shapes, 4)[3]
    for name, shape in one.items():
        sliced = {1: 1, 2: 4}[len(shape)]
        assert math.prod(four[name]) * sliced == math.prod(shape), name

"""Changing token t changes no logit before t, through the whole model, under every preset and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import random_batches, start_run, tiny_config, whole

from engine.config.settings import AttentionConfig, RunConfig
from engine.parallel.shard import shard_batch

SEQ_LEN = 30
CHANGED = (0, 7, 14, 15, 29)  # first, inside a chunk, both sides of the middle, last

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ring contiguous": (4, {"preset": "ring", "layout": "contiguous"}),
    "ring zigzag": (4, {"preset": "ring", "layout": "zigzag"}),
    "striped on 2": (2, {"preset": "striped"}),
    "burst 2x2 striped": (4, {"preset": "burst", "ring_inner_size": 2, "ring_outer_size": 2, "layout": "striped"}),
    "ulysses": (4, {"preset": "ulysses"}),
    "loongtrain striped": (4, {"preset": "loongtrain", "head_parallel_size": 2, "layout": "striped"}),
    "megatron_cp": (4, {"preset": "megatron_cp"}),
    "megatron_allgather": (4, {"preset": "megatron_allgather"}),
    "burst balanced": (4, {"preset": "burst", "layout": "balanced"}),
    "single": (1, {"preset": "single"}),
}


def local_logits(config: RunConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """(positions, logits) of this rank's rows: for the plain sequence, then for each changed token."""
    run = start_run(config)
    weight = whole(run.model.head.weight)
    results = []
    for changed in (None, *CHANGED):
        batch = random_batches(0, sequences=1)
        if changed is not None:
            batch.tokens[0, changed] = (batch.tokens[0, changed] + 31) % 64
        layout, mesh = run.attention.layout, run.mesh
        local = shard_batch(batch.tokens, batch.labels, layout=layout, cp_rank=mesh.cp_rank, device=mesh.device)
        with torch.no_grad():
            hidden = run.model(local.tokens, local.positions, run.attention)
        results.append((layout.positions(mesh.cp_rank), (hidden[0] @ weight.T).numpy()))
    return results


def in_sequence_order(per_rank: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Logits [seq_len, V] by position, padding cut off."""
    positions = np.concatenate([positions for positions, _ in per_rank])
    logits = np.concatenate([logits for _, logits in per_rank])
    return np.asarray(logits[np.argsort(positions)][:SEQ_LEN])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough_for("ring zigzag", "striped on 2", "ulysses", "megatron_cp")
def test_no_logit_before_a_changed_token_changes(ranks: Pools, name: str) -> None:
    world_size, attention = CASES[name]
    per_rank = ranks(world_size).run(local_logits, tiny_config(attention=AttentionConfig(**attention)))
    plain, *others = [in_sequence_order([results[i] for results in per_rank]) for i in range(1 + len(CHANGED))]
    for changed, logits in zip(CHANGED, others, strict=True):
        assert np.array_equal(logits[:changed], plain[:changed])
        differs = np.abs(logits - plain).max(axis=1) > 0
        assert differs[changed:].all()  # and every later one sees it

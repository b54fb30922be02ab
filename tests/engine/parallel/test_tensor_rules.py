"""Tensor-parallel rules of a configuration: every broken one at once, with the legal values."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import RunConfig, config_from_dict
from engine.config_checks import config_problems, known_cp_size, tensor_parallel_problems

MODEL = {"num_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": 64, "vocab_size": 256}


def config(parallel: dict[str, Any], ranks: int | None, **cluster: Any) -> RunConfig:
    return config_from_dict({"parallel": parallel, "model": MODEL, "cluster": {"ranks_per_node": ranks, **cluster}})


def texts(parallel: dict[str, Any], ranks: int | None, **cluster: Any) -> list[str]:
    return [problem.text for problem in config_problems(config(parallel, ranks, **cluster))]


@pytest.mark.parametrize(
    ("parallel", "ranks", "cp_size"),
    [
        ({}, 4, 4),
        ({"tp_size": 2}, 4, 2),
        ({"tp_size": 4}, 4, 1),
        ({"tp_size": 2, "dp_shard_size": 2}, 4, 1),
        ({"tp_size": 3}, 4, None),
        ({"tp_size": 2}, None, None),
    ],
)
def test_cp_takes_the_ranks_that_tensor_parallelism_leaves(
    parallel: dict[str, Any], ranks: int | None, cp_size: int | None
) -> None:
    assert known_cp_size(config(parallel, ranks)) == cp_size


@pytest.mark.parametrize(
    ("parallel", "ranks"), [({"tp_size": 4}, 4), ({"tp_size": 2}, 2), ({"tp_size": 2, "dp_shard_size": 2}, 4)]
)
def test_legal_degrees_raise_nothing(parallel: dict[str, Any], ranks: int) -> None:
    assert texts(parallel, ranks) == []


def test_every_size_that_cannot_be_sliced_is_listed_with_the_legal_values() -> None:
    model = config({}, 1).model
    problems = tensor_parallel_problems(model, 3)
    assert len(problems) == 4
    assert all("legal values for this model: 1, 2, 4" in text for text in problems)
    assert "pad to model.vocab_size=258" in problems[3]
    assert [text.split("model.")[1].split("=")[0] for text in tensor_parallel_problems(model, 8)] == ["num_kv_heads"]


def test_a_group_that_would_span_nodes_is_refused() -> None:
    (problem,) = texts({"tp_size": 4}, 4, topology_nodes=2)
    assert "does not divide the 2 ranks of a node" in problem
    assert "legal values: 1, 2" in problem


def test_degrees_that_do_not_fit_are_refused_with_their_product() -> None:
    assert "dp_shard_size 1 x tp_size 3 = 3 does not divide the 4 ranks" in texts({"tp_size": 3}, 4)[0]
    assert "cp_size 4 x tp_size 2 = 8, but cluster.ranks_per_node=4" in texts({"tp_size": 2, "cp_size": 4}, 4)[0]

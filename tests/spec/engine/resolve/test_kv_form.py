"""Latents or expanded keys and values: the faster by prediction, what is asked for, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, KvForm, ModelConfig, PresetName, RunConfig, TrainConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.ops import LatentShape, TokenBytes
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask
from engine.predict.machine import find_machine
from engine.resolve.attention import resolve_attention
from engine.resolve.decisions import Decision, Rule
from engine.resolve.kv_form import select_kv_form

NODES = Topology(2, 4)
DEEPSEEK = TokenBytes(num_heads=128, num_kv_heads=128, qk_dim=192, v_dim=128, latent=LatentShape(512, 64))
FREE_LINKS = {"inter_bytes_per_s": 1e15, "intra_bytes_per_s": 1e15}


def select(
    form: KvForm, rates: dict[str, float], preset: PresetName = "burst", topology: Topology = NODES
) -> tuple[AttentionMethod, Decision]:
    config = RunConfig(
        model=ModelConfig(num_heads=128, num_kv_heads=128, head_dim=192),
        attention=AttentionConfig(preset=preset),
        train=TrainConfig(seq_len=4096 * topology.size),
    )
    machine = find_machine("h100", rates)
    method = resolve_attention(config, topology, machine)
    return select_kv_form(form, config, method, Mask(config.train.seq_len), topology, machine, DEEPSEEK)


def test_latents_travel_where_links_are_slow() -> None:
    _, decision = select("auto", {"inter_bytes_per_s": 1e9})
    assert (decision.value, decision.rule) == ("latent", Rule.FASTEST)


def test_keys_and_values_travel_expanded_where_links_are_free() -> None:
    _, decision = select("auto", FREE_LINKS)
    assert decision.value == "expanded", "every reader would expand the same latents again"


def test_of_forms_that_are_as_fast_the_one_travels_that_sends_less() -> None:
    """Where links and the products that expand are free."""
    assert select("auto", FREE_LINKS | {"matmul_flops_per_s": 1e18})[1].value == "latent"


def test_backward_moves_latents_where_it_would_move_queries_without_them() -> None:
    slow = {"inter_bytes_per_s": 1e9}
    assert select("expanded", slow)[0].backward_circulates == "q"
    assert select("latent", slow)[0].backward_circulates == "kv"


def test_backward_may_move_queries_though_forward_moves_latents() -> None:
    """Where matrix products are slow, three in every tile cost more than what is sent."""
    method, decision = select("latent", FREE_LINKS | {"matmul_flops_per_s": 1e14})
    assert (method.backward_circulates, decision.value) == ("q", "latent")


def test_the_decision_has_seconds_and_bytes_of_both_forms() -> None:
    figures = select("auto", {"inter_bytes_per_s": 1e9})[1].figures
    assert figures["expanded_s"] > 3 * figures["latent_s"]
    assert figures["expanded_bytes"] > 8 * figures["latent_bytes"]


def test_divided_heads_send_expanded_keys_and_values() -> None:
    assert select("auto", {"inter_bytes_per_s": 1e9}, "loongtrain")[1].value == "expanded"


def test_divided_heads_refuse_latents_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kv_form=latent: latents belong to all heads, which head_parallel_size=4"):
        select("latent", {}, "loongtrain")


def test_a_rank_alone_expands_what_it_has() -> None:
    assert select("auto", {}, "single", Topology(1, 1))[1] == Decision("kv_form", "expanded", Rule.CONFIGURED)


def test_groups_too_large_to_plan_are_compared_by_a_smaller_one() -> None:
    _, decision = select("auto", {"inter_bytes_per_s": 1e9}, topology=replace(NODES, nodes=16))
    assert decision.value == "latent"

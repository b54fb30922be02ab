"""Whether keys and values of a layer travel as latents or expanded: the fastest by prediction. No torch.

In multi-head latent attention k and v of all heads are expanded from a latent of a few hundred numbers per token
(`LatentShape`). Latents are less to send; every reader then expands those that it reads, again in backward. Both forms
are replayed with the plans of the method. Where latents move in forward, backward may still move queries: k and v then
stay, and are expanded where they are.

Pure functions of configuration, method, topology and machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import KvForm, RunConfig
from engine.planning.methods.blocks import divide_sequence
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.ops import TokenBytes
from engine.planning.schedules.plan import PlanPair, plan_method
from engine.planning.topology import Topology, padded_length
from engine.planning.visibility.mask import Mask
from engine.predict.machine import Machine
from engine.predict.plan_costs import expanded_rows_flops
from engine.predict.replay import replay
from engine.resolve.attention import MOVING_OPERAND_TOLERANCE, MovingChoice, moving_choices, proxy_method
from engine.resolve.decisions import Decision, Rule

SETTING = "kv_form"


@dataclass(frozen=True)
class KvFormCandidate:
    """A form, and what moves in backward, with what one layer is predicted to cost.

    sent_bytes   by all planned ranks, forward and backward
    """

    form: KvForm
    method: AttentionMethod
    seconds: float
    sent_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for tables and JSON."""
        return {
            "form": self.form,
            "backward_circulates": self.method.backward_circulates,
            "seconds": self.seconds,
            "sent_bytes": self.sent_bytes,
        }


def latent_problem(method: AttentionMethod) -> str | None:
    """Why latents cannot travel under a method; None if they can."""
    if method.head_parallel_size > 1:
        return (
            f"latents belong to all heads, which head_parallel_size={method.head_parallel_size} divides; take a preset "
            "whose keys and values move around rings (burst, ring, striped, megatron_cp, megatron_allgather)"
        )
    if method.chunk_tokens is not None:
        return f"chunks (chunk_tokens={method.chunk_tokens}) move keys and values; leave chunk_tokens out"
    return None


def select_kv_form(
    form: KvForm,
    config: RunConfig,
    method: AttentionMethod,
    mask: Mask,
    topology: Topology,
    machine: Machine,
    sizes: TokenBytes,
) -> tuple[AttentionMethod, Decision]:
    """The method of layers whose keys and values come from latents, and the form that travels (`Decision.value`).

    Args:
        form: auto takes the fastest, and of those that are nearly as fast the one that sends fewest bytes.
        config: Settings of attention, and the length of the sequence.
        method: A legal one of `config`, chosen for expanded keys and values.
        mask: Of the layers; documents, which only the data know, are one sequence.
        topology: The ranks that share one sequence.
        machine: On which both forms are predicted.
        sizes: Of a token, with `latent`.

    Raises:
        ConfigError: form is latent, and latents cannot travel under the method.
    """
    problem = latent_problem(method)
    if form == "latent" and problem:
        raise ConfigError(f"kv_form=latent: {problem}; or kv_form=auto, which sends them expanded")
    if form == "expanded" or problem or method.cp_size == 1:
        value: KvForm = "latent" if form == "latent" else "expanded"
        return method, Decision(SETTING, value, Rule.CONFIGURED)
    candidates = _candidates(config, method, replace(mask, documents=()), topology, machine, sizes)
    allowed = [each for each in candidates if form in ("auto", each.form)]
    least = min(each.seconds for each in allowed) * (1 + MOVING_OPERAND_TOLERANCE)
    best = min((each for each in allowed if each.seconds <= least), key=lambda each: each.sent_bytes)
    figures: dict[str, float] = {}
    for name in ("expanded", "latent"):
        fastest = min((each for each in candidates if each.form == name), key=lambda each: each.seconds)
        figures |= {f"{name}_s": fastest.seconds, f"{name}_bytes": float(fastest.sent_bytes)}
    others = [each for each in candidates if each is not best]
    rule = Rule.FASTEST if form == "auto" else Rule.CONFIGURED
    chosen = replace(
        method,
        backward_circulates=best.method.backward_circulates,
        deferred_local_tiles=best.method.deferred_local_tiles,
    )
    return chosen, Decision(SETTING, best.form, rule, figures, (best, *others))


@functools.lru_cache(maxsize=64)
def _candidates(
    config: RunConfig,
    method: AttentionMethod,
    mask: Mask,
    topology: Topology,
    machine: Machine,
    sizes: TokenBytes,
) -> tuple[KvFormCandidate, ...]:
    """The method with expanded keys and values, and with latents by every choice that its preset leaves free."""
    small, proxy, group = proxy_method(config, method, topology)
    if group != topology:  # the same tokens per rank, so the same windows; block lists are of the whole length
        mask = replace(mask, seq_len=small.train.seq_len, blocks=None)
    predict = functools.partial(_predicted, small, mask=mask, topology=group, machine=machine, sizes=sizes)
    choices = moving_choices(small.attention, proxy, group)
    return (predict("expanded", proxy), *(predict("latent", each) for each in _methods(proxy, choices)))


def _methods(method: AttentionMethod, choices: list[MovingChoice]) -> Iterator[AttentionMethod]:
    for circulates, deferred in choices:
        yield replace(method, backward_circulates=circulates, deferred_local_tiles=deferred)


def _predicted(
    config: RunConfig,
    form: KvForm,
    method: AttentionMethod,
    *,
    mask: Mask,
    topology: Topology,
    machine: Machine,
    sizes: TokenBytes,
) -> KvFormCandidate:
    """Seconds and bytes of one layer, forward and backward."""
    blocks = divide_sequence(method, padded_length(mask.seq_len, topology.size), [mask])
    plans: PlanPair = plan_method(method, mask, blocks)
    expanded = replace(sizes, latent=None)
    forward = sizes if form == "latent" else expanded
    moves_kv = method.kv_transport == "all_gather" or method.backward_circulates == "kv"
    backward = forward if moves_kv else expanded
    seconds = sent = 0.0
    for plan, of_pass in ((plans.forward, forward), (plans.backward, backward)):
        seconds += replay(plan, machine, of_pass, topology).total_s
        sent += sum(link.total for link in plan.bytes_by_link(of_pass, topology).values())
    # Products of the own rows outside of tiles: gradients of latents and weight; with saved latents k and v again.
    products = 0 if backward.latent else 2 + (form == "latent")
    rows = max(blocks.rank_layout.row_counts)
    rate = machine.product_flops_per_s(min(rows, sizes.latent.rank if sizes.latent else rows))
    seconds += products * expanded_rows_flops(sizes, rows) / rate
    return KvFormCandidate(form, method, seconds, int(sent))

"""Decisions in words: what `engine.resolve` decided, by which figures. Pure: values in, text out."""

from __future__ import annotations

from engine.config.settings import RunConfig
from engine.planning.methods.presets import BYTES_OF, AttentionMethod, local_heads
from engine.planning.program.ops import Kind, TokenBytes
from engine.predict.memory import Capacity
from engine.resolve.attention import METHOD_TOLERANCE
from engine.resolve.decisions import Decision, Rule
from engine.resolve.memory import TIE_TOLERANCE


def preset_words(decision: Decision) -> str:
    """Why attention=auto became this method: its prediction, and that of the next one."""
    figures, others = decision.figures, decision.candidates[1:]
    among = (
        f"first of {figures['candidates']:.0f} methods planned (of those within {METHOD_TOLERANCE:.0%} of the fastest, "
    )
    among += "the one with the smallest buffers)"
    against = f"; next {others[0].method.preset} {others[0].seconds:.3g} s" if others else ""
    return (
        f"auto: {decision.value} is predicted at {figures['seconds']:.3g} s per step of attention, "
        f"{figures['exposed_s']:.3g} s of it exposed communication, {among}{against}"
    )


def memory_words(decision: Decision, capacity: Capacity | None) -> str:
    """Why a run has its memory policy."""
    if decision.rule == Rule.CONFIGURED:
        return "as configured"
    room = f"{abs(decision.figures['headroom_bytes']) / 2**30:.3g} GiB"
    if decision.rule == Rule.NEAREST_TO_FIT:
        device = "this device" if capacity is None else capacity.device_name
        return f"no policy fits on {device}; the nearest, {decision.value}, lacks {room}"
    return (
        f"auto: {decision.value} is predicted at {decision.figures['step_s']:.3g} s a step, and no policy that fits "
        f"saves more than {TIE_TOLERANCE:.0%} of that; it leaves {room} free"
    )


def moving_operand_words(decision: Decision, config: RunConfig, method: AttentionMethod) -> str:
    """What circulates in backward and why, with the bytes that decide where links do."""
    model, train = local_heads(config.model, config.parallel.tp_size), config.train
    wire = BYTES_OF[config.attention.gradient_wire_dtype or "float32"]
    row = TokenBytes(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        qk_dim=model.head_dim,
        v_dim=model.head_dim,
        element_bytes=BYTES_OF[train.compute_dtype],
        wire_gradient_bytes=wire,
    )
    kv, q = row.of(Kind.KV) + row.of(Kind.DKV_WIRE), row.of(Kind.Q_DOUT_STATS) + row.of(Kind.DQ_WIRE)
    group = model.num_heads // model.num_kv_heads
    heads = "multi-head attention" if group == 1 else f"grouped-query attention with {group} query heads per kv head"
    deferred = method.deferred_local_tiles
    tiles = f", {deferred} local tiles deferred" if deferred else ""
    text = f"{method.backward_circulates} circulates{tiles}; {heads}, per token and hop: kv {kv} B, q {q} B"
    if decision.rule == Rule.CONFIGURED:
        return f"as configured: {text}"
    return f"auto: {text} ({', '.join(f'{name} {value:.3g} s' for name, value in decision.figures.items())})"

"""`attention.check_plans`: ranks whose plans differ end with an error in the place of a hang."""

from __future__ import annotations

import re
from dataclasses import replace

from testkit.ranks import Pools
from testkit.resolved import method_of
from testkit.tiny_training import start_run, tiny_config, train_losses

from engine.config.errors import RunError
from engine.config.settings import AttentionConfig
from engine.planning.methods.blocks import divide_run
from engine.planning.methods.layers import attention_layers
from engine.planning.program.both_ends import disagreeing_ranks, message_digests
from engine.planning.program.ops import RankPlan
from engine.planning.schedules.plan import plan_method
from engine.planning.topology import Topology
from engine.training.check_plans import check_plans

BURST = AttentionConfig(preset="burst", backward_circulates="q")


def plans_of_four_ranks() -> dict[int, RankPlan]:
    config = tiny_config(attention=BURST)
    method = method_of(config, Topology(2, 2))
    layers = attention_layers(config, method)
    return dict(plan_method(method, layers[0].mask, divide_run(config, method, layers)).backward.ranks)


def without_a_row(plan: RankPlan) -> RankPlan:
    """The plan with one row less in its first message."""
    number = next(n for n, step in enumerate(plan.steps) if step.post)
    step = plan.steps[number]
    first, *others = step.post
    shorter = first._replace(view=first.view._replace(stop=first.view.stop - 1))
    return replace(
        plan, steps=(*plan.steps[:number], replace(step, post=(shorter, *others)), *plan.steps[number + 1 :])
    )


def test_sound_plans_agree() -> None:
    plans = plans_of_four_ranks()
    assert disagreeing_ranks([message_digests(plans[rank]) for rank in range(4)]) == []


def test_a_message_of_other_rows_names_its_two_ranks() -> None:
    plans = plans_of_four_ranks()
    plans[1] = without_a_row(plans[1])
    peer = next(transfer.peer for transfer in plans[1].transfers())
    pairs = disagreeing_ranks([message_digests(plans[rank]) for rank in range(4)])
    assert pairs == [tuple(sorted((1, peer)))]


def refusal_of_a_changed_plan() -> str:
    """What check_plans says where rank 1 has changed its plan; sound plans pass first."""
    run = start_run(tiny_config(attention=BURST))
    runtimes = run.attention.run_context().runtimes
    check_plans(runtimes, run.mesh)
    if run.mesh.rank == 1:
        runtimes = tuple(replace(one, backward=without_a_row(one.backward)) for one in runtimes)
    try:
        check_plans(runtimes, run.mesh)
    except RunError as error:
        return str(error)
    return "no error"


def test_every_rank_names_the_ranks_that_disagree(ranks: Pools) -> None:
    messages = ranks(4).run(refusal_of_a_changed_plan)
    assert set(messages) == {messages[0]}
    assert re.search(r"ranks (0 and 1|1 and \d)", messages[0]), messages[0]


def test_checked_steps_are_the_steps_without_the_check(ranks: Pools) -> None:
    plain, checked = (
        ranks(2).run(train_losses, tiny_config(attention=replace(BURST, check_plans=check)), 2, 2)
        for check in (False, True)
    )
    assert plain == checked

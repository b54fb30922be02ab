"""A debug setting, `attention.check_plans`: ranks compare their plans before they run them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from engine.attention.runtime import AttentionRuntime
from engine.config.errors import RunError
from engine.distributed.collectives import gather_objects
from engine.distributed.mesh import Mesh
from engine.planning.program.both_ends import Digests, disagreeing_ranks, message_digests


def check_plans(runtimes: Iterable[AttentionRuntime], mesh: Mesh) -> None:
    """Return where both ends of every message agree over all ranks. Collective over the run.

    Ranks that disagree would wait for each other until the time limit, or take a buffer of one kind for another.

    Raises:
        RunError: on all ranks alike; names the first pair that disagrees.
    """
    plans = [(name, getattr(runtime, name)) for runtime in runtimes for name in ("forward", "recompute", "backward")]
    own = [(f"{name} plan {number // 3}", message_digests(plan)) for number, (name, plan) in enumerate(plans) if plan]
    groups: defaultdict[tuple[int, int], dict[int, list[tuple[str, Digests]]]] = defaultdict(dict)
    for group, cp_rank, theirs in gather_objects(((mesh.dp_rank, mesh.tp_rank), mesh.cp_rank, own)):
        groups[group][cp_rank] = theirs
    for group, members in sorted(groups.items()):
        for together in zip(*(members[rank] for rank in sorted(members)), strict=True):
            if pairs := disagreeing_ranks([digests for _, digests in together]):
                (first, second), name = pairs[0], together[0][0]
                raise RunError(
                    f"attention.check_plans: ranks {first} and {second} of sequence group {group[0]} planned different "
                    f"messages for each other ({name}, layers that differ counted from 0). The same code and "
                    "configuration must run on all ranks; if they do, this is a bug of the schedule: report it"
                )

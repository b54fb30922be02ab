"""`ImagePlan`: which layers go to which node on which way. Pure: `--dry-run` shows it, `cluster.image.push` runs it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.image.inventory import NodeSurvey
from cluster.image.store import StoredImage
from engine.errors import ConfigError

DIRECT_NODES = 2  # to so many nodes, sending twice from here costs no more than setting up a chain
ASSUMED_BYTES_PER_S = 110e6  # a 1 Gbit/s link
_SLACK_BYTES = 16 << 20  # engines and file systems need a little beside the layers themselves
_PIECE_BYTES = 1 << 20  # roughly what is in flight per link of a chain


class Route(enum.StrEnum):
    """How layers get to a node."""

    NONE = "none"  # nothing has to get there
    DIRECT = "direct"  # from the launcher
    CHAIN = "chain"  # from another node
    SHARED = "shared"  # through a folder that all nodes see
    REFUSED = "refused"  # it cannot get the image; `problem` says why


@dataclass(frozen=True)
class PushOptions:
    """What a person asked for. route: "auto", "direct", "chain" or "shared"; limit: bytes/s of each sender."""

    route: str = "auto"
    shared_folder: str | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.route == "shared" and self.shared_folder is None:
            raise ConfigError("--route shared needs a folder that all nodes see: --via-shared PATH")
        if self.shared_folder is not None and self.route not in ("auto", "shared"):
            raise ConfigError(f"--via-shared and --route {self.route} exclude each other")
        if self.shared_folder is not None and not self.shared_folder.startswith("/"):
            raise ConfigError(f"--via-shared {self.shared_folder!r}: expected an absolute path on the nodes")


@dataclass(frozen=True)
class NodePlan:
    """What happens on one node.

    feeder: the node that sends to it; None: the launcher, or nobody. need: layers (their numbers in the image) that its
    engine lacks; fetch: those that it receives, more than `need` where nodes behind it lack more. same: an image of the
    node that only has to be named.
    """

    node: str
    route: Route
    feeder: str | None = None
    encoding: str = "zstd"
    need: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()
    move_bytes: int = 0
    resumed_bytes: int = 0
    skipped_bytes: int = 0
    up_to_date: bool = False
    same: str | None = None
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class ImagePlan:
    """One push. nodes: in the order that they were given. chains: nodes in the order in which they feed each other."""

    image: str
    identity: str
    layers: int
    unpacked_bytes: int
    packed_bytes: int
    options: PushOptions
    nodes: tuple[NodePlan, ...]
    chains: tuple[tuple[str, ...], ...]
    estimated_s: float
    assumed_bytes_per_s: float

    @property
    def move_bytes(self) -> int:
        """Bytes that nodes will receive, all together."""
        return sum(node.move_bytes for node in self.nodes)

    def node(self, name: str) -> NodePlan:
        """The plan of one node."""
        return next(plan for plan in self.nodes if plan.node == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        nodes = [{**asdict(node), "route": node.route.value} for node in self.nodes]
        return {**asdict(self), "nodes": nodes, "move_bytes": self.move_bytes}


def build_image_plan(image: StoredImage, surveys: Sequence[NodeSurvey], options: PushOptions) -> ImagePlan:
    """The plan to bring `image` to the nodes of `surveys`."""
    plans = {survey.node: _lacks(image, survey) for survey in surveys}
    by_name = {survey.node: survey for survey in surveys}
    chains: list[tuple[str, ...]] = []
    for encoding in ("zstd", "gzip"):
        group = [plan for plan in plans.values() if plan.need and plan.encoding == encoding]
        if group:
            chains += _route(group, by_name, options)
    for chain in chains:
        plans.update(_chained(image, chain, plans, by_name, shared=options.shared_folder is not None))
    sized = [_sized(image, plans[survey.node], survey) for survey in surveys]
    checked = [_with_space(image, plan, by_name[plan.node]) for plan in sized]
    return _plan(image, _without_refused(image, checked, chains, by_name, options), options)


def _lacks(image: StoredImage, survey: NodeSurvey) -> NodePlan:
    """What the engine of one node lacks; how it gets that is still open."""
    if survey.problem:
        return NodePlan(survey.node, Route.REFUSED, problem=survey.problem)
    if survey.identity == image.identity:
        return NodePlan(survey.node, Route.NONE, up_to_date=True)
    if survey.same is not None:
        return NodePlan(survey.node, Route.NONE, same=survey.same)
    present = survey.present if survey.takes_partial else 0
    numbers = {layer.diff_id: number for number, layer in enumerate(image.layers)}
    need = tuple(dict.fromkeys(numbers[diff_id] for diff_id in image.saved.diff_ids[present:]))
    route = Route.DIRECT if need else Route.NONE
    return NodePlan(survey.node, route, encoding="zstd" if survey.unzstd else "gzip", need=need, fetch=need)


def _route(group: Sequence[NodePlan], surveys: Mapping[str, NodeSurvey], options: PushOptions) -> list[tuple[str, ...]]:
    """Chains of nodes; a chain of one is fed by the launcher. With a shared folder the first one writes for all."""
    ordered = [plan.node for plan in sorted(group, key=lambda plan: -len(plan.need))]
    if options.shared_folder is not None:
        return [tuple(ordered)]
    if options.route == "direct" or (options.route == "auto" and len(ordered) <= DIRECT_NODES):
        return [(node,) for node in ordered]
    senders = [node for node in ordered if surveys[node].has_ssh and surveys[node].has_keys_file]
    no_ssh = [node for node in ordered if not surveys[node].has_ssh and surveys[node].has_keys_file]
    no_keys = [node for node in ordered if surveys[node].has_ssh and not surveys[node].has_keys_file]
    chain = [*no_keys[:1], *senders, *no_ssh[:1]]
    alone = [node for node in ordered if node not in chain]
    return [tuple(chain), *((node,) for node in alone)] if chain else [(node,) for node in alone]


def _chained(
    image: StoredImage,
    chain: tuple[str, ...],
    plans: Mapping[str, NodePlan],
    surveys: Mapping[str, NodeSurvey],
    *,
    shared: bool,
) -> dict[str, NodePlan]:
    """The plans of a chain's nodes: each fetches what it or any node behind it needs."""
    found: dict[str, NodePlan] = {}
    behind: set[int] = set()
    for position in reversed(range(len(chain))):
        plan = plans[chain[position]]
        behind |= set(plan.need)
        feeder = chain[position - 1] if position else None
        route = Route.SHARED if shared else Route.CHAIN if feeder is not None else Route.DIRECT
        fetch = tuple(number for number in range(len(image.layers)) if number in behind)
        note = "" if len(chain) > 1 or shared else _why_alone(surveys[plan.node])
        found[plan.node] = replace(
            plan, route=route, feeder=chain[0] if shared and position else feeder, fetch=fetch, note=note
        )
    return found


def _why_alone(survey: NodeSurvey) -> str:
    missing = [
        text for text, there in (("ssh", survey.has_ssh), ("~/.ssh/authorized_keys", survey.has_keys_file)) if not there
    ]
    return f"has no {' and no '.join(missing)}, so it cannot be part of a chain" if missing else ""


def _sized(image: StoredImage, plan: NodePlan, survey: NodeSurvey) -> NodePlan:
    """`plan` with its bytes: what moves, what earlier pushes left there, what its engine has."""
    if plan.route is Route.REFUSED:
        return plan
    packed = {number: _packed(image, number, plan.encoding) for number in range(len(image.layers))}
    moving = dict.fromkeys(plan.fetch, 0)
    resumed = 0
    for number in plan.fetch:
        sha256, size = packed[number]
        left = size if (survey.blobs or {}).get(sha256) == size else min(size, (survey.parts or {}).get(sha256, 0))
        moving[number] = size - left
        resumed += left
    if plan.route is Route.SHARED and plan.feeder is not None:
        moving, resumed = {}, 0  # it only reads
    skipped = sum(size for number, (_, size) in packed.items() if number not in plan.fetch)
    return replace(plan, move_bytes=sum(moving.values()), resumed_bytes=resumed, skipped_bytes=skipped)


def _packed(image: StoredImage, number: int, encoding: str) -> tuple[str, int]:
    packing = image.layers[number].packings.get(encoding) or image.layers[number].packings["zstd"]
    return packing.sha256, packing.size


def _with_space(image: StoredImage, plan: NodePlan, survey: NodeSurvey) -> NodePlan:
    """`plan`, refused if packed layers and the engine's two copies (its archive, its layers) do not fit."""
    if not plan.need:
        return plan
    unpacked = 2 * sum(image.layers[number].unpacked_bytes for number in plan.need)
    wanted: dict[int, tuple[str, int, int]] = {}
    for folder, free, size in (
        (survey.cache_folder, survey.cache_free, plan.move_bytes),
        (survey.engine_folder, survey.engine_free, unpacked),
    ):
        if free is not None:
            where, used, _ = wanted.get(free.device, (folder, 0, 0))
            wanted[free.device] = (where if used > size else folder, used + size, free.bytes)
    for folder, size, free_bytes in wanted.values():
        if size + _SLACK_BYTES > free_bytes:
            problem = f"disk full: needs {_mib(size)} where {folder} lies, {_mib(free_bytes)} are free"
            return NodePlan(plan.node, Route.REFUSED, problem=f"{problem}; make room, or run `burst image prune`")
    return plan


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _without_refused(
    image: StoredImage,
    plans: Sequence[NodePlan],
    chains: Sequence[tuple[str, ...]],
    surveys: Mapping[str, NodeSurvey],
    options: PushOptions,
) -> tuple[tuple[NodePlan, ...], tuple[tuple[str, ...], ...]]:
    """The plans with chains that leave refused nodes out: a disk that is full was found only once sizes were known."""
    by_name = {plan.node: plan for plan in plans}
    kept: list[tuple[str, ...]] = []
    for chain in chains:
        left = tuple(node for node in chain if by_name[node].route is not Route.REFUSED)
        if left and left != chain:
            again = _chained(image, left, by_name, surveys, shared=options.shared_folder is not None)
            by_name.update({name: _sized(image, plan, surveys[name]) for name, plan in again.items()})
        kept += [left] if left else []
    return tuple(by_name[plan.node] for plan in plans), tuple(kept)


def _plan(
    image: StoredImage, found: tuple[tuple[NodePlan, ...], tuple[tuple[str, ...], ...]], options: PushOptions
) -> ImagePlan:
    nodes, chains = found
    rate = min(options.limit or ASSUMED_BYTES_PER_S, ASSUMED_BYTES_PER_S)
    by_name = {node.node: node for node in nodes}
    from_here = sum(by_name[chain[0]].move_bytes for chain in chains)
    along = max((by_name[node].move_bytes + len(chain) * _PIECE_BYTES for chain in chains for node in chain), default=0)
    return ImagePlan(
        image=image.name,
        identity=image.identity,
        layers=len(image.saved.diff_ids),
        unpacked_bytes=image.unpacked_bytes,
        packed_bytes=sum(_packed(image, number, "zstd")[1] for number in range(len(image.layers))),
        options=options,
        nodes=nodes,
        chains=chains,
        estimated_s=max(from_here, along) / rate,
        assumed_bytes_per_s=rate,
    )

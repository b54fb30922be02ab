"""`burst image push`: agents, plan, transfer, results, in this order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burst_cli import render
from burst_cli.figures import binary_bytes
from burst_cli.image_view import open_push_view, plan_view, results_view
from cluster.access.ssh import SshPool
from cluster.image.fleet import Fleet, open_fleet, survey_nodes
from cluster.image.local import LocalImage, engine_words
from cluster.image.plan import ImagePlan, PushOptions, build_image_plan
from cluster.image.push import NodeResult, Push
from cluster.image.store import Store, StoredImage, default_store

if TYPE_CHECKING:
    from burst_cli.targets import Targets

_EXPORT_LINE_S = 2.0


@dataclass(frozen=True)
class PushRequest:
    """What was asked for."""

    targets: Targets
    image: str
    options: PushOptions
    dry_run: bool
    as_json: bool


def run_push(request: PushRequest) -> int:
    """The exit code of a push, everything shown. Raises ClusterError when this machine has no such image."""
    begin = time.monotonic()
    cluster = request.targets.config.cluster
    engine = engine_words(cluster.container.command)
    local, store = LocalImage(engine, request.image), default_store()
    facts = {"image": local.name, "identity": local.identity, "layers": list(local.diff_ids)}
    width, limit = cluster.ssh.fan_out, request.options.limit
    with SshPool() as pool, open_fleet(request.targets.hosts, pool.connect, limit=limit, width=width) as fleet:
        surveys = survey_nodes(
            fleet, request.targets.hosts, engine=engine, image=facts, shared_folder=request.options.shared_folder
        )
        image = _export(local, store)
        if any(not survey.unzstd and not survey.problem for survey in surveys):
            image = store.pack(image, "gzip")
        plan = build_image_plan(image, surveys, request.options)
        if request.dry_run:
            _show_plan(plan, as_json=request.as_json)
            return 1 if any(node.problem for node in plan.nodes) else 0
        results = _transfer(plan, image, store, fleet)
        fleet.close({"op": "finish", "forget_others": True})
    _show_results(plan, results, time.monotonic() - begin, as_json=request.as_json)
    return 0 if all(result.ok for result in results) else 1


def _export(local: LocalImage, store: Store) -> StoredImage:
    """The image in the store of this machine; says so where that takes a while."""
    console = render.stderr()
    return local.export(
        store,
        _every(
            _EXPORT_LINE_S,
            lambda size: console.print(f"exporting {local.name}: {binary_bytes(size)}", style="dim", markup=False),
        ),
    )


def _every(interval_s: float, say: Callable[[int], None]) -> Callable[[int], None]:
    """Adds sizes up, and says the sum every so often."""
    total, spoken = 0, time.monotonic()

    def add(size: int) -> None:
        nonlocal total, spoken
        total += size
        if time.monotonic() - spoken > interval_s:
            spoken = time.monotonic()
            say(total)

    return add


def _transfer(plan: ImagePlan, image: StoredImage, store: Store, fleet: Fleet) -> tuple[NodeResult, ...]:
    console = render.stderr()
    if plan.move_bytes:
        console.print(plan_view(plan))
    with open_push_view(console) as view:
        return Push(plan, image, store, fleet.sessions, fleet.events, observer=view).run()


def _show_plan(plan: ImagePlan, *, as_json: bool) -> None:
    if as_json:
        render.emit_json(plan.to_dict())
    else:
        render.stdout().print(plan_view(plan))


def _show_results(plan: ImagePlan, results: tuple[NodeResult, ...], elapsed_s: float, *, as_json: bool) -> None:
    if as_json:
        nodes = [result.to_dict() for result in results]
        received = sum(result.received_bytes for result in results)
        head = {"image": plan.image, "identity": plan.identity, "ok": all(result.ok for result in results)}
        render.emit_json({**head, "seconds": elapsed_s, "received_bytes": received, "nodes": nodes})
    else:
        render.stdout().print(results_view(results, elapsed_s))

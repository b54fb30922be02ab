"""`burst image push`: plan, transfer, results, in this order."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from burst_cli import render
from burst_cli.image.view import open_push_view, plan_view, results_view
from cluster.image.local import LocalImage
from cluster.image.plan import PushOptions
from cluster.image.push import Push
from cluster.plan_container import engine_words
from cluster.ssh.pool import SshPool

if TYPE_CHECKING:
    from burst_cli.targets import Targets


def run_push(targets: Targets, name: str, options: PushOptions, *, dry_run: bool, as_json: bool) -> int:
    """The exit code of a push, everything shown. Raises ClusterError when this machine has no such image."""
    begin = time.monotonic()
    cluster = targets.config.cluster
    engine = engine_words(cluster.container.command)
    image, console = LocalImage(engine, name), render.stderr()
    with SshPool() as pool, Push(image, engine, targets.hosts, pool.connect) as push:
        plan = push.plan(options)
        if dry_run:
            if as_json:
                render.emit_json(asdict(plan))
            else:
                render.stdout().print(plan_view(plan))
            return 1 if any(node.problem for node in plan.nodes) else 0
        if plan.pulling:
            console.print(plan_view(plan))
        with open_push_view(console) as view:
            results = push.run(plan, view)
        sent = push.sent_bytes
    elapsed_s, is_ok = time.monotonic() - begin, all(result.ok for result in results)
    if as_json:
        received = sum(result.received_bytes for result in results)
        head = {"image": plan.image, "identity": plan.identity, "ok": is_ok, "seconds": elapsed_s}
        nodes = [asdict(result) for result in results]
        render.emit_json({**head, "sent_bytes": sent, "received_bytes": received, "nodes": nodes})
    else:
        render.stdout().print(results_view(results, elapsed_s))
    return 0 if is_ok else 1

"""Signs that a run is failing, per node, as early as they can be seen. Who is to blame is judged at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from cluster.control.evidence import rank_errors, seen_deaths, tail_text, torchrun_log
from cluster.control.link import NodeStatus
from cluster.plan import LaunchPlan, NodePlan
from engine.runs.folder import RunFolder

_STOPS_RANKS = re.compile(r"failed \(exitcode: |closing signal SIG")
_SETTLED_NS = 1_000_000_000  # a folder that changed this recently may change again within the tick of its clock


class Signs:
    """Looks at what the nodes say and at the error files of ranks; `strong` and `weak` give one line per node.

    A weak sign is an end that looks well, but may have come too early.
    """

    def __init__(self, plan: LaunchPlan, run: RunFolder, log_starts: Mapping[str, int]) -> None:
        self._plan, self._run, self._log_starts = plan, run, log_starts
        self._stamps: dict[str, int] = {}  # of folders that were read long enough after their last change
        self._sizes: dict[str, int] = {}
        self._errors: dict[str, str] = {}

    def strong(self, statuses: Mapping[str, NodeStatus]) -> dict[str, str]:
        """Nodes on which something failed, and what."""
        found = ((node.name, self._of_node(node, statuses.get(node.name))) for node in self._plan.nodes)
        return {name: text for name, text in found if text}

    def weak(self, statuses: Mapping[str, NodeStatus]) -> dict[str, str]:
        """Nodes on which ranks ended without any sign of a failure."""
        found = {}
        for node in self._plan.nodes:
            status = statuses.get(node.name)
            ended = [] if status is None else [death for death in seen_deaths(node, status) if not death.exit_code]
            if status is not None and (status.outcome or {}).get("exit_code") == 0:
                found[node.name] = "its ranks have ended"
            elif ended:
                found[node.name] = f"rank {ended[0].rank} has ended"
        return found

    def _of_node(self, node: NodePlan, status: NodeStatus | None) -> str | None:
        outcome = (status.outcome if status is not None else None) or {}
        cause, code = outcome.get("cause"), outcome.get("exit_code")
        if cause == "start_failed":
            return "its command could not be started"
        if cause == "lease":
            return "it heard nothing of the launcher and stopped its ranks"
        if cause is not None and code != 0:
            return f"its ranks were stopped ({outcome.get('stop_cause')})" if cause == "stop" else "its ranks ended"
        bad = [death for death in seen_deaths(node, status) if death.exit_code] if status is not None else []
        if bad:
            signal = bad[0].signal
            how = signal.name if signal is not None else f"exit code {bad[0].exit_code}"
            return f"rank {bad[0].rank} ended ({how})"
        return self._error_of_rank(node) or self._word_of_torchrun(node)

    def _word_of_torchrun(self, node: NodePlan) -> str | None:
        """What torchrun says when it ends the ranks of `node` because one of them failed; read when it grows."""
        start = self._log_starts.get(node.name, 0)
        try:
            size = torchrun_log(node, self._run).stat().st_size
        except OSError:
            return None
        if size > self._sizes.get(node.name, start):
            self._sizes[node.name] = size
            if _STOPS_RANKS.search(tail_text(torchrun_log(node, self._run), start=start)):
                self._errors[node.name] = "torchrun stops its ranks, for one has failed"
        return self._errors.get(node.name)

    def _error_of_rank(self, node: NodePlan) -> str | None:
        """The error that a rank of `node` left, if one did; the folder is read again only when it has changed."""
        try:
            stamp = self._run.log_dir(node.name).stat().st_mtime_ns
        except OSError:
            return None
        if self._stamps.get(node.name) != stamp and node.name not in self._errors:
            errors = rank_errors(node, self._run)
            if errors:
                self._errors[node.name] = f"rank {errors[0]['rank']} failed"
            elif time.time_ns() - stamp > _SETTLED_NS:
                self._stamps[node.name] = stamp
        return self._errors.get(node.name)

"""`NodeLink` for this machine: the node's folder is the run folder, so there is nothing to bring anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.agent.serve import Agent
from cluster.control.link import AskedLink, NodeStatus


class LocalLink(AskedLink):
    """One node of the run in folder `run`, on this machine. A run folder that cannot be written is a `problem`."""

    def __init__(self, run: Path, node: str) -> None:
        super().__init__(str(run), node, start_s=60.0)
        self._agent = Agent()

    def follow(self) -> None:
        """Nothing: the files are here."""

    def poll(self) -> NodeStatus:
        """What the files say now."""
        with self._changed:
            question = self._question(wait_s=0.0)
        self._take(question, self._agent.answer(question)[0])
        return replace(super().poll(), is_synced=self._status.outcome is not None)

    def _request(self, name: str, wish: Any) -> None:
        super()._request(name, wish)
        self.poll()

    def close(self) -> None:
        """Nothing is held."""

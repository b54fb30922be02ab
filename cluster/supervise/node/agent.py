"""What a launcher reaches of a node over one SSH exec: its questions become files, files become answers.

It holds no state: killed at any moment, the next one goes on from the offsets that it is told. The supervisor does not
depend on it. A question may hold any of these, beside `folder` and `node`:

    start {spec}   again: it was sent before, and its answer may have been lost
    follow {lead, offsets {path: bytes}}    from where files are to be sent; from then on what is new in each answer
    beat true   stop {cause, grace_s}   stacks NONCE   sweep NONCE
    wait_s   budget     how long the answer may wait for news, and how many bytes of files it may carry

and its answer: got_ns now_ns, started | refused {kind, text}, swept [pids], errors {name: text}, status {phase,
supervisor, outcome, health}, files [{path, offset, bytes, ...}] whose bytes follow in their order, all: that was all.
"""

import os
import threading
import time
from collections import deque
from typing import Any, Callable, Optional

from cluster.code.node.messages import Message, serve
from cluster.supervise.node.daemon import start
from cluster.supervise.node.folder import NodeFiles, beat, read_json, read_status, request_stacks, request_stop
from cluster.supervise.node.spec import SpecError, checked_folder, checked_node, checked_run_id, seconds
from cluster.supervise.node.sweep import sweep
from cluster.supervise.node.tail import NodeTail

_POLL_S = 0.1
_IDLE_AFTER_S = 10.0  # without news files are looked at once per question
_LONGEST_WAIT_S = 5.0
_MOST_BYTES = 2 << 20
_MAX_OFFSETS = 20000


class Agent:
    """Answers the questions of one launcher. `carried`: the modules as they came, for the supervisors it starts."""

    def __init__(self, carried: Optional[bytes] = None) -> None:
        self._carried = carried
        self._tail: Optional[NodeTail] = None
        self._status: Optional[Message] = None  # as it was sent last
        self._has_told_all = False
        self._news_at = time.monotonic()
        self._begun: set[str] = set()  # starts and sweeps
        self._done: deque[Message] = deque()  # by threads
        self._errors: deque[tuple[str, str]] = deque()

    def answer(self, asked: Message, _: bytes = b"") -> tuple[Message, bytes]:
        """The answer and the bytes of its files: at once if there is news, else after a while."""
        got_ns, budget = time.time_ns(), min(int(asked.get("budget", 0)), _MOST_BYTES)
        deadline = time.monotonic() + min(float(asked.get("wait_s", 0.0)), _LONGEST_WAIT_S)
        self._act(asked)
        while True:
            news, data = self._news(asked, budget)
            now = time.monotonic()
            self._news_at = now if news else self._news_at
            if news or now >= deadline:
                return {**news, "got_ns": got_ns, "now_ns": time.time_ns()}, data
            time.sleep(_POLL_S if now < self._news_at + _IDLE_AFTER_S else deadline - now)

    # --- what is asked for -------------------------------------------------------------------------------------------

    def _act(self, asked: Message) -> None:
        """Do all that is asked for; what cannot be done is news."""
        acts: dict[str, Callable[[str, str, Any], None]] = {
            "follow": self._follow,
            "beat": lambda folder, node, _: beat(folder, node),
            "stop": self._stop,
            "stacks": lambda folder, node, nonce: request_stacks(folder, node, checked_run_id(nonce)),
            "sweep": self._sweep,
        }
        if "start" in asked:
            self._start(asked["start"], asked.get("again") is True)
            return
        for name, act in acts.items():
            if name in asked:
                self._try(name, act, asked)

    def _try(self, name: str, act: Callable[[str, str, Any], None], asked: Message) -> None:
        try:
            act(checked_folder(asked.get("folder")), checked_node(asked.get("node")), asked[name])
        except (SpecError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._note_error(name, str(error))
        except OSError as error:
            self._note_error(name, f"{error.filename or 'the run folder'}: {error.strerror or error}")

    def _note_error(self, name: str, text: str) -> None:
        self._errors.append((name, f"{name}: {text}"))

    def _start(self, spec: Any, again: bool) -> None:
        """In a thread, for it may take long; until it is answered, files may be those of an earlier attempt."""
        self._tail = self._status = None
        name = str(spec.get("start_id")) if isinstance(spec, dict) else ""
        if name not in self._begun:
            self._begun.add(name)
            self._later("start", lambda: start(spec, self._carried, again=again))

    def _follow(self, folder: str, node: str, wish: Message) -> None:
        offsets = wish.get("offsets") or {}
        if not isinstance(offsets, dict) or len(offsets) > _MAX_OFFSETS:
            raise SpecError("offsets is no object")
        for path, offset in offsets.items():
            if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 1 << 50:
                raise SpecError(f"the offset of {str(path)[:100]!r} is no number of bytes")
        self._tail, self._status, self._has_told_all = (
            NodeTail(folder, node, bool(wish.get("lead")), offsets),
            None,
            False,
        )

    def _stop(self, folder: str, node: str, wish: Message) -> None:
        request_stop(folder, node, str(wish.get("cause", ""))[:200], seconds(wish.get("grace_s"), "grace_s"))

    def _sweep(self, folder: str, node: str, nonce: str) -> None:
        if nonce in self._begun:
            return
        self._begun.add(nonce)
        started = read_json(NodeFiles(folder, node).spec) or {}
        run_id = checked_run_id(started.get("run_id") or os.path.basename(folder))
        self._later("sweep", lambda: {"swept": sweep(folder, node, run_id)})

    def _later(self, name: str, work: Callable[[], Message]) -> None:
        def do() -> None:
            try:
                self._done.append(work())
            except Exception as error:  # nobody else hears of it, and the launcher would wait for ever
                self._note_error(name, f"{type(error).__name__}: {error}")

        threading.Thread(target=do, name="agent", daemon=True).start()

    # --- what there is to tell ---------------------------------------------------------------------------------------

    def _news(self, asked: Message, budget: int) -> tuple[Message, bytes]:
        """What was not told before."""
        news: Message = {}
        while self._done:
            news.update(self._done.popleft())
        while self._errors:
            name, text = self._errors.popleft()
            news.setdefault("errors", {})[name] = text
        if "start" in asked:
            return news, b""
        status = read_status(checked_folder(asked.get("folder")), checked_node(asked.get("node")))
        if status != self._status:
            news["status"] = self._status = status
        # The files after the status: what is final now has written all of them.
        heads, data = self._tail.take(budget) if self._tail is not None else ([], b"")
        if heads:
            news["files"], self._has_told_all = heads, False
        elif self._tail is not None and budget and status["phase"] in ("ended", "lost") and not self._has_told_all:
            news["all"] = self._has_told_all = True
        return news, data


def main(carried: bytes) -> None:
    """Serve the launcher at the other end of stdin and stdout until it is gone."""
    serve(Agent(carried).answer)

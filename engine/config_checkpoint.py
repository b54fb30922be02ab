"""Settings of checkpoints, under train.checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config_schema import note


@dataclass(frozen=True)
class CheckpointConfig:
    """When the training state is saved, where, and what is kept. Off unless one of the first three is set."""

    at_end: bool = field(default=False, metadata=note("save when the run ends, or is asked to stop"))
    every_steps: int | None = field(default=None, metadata=note("steps between checkpoints", "steps", at_least=1))
    every_minutes: float | None = field(default=None, metadata=note("time between checkpoints", "minutes", above=0))
    keep_last: int = field(default=2, metadata=note("newest checkpoints that are kept", "checkpoints", at_least=2))
    keep_every_steps: int | None = field(
        default=None, metadata=note("checkpoints of multiples of this many steps are kept, too", "steps", at_least=1)
    )
    in_background: bool = field(
        default=False,
        metadata=note("training goes on while a copy in host memory is written: 12 bytes per parameter, sharded"),
    )
    stop_grace_s: float = field(
        default=60.0,
        metadata=note("what a run that is asked to stop may take to end its step and save", "seconds", at_least=12),
    )
    folder: str | None = field(
        default=None,
        metadata=note("where checkpoints lie, by run id; null: in cluster.shared_folder, else in the run folder"),
    )
    resume_from: str | None = field(
        default=None,
        metadata=note("a run or one of its checkpoints to go on from, whatever its ranks and method were"),
    )

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are written: always at the end, too, and when the run is asked to stop."""
        return self.at_end or self.is_periodic

    @property
    def is_periodic(self) -> bool:
        """Whether they are written before the end."""
        return self.every_steps is not None or self.every_minutes is not None

"""The checkpoints of a run as its trainer uses them: where to resume, when to save, what to record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.checkpointer import Checkpointer, Saved, Snapshot
from engine.checkpoint.state import TrainingTensors, frozen_digest, training_tensors, weight_tensors
from engine.config.errors import RunError
from engine.config.schema import to_plain
from engine.config.settings import ModelConfig, RunConfig
from engine.model.decoder import has_frozen_weights
from engine.runs.checkpoints import CheckpointError, Manifest, check_steps_left, checkpoints_folder
from engine.runs.folder import RunFolder
from engine.training.rank.recorder import Recorder
from engine.training.train_step import TrainStep


@dataclass(frozen=True)
class Position:
    """Progress of training: optimizer steps done, samples of the endless stream consumed, tokens trained on."""

    step: int = 0
    samples: int = 0
    tokens: int = 0


# Keys of a config.json that say who wrote it and how, not what the model computes.
_ABOUT_THE_FILE = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"})


def model_facts(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that make the function which the weights belong to, by dotted name, as plain values."""
    facts: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name in value.keys() - _ABOUT_THE_FILE:
                add(f"{prefix}.{name}", value[name])
        else:
            facts[prefix] = value

    add("model", to_plain(replace(model, name="", init_from=None, require_init_from=False, init_std=0.0)))
    return facts


class RunCheckpoints:
    """Checkpoints of one run. Collective over all ranks. With checkpoints off it reads and writes nothing."""

    def __init__(
        self, config: RunConfig, run: RunFolder, train_step: TrainStep, data_hash: str, recorder: Recorder
    ) -> None:
        self._settings, self._train_step, self._recorder = config.train.checkpoint, train_step, recorder
        # A position in the data has the same meaning only if these are equal.
        self._data = {"seed": config.seed, "seq_len": config.train.seq_len, "data_hash": data_hash}
        self._model = model_facts(config.model)
        self._base_digest: str | None = None  # of the weights that are frozen, once they are set
        source = self._settings.resume_from
        self._steps = config.train.steps
        self._source = None if source is None else Path(source).expanduser()
        self._checkpointer: Checkpointer | None = None
        if self._settings.is_on or source is not None:
            root, facts = checkpoints_folder(self._settings, run.path), {"run_id": run.run_id}
            advance = train_step.status.advance
            self._checkpointer = Checkpointer(self._settings, root, facts, recorder.warn, advance)

    def restore(self) -> Position | None:
        """Restore this run's newest checkpoint, else that of `resume_from`; return its position, or None without one.

        Fills every weight of the model, or none.
        """
        if self._checkpointer is None:
            return None
        self._recorder.phase("restore")
        self._note_base()
        tensors = self._tensors()
        manifest = self._checkpointer.restore(tensors, self._check_run)
        if manifest is None and self._source is not None:
            manifest = self._checkpointer.restore_from(self._source, tensors, self._check_source)
        if manifest is None:
            return None
        self._train_step.guard.load(manifest.state["guard"])
        self._recorder.restored(manifest.step, str(manifest.facts.get("run_id")))
        return Position(manifest.whole("step"), manifest.whole("samples"), manifest.whole("tokens"))

    def restore_weights(self) -> Manifest | None:
        """Restore only the weights of `resume_from`, whatever their data; return its manifest, or None without one."""
        if self._checkpointer is None or self._source is None:
            return None
        self._recorder.phase("restore")
        self._note_base()
        weights = weight_tensors(self._train_step.model)
        manifest = self._checkpointer.restore_from(self._source, weights, self._check_base)
        self._recorder.note(f"evaluating the weights of {manifest.facts.get('run_id')} after step {manifest.step}")
        return manifest

    def rewind(self, position: Position) -> Position:
        """Restore the newest checkpoint, but continue with the data after `position`. Raises RunError without one."""
        assert self._checkpointer is not None
        self._recorder.phase("rewind")
        self._record(self._checkpointer.finish())
        manifest = self._checkpointer.restore(self._tensors(), self._check_run)
        if manifest is None:
            raise RunError(
                f"step {position.step} is to be undone, but there is no checkpoint yet to rewind to; "
                "lower train.checkpoint.every_steps or optimizer.learning_rate"
            )
        self._train_step.guard.rewound(manifest.state["guard"])
        self._recorder.restored(manifest.step, str(manifest.facts.get("run_id")))
        self._recorder.phase("train")
        return Position(manifest.step, position.samples, position.tokens)

    def after_step(self, position: Position, *, is_last: bool) -> None:
        """Save if a checkpoint is due, and always after the last step, planned or not."""
        if self._checkpointer is None or not self._settings.is_on:
            return
        if not (self._checkpointer.is_due(position.step) or is_last):
            return
        self._recorder.phase("checkpoint")
        tensors, guard = self._tensors(), self._train_step.guard.state()
        state = {**asdict(position), "updates": tensors.updates, "guard": guard, **self._data, "model": self._model}
        if self._base_digest is not None:
            state["base_weights"] = self._base_digest
        self._record(self._checkpointer.save(Snapshot(position.step, tensors.tensors, state), wait=is_last))
        self._recorder.phase("train")

    def close(self) -> None:
        """Wait for a background save."""
        if self._checkpointer is not None:
            self._record(self._checkpointer.close())

    def _tensors(self) -> TrainingTensors:
        self._train_step.wait_pending()  # updates on the host may still run
        return training_tensors(self._train_step.model, self._train_step.optimizer)

    def _record(self, saves: Sequence[Saved]) -> None:
        for saved in saves:
            self._recorder.saved(saved.step, saved.bytes, saved.stall_s, saved.seconds)

    def _check_source(self, manifest: Manifest) -> None:
        """Check a checkpoint of another run. Raises CheckpointError (`_check_run`), ConfigError if no step is left."""
        self._check_run(manifest)
        assert self._source is not None
        check_steps_left(manifest.step, self._source, self._steps)

    def _note_base(self) -> None:
        """Compute the digest of the frozen weights, if there are any. Collective over all ranks."""
        if has_frozen_weights(self._train_step.model):
            self._base_digest = frozen_digest(self._train_step.model)

    def _check_base(self, manifest: Manifest) -> None:
        """Raise CheckpointError if the adapters of `manifest` belong to other frozen weights."""
        if manifest.state.get("base_weights") != self._base_digest:
            raise CheckpointError(
                f"the adapters of step {manifest.step} were trained on other weights than those of model.init_from "
                f"here (digests {manifest.state.get('base_weights')} and {self._base_digest}); give the same model"
            )

    def _check_run(self, manifest: Manifest) -> None:
        """Raise CheckpointError if the model of `manifest` is another one, or a position in its data."""
        self._check_model(manifest)
        self._check_base(manifest)
        self._check_data(manifest)

    def _check_model(self, manifest: Manifest) -> None:
        there = manifest.state.get("model")
        if there is None:  # saved before models were recorded
            return
        names = sorted({name for name in (*there, *self._model) if there.get(name) != self._model.get(name)})
        if names:
            listed = ", ".join(f"{name} was {there.get(name)}, is {self._model.get(name)}" for name in names)
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} is of another model: {listed}. Continue with the same model; "
                "to change it, export the weights and start from them with model.init_from"
            )

    def _check_data(self, manifest: Manifest) -> None:
        there = manifest.state
        if different := [name for name, here in self._data.items() if there.get(name) != here]:
            listed = ", ".join(f"{name} was {there.get(name)}, is {self._data[name]}" for name in different)
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} is of other data: {listed}. "
                "Continue with the same data, seed and train.seq_len"
            )

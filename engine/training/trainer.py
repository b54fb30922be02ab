"""The training loop: prepare data, build the model, then step, validate, record. Every rank runs the same loop."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from engine.attention.library import ContextParallel, resolve_here
from engine.config.errors import ConfigError, DataError
from engine.config.settings import RunConfig
from engine.data.agreement import tokenizer_problem, vocabulary_problem
from engine.data.needles import needle_tasks
from engine.data.prepare import TrainingData, open_training_data, prepare
from engine.data.rules import file_rules
from engine.data.view import training_sampler
from engine.distributed.collectives import gather_objects, wait_for_all_ranks
from engine.distributed.mesh import (
    Mesh,
    Placement,
    build_mesh,
    check_world,
    choose_device,
    limit_waits,
    open_mesh,
    read_placement,
    start_process_group,
    step_timeout,
)
from engine.model.decoder import has_frozen_weights
from engine.parallel.parallelize import build_empty_model, set_first_weights
from engine.parallel.waiting import count_waits
from engine.planning.methods.presets import AttentionMethod
from engine.predict.flops import count_parameters
from engine.predict.machine import Peak
from engine.predict.policy_cost import policy_cost
from engine.pretrained.folder import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from engine.resolve.legality import check_run
from engine.resolve.rules import check_config
from engine.resolve.run import ResolvedRun, read_resolved
from engine.runs.folder import RESOLVED_FILE, RunFolder
from engine.runs.record import WARMUP_STEPS, config_facts, predicted_facts, summarise
from engine.training.batches import StepBatches
from engine.training.checkpoints import Position, RunCheckpoints
from engine.training.determinism import deterministic_algorithms
from engine.training.guard import Verdict
from engine.training.metrics import StepCost, StepMeter, StepProfiler
from engine.training.peak import find_peak
from engine.training.rank.faults import FindFaults, read_faults
from engine.training.rank.lifecycle import run_states
from engine.training.rank.process import RankStatus
from engine.training.rank.recorder import Recorder
from engine.training.rank.stop import GRACE_S, KILL_MARGIN_S
from engine.training.train_step import TrainStep
from engine.training.validation import Stopped, measured, pause, validate


class Trainer:
    """One run on this rank. Collective over all ranks, the constructor included; `run` does the rest in order."""

    def __init__(
        self, resolved: ResolvedRun, run: RunFolder, mesh: Mesh, recorder: Recorder, status: RankStatus
    ) -> None:
        config = resolved.config
        self.config, self.mesh = config, mesh
        self._requested = resolved.requested
        self._run_folder, self._recorder, self._status = run, recorder, status
        train = config.train
        self.data = load_data(config, mesh, recorder)
        if not train.evaluate_only:  # an evaluation takes no training samples, so its corpus may be too short for one
            sampler = training_sampler(self.data, config)
        self._needles = needle_tasks(config, self.data.main)
        recorder.phase("build model")
        self.model, self.attention = build_empty_model(resolved, mesh)
        if (choice := self.attention.kernel_choice) is not None:
            recorder.kernel_chosen(choice.kernel.name, choice.reason, choice.others)
        counts = count_waits(status.waits, mesh, self.model, self.attention)
        self.train_step = TrainStep(config, mesh, self.model, self.attention, status)
        if not train.evaluate_only:
            self._batches = StepBatches(sampler, train, mesh, self.train_step.prepare)
        recorder.phase("measure peak")
        self.peak = find_peak(train, mesh.device)
        self._meter = StepMeter(
            mesh,
            self.attention,
            step_cost(config, mesh.dp_size, self.peak, self.attention.method),
            tracked_steps=WARMUP_STEPS,
            waits=status.waits if counts else None,
            store=self.model.activation_store,
        )
        self._profiler = StepProfiler(train.profile, run.path / "profile", mesh.rank)
        self._checkpoints = RunCheckpoints(config, run, self.train_step, self.data.content_hash, recorder)

    def run(self) -> None:
        """Train to the last step and write the summary; with train.evaluate_only evaluate instead.

        A stop request ends training between two steps. A checkpoint is written, then KeyboardInterrupt is raised.
        """
        if self.config.train.evaluate_only:
            self._evaluate_only()
            return
        total = self.config.train.steps
        if has_frozen_weights(self.model):  # which are in no checkpoint
            self._begin()
            position = self._checkpoints.restore() or Position()
        else:
            position = self._checkpoints.restore() or self._begin()
        self._batches.start_at(position.step, position.samples)
        self._recorder.phase("train")
        limit_waits(self.mesh, step_timeout(self.config.cluster))
        checkpoint = self.config.train.checkpoint
        self._status.stop.defer(checkpoint.stop_grace_s - KILL_MARGIN_S if checkpoint.is_on else GRACE_S)
        stopped = False
        while position.step < total and not stopped:
            row, verdict, stopped = self._run_step(position.step)
            if not verdict.taken:
                row["dropped"] = verdict.action
            if self._validation_is_due(row["step"]) and not stopped:
                stopped = self._validate(row)
            self._recorder.row(row, total)
            self._recorder.warn_once(self._meter.warning(row))
            before, position = position, self._after(position)
            if not verdict.taken:
                self._recorder.dropped(row["step"], verdict, range(before.samples, position.samples))
            if verdict.action == "rewind" and not stopped:
                position = self._checkpoints.rewind(position)
                self._batches.start_at(position.step, position.samples)
            else:
                self._checkpoints.after_step(position, is_last=stopped or position.step == total)
        self.train_step.wait_pending()
        self._checkpoints.close()
        self._batches.close()
        self._profiler.close()
        # The number of steps is passed in: a resumed run with no step left has no rows to count.
        self._end("cancelled" if stopped else "completed", steps=position.step)
        if stopped:
            raise KeyboardInterrupt

    def _evaluate_only(self) -> None:
        """Evaluate the given weights once. Optimizer states are neither loaded nor created."""
        if has_frozen_weights(self.model):
            self._begin()
        evaluated = self._checkpoints.restore_weights()
        if evaluated is None and not has_frozen_weights(self.model):
            self._begin()
        step = 0 if evaluated is None else evaluated.step
        self._recorder.phase("evaluate")
        row = {"step": step, **measured(self.mesh, lambda: validate(self.train_step, self.data.main, self._needles))}
        self._status.stop.defer(GRACE_S)  # a stop request from here on waits until the results are written
        self._recorder.row(row)
        evaluated_run = None if evaluated is None else str(evaluated.facts.get("run_id"))
        self._end("completed", evaluated_run=evaluated_run, evaluated_step=step, steps=0)

    def _begin(self) -> Position:
        """Fill the model with its initial weights; return the position at step 0."""
        self._recorder.phase("first weights")
        set_first_weights(self.model, self.config)
        return Position()

    def _run_step(self, step: int) -> tuple[dict[str, Any], Verdict, bool]:
        """Run step `step`, counted from 0; return its row of metrics, its verdict, and whether to stop after it.

        Rows, status and messages count steps from 1.
        """
        self._status.step, self._status.micro_step, self._status.phase = step + 1, 0, "load batch"
        with self._profiler.step(step + 1):
            self._meter.start()
            batches = self._batches.take(step)
            self._meter.have_batches()
            with self._meter.count_tensors():
                result = self.train_step.run(step, batches)
            row, stopped = self._meter.finish(step + 1, result, stop=self._status.stop.requested)
            return row, result.verdict, stopped

    def _after(self, position: Position) -> Position:
        """Return the position one step later."""
        samples = sequences_of_step(self.config, self.mesh.dp_size)
        tokens = samples * self.config.train.seq_len
        return Position(position.step + 1, position.samples + samples, position.tokens + tokens)

    def _validation_is_due(self, step: int) -> bool:
        interval = self.config.train.eval_interval_steps
        return step == self.config.train.steps or (interval is not None and step % interval == 0)

    def _validate(self, row: dict[str, Any]) -> bool:
        """Add the validation's results to `row`; return whether a rank was asked to stop, which interrupts it."""
        self._recorder.phase("evaluate")
        try:
            row.update(validate(self.train_step, self.data.main, self._needles))
            pause(self.train_step)
        except Stopped:
            return True
        self._recorder.phase("train")
        return False

    def _end(self, status: str, **facts: Any) -> None:
        """Write the summary on rank 0, from the rows on disk: those of a long run are not held in memory."""
        run, config = self._run_folder, self.config
        if self.mesh.rank == 0:
            # The memory plan predicts a training step, so it says nothing about an evaluation.
            plan = None if config.train.evaluate_only else run.read_memory_plan()
            peak = {"peak_flops_per_device": self.peak.flops_per_s, "peak_flops_source": self.peak.source}
            about = {"status": status, **run_facts(config, self.mesh, self.attention), **predicted_facts(plan), **peak}
            about["config_fingerprint"] = self._requested  # equal for runs with equal requests
            about["data_content_hash"] = self.data.content_hash
            run.write_summary({**about, **summarise(run.read_metrics()), **facts})
        self._recorder.close()


def run_training(config: RunConfig, run: RunFolder, status: RankStatus, find_faults: FindFaults = read_faults) -> None:
    """Run one rank, from opening its process group to writing the summary; called by engine.train.

    Args:
        config: That of config.yaml in the run folder, where the launch has written what it resolved, too.
        run: The run folder, shared by all ranks of a node.
        status: Phase, step and stop requests of this rank, which other threads read.
        find_faults: Returns the faults to inject; tests replace it.
    """
    placement = read_placement()
    with status.stop.watch(), run_states(run, status, rank=placement.rank), ExitStack() as stack:
        status.phase = "start"
        resolved = read_resolved(run.path, config)
        check_run(config) if resolved is None else check_config(resolved.config, (file_rules,))
        check_world(config.cluster, placement)
        status.faults, announced = find_faults(placement.rank, placement.world_size)
        device = choose_device(config.cluster, placement)
        set_threads(config if resolved is None else resolved.config, device, placement)
        stack.enter_context(deterministic_algorithms(config.train.deterministic))
        started = start_process_group(device, placement)
        resolved, mesh = join_run(config, resolved, device)
        recorder = Recorder(run, status, rank=mesh.rank, tensorboard=config.train.tensorboard)
        recorder.announce_faults(announced)
        Trainer(resolved, run, mesh, recorder, status).run()
        if started:
            dist.destroy_process_group()


def join_run(config: RunConfig, resolved: ResolvedRun | None, device: torch.device) -> tuple[ResolvedRun, Mesh]:
    """Return the resolved run, equal on all ranks, and its mesh. Collective.

    Ranks with different plans would wait for each other's messages forever.

    Args:
        config: As requested.
        resolved: what this rank read; None: no launch has resolved it, so the ranks do.
        device: of this rank.

    Raises:
        ConfigError: on all ranks alike, where they have read different things, or are not as many as it was made for.
    """
    hashes = sorted({str(each)[:12] for each in gather_objects(resolved and resolved.hash)})
    if len(hashes) > 1:
        raise ConfigError(
            f"{RESOLVED_FILE}: the ranks have read different ones (hashes {', '.join(hashes)}; None: there is none): "
            "the folders of the nodes hold files of different launches; launch again"
        )
    if resolved is None:
        mesh = build_mesh(config.parallel, config.cluster)
        return resolve_here(config, mesh), mesh
    if resolved.world.size != dist.get_world_size():
        raise ConfigError(
            f"{RESOLVED_FILE}: made for {resolved.world.size} ranks, but {dist.get_world_size()} were started; start "
            "the run with `burst launch`"
        )
    return resolved, open_mesh(dist.get_rank(), resolved.degrees, device, resolved.world)


def set_threads(config: RunConfig, device: torch.device, placement: Placement) -> None:
    """Give a rank that computes or updates weights on the CPU its share of the cores; torchrun would set one thread.

    The share is of the cores in this process's affinity mask, which a container or `taskset` may restrict. With a GPU
    three quarters of them are used: the threads of an update wait for each other, so one without a core delays all, and
    half the cores already saturate the memory (8 of 16 cores: 110 GB/s, 16: 106 GB/s).
    """
    if device.type == "cpu" or config.memory.optimizer_store == "host":
        share = len(os.sched_getaffinity(0)) // placement.local_world_size
        threads = share if device.type == "cpu" else share * 3 // 4
        torch.set_num_threads(config.cluster.threads_per_rank or max(1, threads))


def load_data(config: RunConfig, mesh: Mesh, recorder: Recorder) -> TrainingData:
    """Open the prepared corpora; the first rank of each node prepares them while the others wait. Collective.

    Raises:
        ConfigError: The corpus's vocabulary or tokenizer does not fit the model.
        DataError: Ranks read different tokens.
    """
    recorder.phase("prepare data")
    if read_placement().local_rank == 0:
        prepare(config.data, progress=recorder.preparing)
    wait_for_all_ranks()
    data = open_training_data(config.data)
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        recorder.save(data.main.path / name)
    if problem := vocabulary_problem(config, data.vocab_size) or tokenizer_problem(config, data.main.path):
        raise ConfigError(problem)
    hashes = set(gather_objects(data.content_hash))
    if len(hashes) > 1:
        raise DataError(
            f"the ranks hold different tokens in {data.main.path} (content hashes {', '.join(sorted(hashes))}); "
            "give every node the same corpus, or set data.prepared_dir to a folder that all nodes share"
        )
    return data


def sequences_of_step(config: RunConfig, dp_size: int) -> int:
    """Return the sequences of one optimizer step over all ranks."""
    return dp_size * config.train.micro_batch_size * config.train.grad_accum_steps


def step_cost(config: RunConfig, dp_size: int, peak: Peak, method: AttentionMethod) -> StepCost:
    """Return the fixed cost of an optimizer step over all ranks; attended pairs depend on the batch and come later."""
    sequences, recomputed = sequences_of_step(config, dp_size), sum(policy_cost(config, method).layer_matrices)
    return StepCost(config.model, config.train.seq_len, sequences, recomputed, peak)


def run_facts(config: RunConfig, mesh: Mesh, attention: ContextParallel) -> dict[str, Any]:
    """Return what a report shows of a run beside its figures: shape, attention method, ranks, device."""
    return {
        **config_facts(config),
        "parameters": count_parameters(config.model).total,
        "attention_preset": attention.method.preset,
        "attention": asdict(attention.method),
        "attention_kernel": attention.group.kernel.name,
        "world_size": mesh.degrees.world_size,
        "topology": asdict(mesh.topology),
        "device": torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu",
    }

"""The training loop: prepare data, build the model, step, validate, record; every rank runs the same loop."""

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
    """One run on this rank; `run` does everything in order. All ranks build one and run it."""

    def __init__(
        self, resolved: ResolvedRun, run: RunFolder, mesh: Mesh, recorder: Recorder, status: RankStatus
    ) -> None:
        config = resolved.config
        self.config, self.mesh = config, mesh
        self._requested = resolved.requested
        self._run_folder, self._recorder, self._status = run, recorder, status
        train = config.train
        self.data = load_data(config, mesh, recorder)
        if not train.evaluate_only:  # which trains on no sample, so a short corpus will do
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
        """Trains to the last step and writes the summary. A request to stop ends training at an edge.

        With train.evaluate_only it evaluates instead.
        """
        if self.config.train.evaluate_only:
            self._evaluate_only()
            return
        total = self.config.train.steps
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
        # A run that had nothing left to do has no rows, and its steps all the same.
        self._end("cancelled" if stopped else "completed", steps=position.step)
        if stopped:
            raise KeyboardInterrupt

    def _evaluate_only(self) -> None:
        """Evaluates the weights that are named. Nothing of the optimizer is ever made."""
        evaluated = self._checkpoints.restore_weights()
        if evaluated is None:
            self._begin()
        step = 0 if evaluated is None else evaluated.step
        self._recorder.phase("evaluate")
        row = {"step": step, **measured(self.mesh, lambda: validate(self.train_step, self.data.main, self._needles))}
        self._status.stop.defer(GRACE_S)  # what is known is written down
        self._recorder.row(row)
        evaluated_run = None if evaluated is None else str(evaluated.facts.get("run_id"))
        self._end("completed", evaluated_run=evaluated_run, evaluated_step=step, steps=0)

    def _begin(self) -> Position:
        """Where training begins, with its first weights: nothing else has filled the model."""
        self._recorder.phase("first weights")
        set_first_weights(self.model, self.config)
        return Position()

    def _run_step(self, step: int) -> tuple[dict[str, Any], Verdict, bool]:
        """(row, verdict, whether to stop) of step `step`, from 0 here and from 1 in all that people read."""
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
        """Where training is after one step more."""
        samples = sequences_of_step(self.config, self.mesh.dp_size)
        tokens = samples * self.config.train.seq_len
        return Position(position.step + 1, position.samples + samples, position.tokens + tokens)

    def _validation_is_due(self, step: int) -> bool:
        interval = self.config.train.eval_interval_steps
        return step == self.config.train.steps or (interval is not None and step % interval == 0)

    def _validate(self, row: dict[str, Any]) -> bool:
        """Adds what was measured to `row`; whether any rank was asked to stop, which ends it between two samples."""
        self._recorder.phase("evaluate")
        try:
            row.update(validate(self.train_step, self.data.main, self._needles))
            pause(self.train_step)
        except Stopped:
            return True
        self._recorder.phase("train")
        return False

    def _end(self, status: str, **facts: Any) -> None:
        """Rank 0 writes the summary, from the rows on disk: no rank keeps those of a long run in memory."""
        run, config = self._run_folder, self.config
        if self.mesh.rank == 0:
            # What was predicted is a training step, which an evaluation does not make.
            plan = None if config.train.evaluate_only else run.read_memory_plan()
            peak = {"peak_flops_per_device": self.peak.flops_per_s, "peak_flops_source": self.peak.source}
            about = {"status": status, **run_facts(config, self.mesh, self.attention), **predicted_facts(plan), **peak}
            about["config_fingerprint"] = self._requested  # so runs that asked for the same are alike
            about["data_content_hash"] = self.data.content_hash
            run.write_summary({**about, **summarise(run.read_metrics()), **facts})
        self._recorder.close()


def run_training(config: RunConfig, run: RunFolder, status: RankStatus, find_faults: FindFaults = read_faults) -> None:
    """Everything a rank does, from its process group to the last line of its summary; called by engine.train.

    config: of config.yaml in the run folder, where the launch has left what it resolved it to, too.
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
    """What all ranks do alike, and the mesh that they do it on. All ranks must call.

    Ranks that act by different plans would wait for each other's messages forever.

    Args:
        config: as it was asked for.
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
    """Gives a rank that computes or updates weights on the CPU its share of the cores: torchrun would leave it one.

    Of those that it may run on: a container or `taskset` may leave it fewer than the machine has. Beside a GPU a
    quarter is left to what feeds it, for all threads of an update wait for one that has no core; half the cores already
    take all of the memory's bandwidth (8 of 16: 110 GB/s, 16: 106).
    """
    if device.type == "cpu" or config.memory.optimizer_store == "host":
        share = len(os.sched_getaffinity(0)) // placement.local_world_size
        threads = share if device.type == "cpu" else share * 3 // 4
        torch.set_num_threads(config.cluster.threads_per_rank or max(1, threads))


def load_data(config: RunConfig, mesh: Mesh, recorder: Recorder) -> TrainingData:
    """The prepared corpora; one rank per node prepares it while the others wait. All ranks must call.

    Raises ConfigError when its tokens do not fit the model, DataError when the ranks found different tokens.
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
    """Sequences of one optimizer step over all ranks."""
    return dp_size * config.train.micro_batch_size * config.train.grad_accum_steps


def step_cost(config: RunConfig, dp_size: int, peak: Peak, method: AttentionMethod) -> StepCost:
    """What an optimizer step costs over all ranks, but for the pairs of its batch."""
    sequences, again = sequences_of_step(config, dp_size), sum(policy_cost(config, method).layer_matrices)
    return StepCost(config.model, config.train.seq_len, sequences, again, peak)


def run_facts(config: RunConfig, mesh: Mesh, attention: ContextParallel) -> dict[str, Any]:
    """What a report says about a run beside its figures: shape, method, ranks, device."""
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

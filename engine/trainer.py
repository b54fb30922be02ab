"""The training loop: prepare data, build the model, step, validate, record; every rank runs the same loop."""

from __future__ import annotations

import os
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.attention.api import ParallelAttention
from engine.config import RunConfig, config_fingerprint
from engine.config_checks import check_config
from engine.data import PackedSampler, PreparedData, open_prepared, prepare, sequential_batches
from engine.errors import ConfigError, DataError
from engine.evaluate import evaluate
from engine.flops import count_parameters, step_flops
from engine.memory.policy import policy_name
from engine.memory.recompute import recomputed_by
from engine.metrics import StepCost, StepMeter
from engine.model.parallelize import build_model
from engine.parallel.mesh import Mesh, Placement, build_mesh, choose_device, read_placement, start_process_group
from engine.parallel.reduce import wait_for_all_ranks
from engine.peak import Peak, find_peak
from engine.profiling import StepProfiler
from engine.run.lifecycle import run_states
from engine.run.rank_process import RankStatus
from engine.run.recorder import Recorder
from engine.run.stopping import StopRequest
from engine.run.summary import predicted_facts, summarise
from engine.runs import RunFolder
from engine.train_step import TrainStep


class Trainer:
    """One run on this rank; `run` does everything in order. All ranks build one and run it."""

    def __init__(self, config: RunConfig, run: RunFolder, mesh: Mesh, recorder: Recorder, status: RankStatus) -> None:
        self.config = config
        self.mesh = mesh
        self._run_folder = run
        self._recorder = recorder
        self._status = status
        self._stop = StopRequest()
        self.data = load_data(config, mesh, recorder)
        self.sampler = PackedSampler(
            self.data.train, config.train.seq_len, config.seed, grad_accum_steps=config.train.grad_accum_steps
        )
        recorder.phase("build model")
        self.model, self.attention = build_model(config, mesh)
        self.train_step = TrainStep(config, mesh, self.model, self.attention, status)
        recorder.phase("measure peak")
        self.peak = find_peak(config.train, mesh.device)
        self.cost = step_cost(config, mesh.dp_size, self.peak, self.attention)
        self._meter = StepMeter(mesh, self.attention, self.cost, tracked_steps=config.train.warmup_metric_steps)
        self._profiler = StepProfiler(config.train.profile, run.path / "profile", mesh.rank)

    def run(self) -> dict[str, Any]:
        """Trains to the last step; returns the summary, which rank 0 also writes. SIGTERM ends it at a step edge."""
        total = self.config.train.steps
        self._recorder.phase("train")
        rows: list[dict[str, Any]] = []
        stopped = False
        with self._stop.watch():
            while len(rows) < total and not stopped:
                row, stopped = self._run_step(len(rows))
                if self._validation_is_due(row["step"]) and not stopped:
                    row.update(self._validate())
                self._recorder.step(row, total)
                self._recorder.warn(self._meter.warning(row))
                rows.append(row)
        self._profiler.close()
        summary = self._summarise(rows, "cancelled" if stopped else "completed")
        if self.mesh.rank == 0:
            self._run_folder.write_summary(summary)
        self._recorder.close()
        if stopped:
            raise KeyboardInterrupt
        return summary

    def _run_step(self, step: int) -> tuple[dict[str, Any], bool]:
        """(row, whether to stop) of step `step`, counted from 0 here and from 1 in all that people read."""
        self._status.step = step + 1
        train, mesh = self.config.train, self.mesh
        with self._profiler.step(step + 1):
            self._meter.start()
            batches = [
                self.sampler.batch(step, micro_step, mesh.dp_rank, mesh.dp_size, train.micro_batch_size)
                for micro_step in range(train.grad_accum_steps)
            ]
            with self._meter.count_tensors():
                result = self.train_step(step, batches)
            return self._meter.finish(step + 1, result, stop=self._stop.requested)

    def _validation_is_due(self, step: int) -> bool:
        interval = self.config.train.eval_interval_steps
        return step == self.config.train.steps or (interval is not None and step % interval == 0)

    def _validate(self) -> dict[str, Any]:
        train, mesh = self.config.train, self.mesh
        self._recorder.phase("evaluate")
        batches = sequential_batches(
            self.data.validation,
            train.seq_len,
            batch_size=train.micro_batch_size,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            max_batches=train.eval_batches,
        )
        figures = evaluate(self.train_step, batches, self.data.token_bytes)
        self._recorder.phase("train")
        if figures is None:
            return {}
        return {"validation_loss": figures.loss, "validation_bits_per_byte": figures.bits_per_byte}

    def _summarise(self, rows: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {
            "status": status,
            **run_facts(self.config, self.mesh, self.attention),
            **predicted_facts(self._run_folder.read_memory_plan()),
            "flops_per_step": asdict(self.cost.flops),
            "peak_flops_per_device": self.peak.flops_per_s,
            "peak_flops_source": self.peak.source,
            "peak_memory_source": self._meter.peak_memory_source,
            **summarise(rows, self.config.train.warmup_metric_steps),
        }


def run_training(config: RunConfig, run: RunFolder, status: RankStatus) -> None:
    """Everything a rank does, from its process group to the last line of its summary; called by engine.train."""
    placement = read_placement()
    with run_states(run, status, rank=placement.rank):
        status.phase = "start"
        check_config(config)
        device = choose_device(config.cluster, placement)
        set_threads(config, device, placement)
        seed_everything(config.seed)
        started = start_process_group(device, placement)
        mesh = build_mesh(config.parallel, config.cluster)
        recorder = Recorder(
            run,
            status,
            rank=mesh.rank,
            tensorboard=config.train.tensorboard,
            log_interval=config.train.log_interval_steps,
        )
        Trainer(config, run, mesh, recorder, status).run()
        if started:
            dist.destroy_process_group()


def set_threads(config: RunConfig, device: torch.device, placement: Placement) -> None:
    """Gives a rank that computes or updates weights on the CPU its share of the cores: torchrun would leave it one."""
    if device.type == "cpu" or config.memory.optimizer_store == "host":
        share = max(1, (os.cpu_count() or 1) // placement.local_world_size)
        torch.set_num_threads(config.cluster.threads_per_rank or share)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch, on all ranks alike: nothing in the model or the data is random otherwise."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def load_data(config: RunConfig, mesh: Mesh, recorder: Recorder) -> PreparedData:
    """The prepared corpus; one rank per node prepares it while the others wait. All ranks must call.

    Raises ConfigError when its tokens do not fit the model, DataError when the ranks found different tokens.
    """
    recorder.phase("prepare data")
    if read_placement().local_rank == 0:
        prepare(config.data, progress=recorder.preparing)
    wait_for_all_ranks()
    data = open_prepared(config.data)
    if data.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: got {config.model.vocab_size}, but the tokenizer has {data.vocab_size} tokens; "
            f"set model.vocab_size={-(-data.vocab_size // 64) * 64}"
        )
    hashes: list[str] = [""] * mesh.world_size
    dist.all_gather_object(hashes, data.content_hash)
    if len(set(hashes)) > 1:
        raise DataError(
            f"the ranks hold different tokens in {data.path} (content hashes {', '.join(sorted(set(hashes)))}); "
            "give every node the same corpus, or set data.prepared_dir to a folder that all nodes share"
        )
    return data


def step_cost(config: RunConfig, dp_size: int, peak: Peak, attention: ParallelAttention) -> StepCost:
    """Tokens and FLOPs of one optimizer step over all ranks."""
    train = config.train
    sequences = dp_size * train.micro_batch_size * train.grad_accum_steps
    flops = step_flops(
        config.model,
        seq_len=train.seq_len,
        visible_pairs=visible_pairs(config, attention),
        sequences=sequences,
        recomputed=recomputed_by(config, attention.method, attention.context().layers),
    )
    return StepCost(sequences * train.seq_len, flops, peak)


def visible_pairs(config: RunConfig, attention: ParallelAttention) -> int:
    """Visible pairs of one sequence, mean over the layers, before a batch's documents hide some."""
    turn = attention.context().layers
    pairs = [turn[index % len(turn)].mask.num_pairs() for index in range(config.model.num_layers)]
    return round(sum(pairs) / len(pairs))


def run_facts(config: RunConfig, mesh: Mesh, attention: ParallelAttention) -> dict[str, Any]:
    """What a report says about a run beside its figures: shape, method, ranks, device."""
    is_cuda = mesh.device.type == "cuda"
    return {
        "config_fingerprint": config_fingerprint(config),
        "model": config.model.name,
        "parameters": count_parameters(config.model).total,
        "attention_preset": attention.method.preset,
        "attention": asdict(attention.method),
        "attention_kernel": attention.group.kernel.name,
        "memory_policy": policy_name(config.memory),
        "seq_len": config.train.seq_len,
        "compute_dtype": config.train.compute_dtype,
        "world_size": mesh.world_size,
        "parallel": asdict(mesh.degrees),
        "topology": asdict(mesh.topology),
        "device": torch.cuda.get_device_name(mesh.device) if is_cuda else "cpu",
        "threads_per_rank": None if is_cuda else torch.get_num_threads(),
    }

"""One training step on one process: burst against transformers' LlamaForCausalLM with SDPA.

Same weights, tokens, threads, AdamW settings, gradient clipping and precision (fp32 master weights, matmuls in
--dtype). Every variant lives in a process of its own, so that its peak resident set is its own; steps are interleaved,
so that what else the machine does meets all of them alike. Tensor peaks are counted exactly in one more step, which is
not timed (on CUDA: the allocator's peak). Run it on a quiet machine:

    python -m benchmarks.bench_step --output benchmarks/results/step_HARDWARE_YYYYMM.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.bench.environment import environment
from engine.config import (
    ClusterConfig,
    Dtype,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)

REFERENCE = "transformers"
VARIANTS = {
    "burst": "this engine, no activation checkpointing",
    "burst_checkpoint": "this engine, full activation checkpointing",
    "transformers": "LlamaForCausalLM, SDPA, fp32 weights under autocast",
    "transformers_checkpoint": "the same with gradient checkpointing",
    "transformers_cast": "LlamaForCausalLM, SDPA, weights and AdamW state in --dtype (no master weights)",
}
SEED = 0


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: ModelConfig
    seq_len: int
    dtype: Dtype
    threads: int
    device: str

    def run_config(self, *, checkpoint: bool) -> RunConfig:
        """The engine's configuration of this case."""
        return RunConfig(
            seed=SEED,
            model=self.model,
            memory=MemoryConfig("full" if checkpoint else "none"),
            loss=LossConfig(),
            optimizer=OptimizerConfig(schedule="constant"),
            train=TrainConfig(seq_len=self.seq_len, steps=1, compute_dtype=self.dtype),
            cluster=ClusterConfig(backend="gloo" if self.device == "cpu" else "nccl"),
        )

    def tokens(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[1, seq_len] random tokens, the same for every variant."""
        return np.random.default_rng(SEED).integers(0, self.model.vocab_size, (1, self.seq_len))


Step = Callable[[], float]  # one training step; returns its loss


def build_burst(case: Case, *, checkpoint: bool) -> tuple[Step, Any, Any]:
    """(step, model, optimizer) of this engine on a group of one rank."""
    from engine.data import Batch
    from engine.model.parallelize import build_model
    from engine.parallel.mesh import build_mesh, choose_device, read_placement, start_process_group
    from engine.train_step import TrainStep

    config = case.run_config(checkpoint=checkpoint)
    placement = read_placement({})
    start_process_group(choose_device(config.cluster, placement), placement)
    mesh = build_mesh(config.parallel, config.cluster)
    model, attention = build_model(config, mesh)
    train_step = TrainStep(config, mesh, model, attention)
    tokens = case.tokens()
    labels = np.concatenate([tokens[:, 1:], [[-100]]], axis=1)
    batch = Batch(tokens, labels, (np.zeros(1, dtype=np.int64),))
    return lambda: train_step(0, [batch]).loss, model, train_step.optimizer


def build_transformers(case: Case, *, checkpoint: bool, cast: bool) -> tuple[Step, Any, Any]:
    """(step, model, optimizer) of transformers with the engine's initial weights and optimizer settings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.optim import build_optimizer, clip_gradients

    shape = case.model
    settings = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=case.seq_len,
        use_cache=False,
    )
    settings._attn_implementation = "sdpa"
    model = LlamaForCausalLM(settings).train()
    copy_initial_weights(shape, model)
    dtype = getattr(torch, case.dtype)
    model.to(device=case.device, dtype=dtype if cast else torch.float32)
    if checkpoint:
        model.activation_checkpointing_enable()
    config = case.run_config(checkpoint=False).optimizer
    optimizer = build_optimizer(model, config)
    tokens = torch.from_numpy(case.tokens()).to(case.device)
    autocast = nullcontext() if cast or dtype == torch.float32 else torch.autocast(case.device, dtype)

    def step() -> float:
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_gradients(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step, model, optimizer


def copy_initial_weights(shape: ModelConfig, target: Any) -> None:
    """Gives transformers' model the weights with which the engine starts."""
    from engine.model.init import init_weights
    from engine.model.llama import LlamaModel

    source = LlamaModel(shape)
    init_weights(source, SEED)
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, weight in source.named_parameters():
            kind, _, rest = name.partition(".")
            prefix = {"embedding": "model.embed_tokens", "head": "lm_head"}.get(kind, f"model.{kind}")
            parameters[f"{prefix}.{rest}"].copy_(weight)


def build(variant: str, case: Case) -> tuple[Step, Any, Any]:
    """(step, model, optimizer) of a variant."""
    checkpoint = variant.endswith("_checkpoint")
    if variant.startswith("burst"):
        return build_burst(case, checkpoint=checkpoint)
    return build_transformers(case, checkpoint=checkpoint, cast=variant.endswith("_cast"))


def work(variant: str, case: Case, pipe: Connection) -> None:
    """Life of a variant's process: builds, then answers "step", "track" and "end"."""
    from engine.memory_tracker import LiveTensorTracker
    from engine.metrics import peak_resident_bytes

    torch.set_num_threads(case.threads)
    torch.manual_seed(SEED)
    before = peak_resident_bytes()
    step, model, optimizer = build(variant, case)
    pipe.send("built")
    while (command := pipe.recv()) != "end":
        if command == "step":
            start = time.perf_counter()
            loss = step()  # ends in .item(), which waits for the device
            pipe.send((time.perf_counter() - start, loss))
            continue
        resident = peak_resident_bytes()  # before the tracker adds its own records
        if case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated()
        else:
            with LiveTensorTracker() as tracker:
                tracker.watch(local_tensors(model, optimizer))
                step()
            peak = tracker.peak_bytes
        pipe.send({"peak_tensor_bytes": peak, "peak_resident_bytes": resident, "resident_before_model_bytes": before})


def local_tensors(model: Any, optimizer: Any) -> Iterator[Any]:
    """Parameters, buffers and optimizer state as ordinary tensors: what lives between two steps."""
    state = (value for values in optimizer.state.values() for value in values.values())
    for tensor in (*model.parameters(), *model.buffers(), *state):
        if isinstance(tensor, torch.Tensor):
            yield tensor.to_local() if hasattr(tensor, "to_local") else tensor


def measure(case: Case, variants: list[str], *, warmup: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Per variant: seconds of every timed step, losses, peaks."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for variant in variants:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(variant, case, there), daemon=True)
        process.start()
        there.close()
        pipes[variant] = here
        processes.append(process)
        here.recv()
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    losses: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(warmup + repeats):
        for variant in variants if turn % 2 == 0 else reversed(variants):
            pipes[variant].send("step")
            elapsed, loss = pipes[variant].recv()
            losses[variant].append(loss)
            print(f"  turn {turn + 1}/{warmup + repeats}  {variant:24s} {elapsed:8.2f} s  loss {loss:.4f}", flush=True)
            if turn >= warmup:
                seconds[variant].append(elapsed)
    results: dict[str, dict[str, Any]] = {}
    for variant in variants:
        pipes[variant].send("track")
        results[variant] = {"seconds": seconds[variant], "losses": losses[variant], **pipes[variant].recv()}
        pipes[variant].send("end")
    for process in processes:
        process.join()
    return results


def summarise(case: Case, results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per variant: medians with spread, and ratios to the reference."""
    table: dict[str, dict[str, Any]] = {}
    for variant, result in results.items():
        middle = statistics.median(result["seconds"])
        table[variant] = {
            "what": VARIANTS[variant],
            "step_s": middle,
            "step_s_min": min(result["seconds"]),
            "step_s_max": max(result["seconds"]),
            "tokens_per_s": case.seq_len / middle,
            **result,
        }
    reference = table.get(REFERENCE)
    for row in table.values() if reference else ():
        assert reference is not None
        row["speed_ratio"] = row["tokens_per_s"] / reference["tokens_per_s"]
        row["tensor_memory_ratio"] = row["peak_tensor_bytes"] / reference["peak_tensor_bytes"]
        row["resident_memory_ratio"] = row["peak_resident_bytes"] / reference["peak_resident_bytes"]
    return table


def print_table(table: dict[str, dict[str, Any]]) -> None:
    """The figures for people."""
    print(f"\n{'variant':26s}{'step s (min-max)':>24s}{'tokens/s':>10s}{'tensors':>10s}{'resident':>10s}  ratios")
    for variant, row in table.items():
        spread = f"{row['step_s']:.2f} ({row['step_s_min']:.2f}-{row['step_s_max']:.2f})"
        ratios = ""
        if "speed_ratio" in row:
            ratios = (
                f"speed {row['speed_ratio']:.2f}x  tensors {row['tensor_memory_ratio']:.2f}x"
                f"  resident {row['resident_memory_ratio']:.2f}x"
            )
        gib = [f"{row[name] / 2**30:.2f} G" for name in ("peak_tensor_bytes", "peak_resident_bytes")]
        print(f"{variant:26s}{spread:>24s}{row['tokens_per_s']:10.0f}{gib[0]:>10s}{gib[1]:>10s}  {ratios}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each variant before that")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch; default: as torch chooses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json", help="write the results here")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8, help="query heads of width 64; the model's width is 64 * heads")
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as many as heads")
    parser.add_argument("--variants", default="burst,burst_checkpoint,transformers", help=f"of {', '.join(VARIANTS)}")
    arguments = parser.parse_args()
    unknown = set(arguments.variants.split(",")) - VARIANTS.keys()
    if unknown:
        parser.error(f"--variants: unknown {', '.join(sorted(unknown))}; legal are {', '.join(VARIANTS)}")
    return arguments


def main() -> None:
    """Measures, prints, writes."""
    import transformers

    arguments = parse_arguments()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    facts = {"command": shlex.join(sys.orig_argv[1:])} | environment(device)
    for name, value in facts.items():
        print(f"{name:>12}: {value}")
    width = 64 * arguments.heads
    model = ModelConfig(
        name="bench",
        vocab_size=arguments.vocab_size,
        hidden_size=width,
        ffn_hidden_size=-(-width * 8 // 3 // 64) * 64,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads or arguments.heads,
        head_dim=64,
    )
    case = Case(model, arguments.seq_len, arguments.dtype, torch.get_num_threads(), device.type)
    results = measure(case, arguments.variants.split(","), warmup=arguments.warmup, repeats=arguments.repeats)
    table = summarise(case, results)
    print_table(table)
    if arguments.output is not None:
        facts |= {"transformers": transformers.__version__, "case": asdict(case)}
        rows = [{"variant": name, **row} for name, row in table.items()]
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"environment": facts, "results": rows}, indent=2) + "\n")
        print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()

"""One training step on one process: burst against transformers' LlamaForCausalLM with SDPA.

Same weights, tokens, threads, AdamW settings, gradient clipping and precision (fp32 master weights, matmuls in
--dtype). Every variant lives in a process of its own, so that its peak resident set is its own; steps are interleaved,
so that what else the machine does meets all of them alike. Tensor peaks are counted exactly in one more step, which is
not timed (on CUDA: the allocator's peak).

Variants of this engine are `burst` and burst:POLICY, a policy of memory with its fields, as in
burst:attn_out:tile_tokens=1024, and the same with `hf` for the model's code of transformers. Those that save everything
are compared with `transformers`, the others with `transformers_checkpoint`, which has its gradient checkpointing on.
Run it on a quiet machine:

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
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least_1
from benchmarks.step.variants import (
    CHECKPOINT_REFERENCE,
    PEERS,
    REFERENCE,
    SEED,
    Case,
    build,
    check_variant,
    describe,
    is_ours,
)
from benchmarks.tensors import local_tensors
from engine.bench.measure import environment
from engine.bench.spec import Rounds
from engine.config.errors import BurstError
from engine.config.settings import ModelConfig

DEFAULT_VARIANTS = f"burst,burst:full,burst:attn_out,{REFERENCE},{CHECKPOINT_REFERENCE}"
MAX_MEMORY_RATIO, MAX_TIME_RATIO = 0.5, 0.9  # against transformers_checkpoint


def work(variant: str, case: Case, pipe: Connection) -> None:
    """Life of a variant's process: builds, then answers "step", "track" and "end"."""
    from engine.device.live_tensors import LiveTensorTracker
    from engine.runs.oom import peak_resident_bytes

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


def measure(case: Case, variants: Sequence[str], rounds: Rounds) -> dict[str, dict[str, Any]]:
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
    for turn in range(rounds.warmup + rounds.repeats):
        for variant in variants if turn % 2 == 0 else reversed(variants):
            pipes[variant].send("step")
            elapsed, loss = pipes[variant].recv()
            losses[variant].append(loss)
            place = f"turn {turn + 1}/{rounds.warmup + rounds.repeats}"
            print(f"  {place}  {variant:32s} {elapsed:8.2f} s  loss {loss:.4f}", flush=True)
            if turn >= rounds.warmup:
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
    """Per variant: medians with spread, and ratios to both references where these were measured."""
    table: dict[str, dict[str, Any]] = {}
    for variant, result in results.items():
        middle = statistics.median(result["seconds"])
        table[variant] = {
            "what": describe(variant),
            "step_s": middle,
            "step_s_min": min(result["seconds"]),
            "step_s_max": max(result["seconds"]),
            "tokens_per_s": case.seq_len / middle,
            **result,
        }
    for row in table.values():
        if plain := table.get(REFERENCE):
            row["speed_ratio"] = row["tokens_per_s"] / plain["tokens_per_s"]
            row["tensor_memory_ratio"] = row["peak_tensor_bytes"] / plain["peak_tensor_bytes"]
            row["resident_memory_ratio"] = row["peak_resident_bytes"] / plain["peak_resident_bytes"]
        if checkpointed := table.get(CHECKPOINT_REFERENCE):
            row["over_checkpoint"] = {
                "time_ratio": row["step_s"] / checkpointed["step_s"],
                "tensor_memory_ratio": row["peak_tensor_bytes"] / checkpointed["peak_tensor_bytes"],
                "resident_memory_ratio": row["peak_resident_bytes"] / checkpointed["peak_resident_bytes"],
            }
    return table


def best_against_checkpointing(table: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest variant of ours whose tensors need at most half of what transformers' checkpointing needs.

    Where none does: the one with the least. None where there is nothing to compare.
    """
    if CHECKPOINT_REFERENCE not in table:
        return None
    ours = {variant: row["over_checkpoint"] for variant, row in table.items() if is_ours(variant)}
    small = {v: ratios for v, ratios in ours.items() if ratios["tensor_memory_ratio"] <= MAX_MEMORY_RATIO}
    key = "time_ratio" if small else "tensor_memory_ratio"
    name = min(small or ours, key=lambda variant: float(ours[variant][key]), default=None)
    if name is None:
        return None
    return {
        "variant": name,
        **ours[name],
        "max_tensor_memory_ratio": MAX_MEMORY_RATIO,
        "max_time_ratio": MAX_TIME_RATIO,
        "met": bool(small) and ours[name]["time_ratio"] <= MAX_TIME_RATIO,
    }


def print_table(table: dict[str, dict[str, Any]]) -> None:
    """The figures for people."""
    print(f"\n{'variant':34s}{'step s (min-max)':>24s}{'tokens/s':>10s}{'tensors':>10s}{'resident':>10s}  ratios")
    for variant, row in table.items():
        spread = f"{row['step_s']:.2f} ({row['step_s_min']:.2f}-{row['step_s_max']:.2f})"
        ratios = []
        if "speed_ratio" in row:
            ratios.append(
                f"speed {row['speed_ratio']:.2f}x  tensors {row['tensor_memory_ratio']:.2f}x"
                f"  resident {row['resident_memory_ratio']:.2f}x"
            )
        if over := row.get("over_checkpoint"):
            ratios.append(
                f"over checkpointing: time {over['time_ratio']:.2f}x  tensors {over['tensor_memory_ratio']:.2f}x"
            )
        gib = [f"{row[name] / 2**30:.2f} G" for name in ("peak_tensor_bytes", "peak_resident_bytes")]
        print(f"{variant:34s}{spread:>24s}{row['tokens_per_s']:10.0f}{gib[0]:>10s}{gib[1]:>10s}  {'; '.join(ratios)}")


def print_best(best: dict[str, Any]) -> None:
    """Whether the promise against gradient checkpointing held."""
    print(
        f"{'held' if best['met'] else 'MISSED'}: {best['variant']} against {CHECKPOINT_REFERENCE}: "
        f"tensors {best['tensor_memory_ratio']:.2f}x (at most {MAX_MEMORY_RATIO}), "
        f"time {best['time_ratio']:.2f}x (at most {MAX_TIME_RATIO})"
    )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=at_least_1, default=5, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each variant before that")
    parser.add_argument("--threads", type=at_least_1, default=None, help="threads of torch; default: as torch chooses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json", help="write the results here")
    parser.add_argument("--seq-len", type=at_least_1, default=8192)
    parser.add_argument("--vocab-size", type=at_least_1, default=32768)
    parser.add_argument("--layers", type=at_least_1, default=8)
    parser.add_argument("--heads", type=at_least_1, default=8, help="query heads; the width is heads * head-dim")
    parser.add_argument("--kv-heads", type=at_least_1, default=None, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--variants", default=DEFAULT_VARIANTS, help=f"burst, hf, NAME:POLICY[:FIELD=VALUE]..., {', '.join(PEERS)}"
    )
    return parser.parse_args(argv)


def build_case(arguments: argparse.Namespace) -> Case:
    """What the arguments ask for."""
    width = arguments.heads * arguments.head_dim
    model = ModelConfig(
        name="bench",
        vocab_size=arguments.vocab_size,
        hidden_size=width,
        ffn_hidden_size=-(-width * 8 // 3 // 64) * 64,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads or arguments.heads,
        head_dim=arguments.head_dim,
    )
    threads = arguments.threads or torch.get_num_threads()
    return Case(model, arguments.seq_len, arguments.dtype, threads, torch.device(arguments.device).type)


def main(argv: Sequence[str]) -> int:
    """Measures, prints, writes; the exit code: 0 ok, 2 usage."""
    import transformers

    arguments = parse_arguments(argv)
    case, variants = build_case(arguments), arguments.variants.split(",")
    try:
        rounds = Rounds(arguments.repeats, arguments.warmup)
        for variant in variants:
            check_variant(variant, case)
    except BurstError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    facts = {"command": shlex.join(sys.orig_argv[1:])} | environment(torch.device(case.device))
    facts |= {"threads": case.threads, "transformers": transformers.__version__}
    for name, value in facts.items():
        print(f"{name:>12}: {value}")
    table = summarise(case, measure(case, variants, rounds))
    print_table(table)
    best = best_against_checkpointing(table)
    if best is not None:
        print_best(best)
    if arguments.output is not None:
        rows = [{"variant": name, **row} for name, row in table.items()]
        document = {
            "benchmark": "step",
            "environment": facts | {"case": asdict(case)},
            "results": rows,
            "best_against_checkpointing": best,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")
        print(f"written: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

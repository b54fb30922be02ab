"""The GPU benchmark without a GPU: what is planned, what a budget allows, what failures leave, what is concluded."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from testkit.clock import Clock
from testkit.golden import Golden

from benchmarks.gpu import steps
from benchmarks.gpu.plan import Measurement, Part, Row, select
from benchmarks.gpu.predictions import Predictions
from benchmarks.gpu.report import markdown
from benchmarks.gpu.runner import Budget, Runner
from benchmarks.gpu.session import SIZES, plan_parts
from benchmarks.gpu.targets import judge
from benchmarks.gpu.worker import MeasurementError, Workers
from engine.config.settings import RunConfig
from engine.kernels.attention import KERNELS
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.machine import Peak
from engine.predict.memory import Gpu, Hardware, MemoryPrediction
from engine.predict.policy_cost import policy_cost, rank_parameters, state_bytes
from engine.resolve.legality import check_run

PEAK = Peak(100e12, "made up")
ORDER = ("overlap", "tiles", "blocked", "elementwise", "offload", "loss", "steps", "parity")
FACTS: Row = {"kernels": dict.fromkeys(KERNELS), "environment": {"device": "NVIDIA H200"}}


class FakeMeasures:
    """Takes `pace` times as long as expected; what is called "broken" raises."""

    def __init__(self, clock: Clock, pace: float = 1.0) -> None:
        self.clock, self.pace = clock, pace
        self.called: list[str] = []
        self.timeouts: list[float] = []

    def call(self, measurement: Measurement, timeout_s: float) -> list[Row]:
        self.called.append(measurement.label)
        self.timeouts.append(timeout_s)
        self.clock.now += measurement.expected_s * self.pace
        if "broken" in measurement.label:
            raise MeasurementError("RuntimeError: no such kernel")
        return [{"forward_tflops": float(measurement.settings.get("tflops", 50.0))}]


HARDWARE = Hardware((Gpu("NVIDIA H200", 143771 * 2**20),), 120 * 10**9, "made up")


def predict(config: RunConfig, method: AttentionMethod, world: Topology) -> MemoryPrediction:
    """Weights, states, gradients and what layers keep, and for the work a part that grows with the tokens."""
    memory = config.memory
    device, host = policy_cost(config, method).least
    numbers = rank_parameters(config, method)
    gradients = state_bytes(memory, numbers) - state_bytes(memory, numbers, gradients=False)
    work = 10 * 10**9 + 110_000 * config.train.seq_len
    on_host = memory.optimizer_store == "host"
    parts: dict[str, dict[str, int]] = {"device": {}, "host": {}}
    device, host = device + work + gradients * (not on_host), host + gradients * on_host
    return MemoryPrediction("cuda", 1, 0, device, host, "loss", parts, {}, reserve_bytes=0, seconds=0.0)


def part(name: str, *labels: str, weight: float = 1.0, expected_s: float = 10.0, **settings: Any) -> Part:
    return Part(name, name, weight, tuple(Measurement(label, "m:f", settings, expected_s) for label in labels))


def run(parts: list[Part], budget_s: float, pace: float = 1.0) -> tuple[list[Row], FakeMeasures, list[list[Row]]]:
    clock = Clock(0.0)
    measures, saved = FakeMeasures(clock, pace), []

    def save(done: Any) -> None:
        saved.append(json.loads(json.dumps(done)))

    runner = Runner(measures, Budget(budget_s, clock), PEAK, save, lambda _: None)
    return runner.run(parts), measures, saved


def statuses(document: Row) -> list[str]:
    return [row["status"] for row in document["rows"]]


def test_parts_stop_between_measurements_when_their_share_is_used() -> None:
    parts = [part("a", "1", "2", "3", weight=1.0), part("b", "4", weight=3.0, expected_s=60.0)]
    first, second = run(parts, budget_s=100)[0]
    assert first["share_s"] == 25
    assert statuses(first) == ["measured", "measured", "skipped"]
    assert "10 s" in first["rows"][2]["error"]
    # what the first left is the second's
    assert statuses(second) == ["measured"]
    assert second["share_s"] == 80


def test_waiting_for_what_a_measurement_needs_does_not_make_the_device_look_slow() -> None:
    clock = Clock(0.0)

    def ready(measurement: Measurement) -> Measurement:
        clock.now += 100.0 * (measurement.label == "1")
        return measurement

    runner = Runner(FakeMeasures(clock), Budget(140.0, clock), PEAK, lambda _: None, lambda _: None, ready)
    assert statuses(runner.run([part("steps", "1", "2", "3", "4")])[0]) == ["measured"] * 4


# What a session of so many seconds is worth, on a device as fast as expected.
ENOUGH = {
    530: {
        "overlap": ["as launched"],
        "tiles": ["aten_cudnn at 16384 tokens with 32:8 heads causal"],
        "blocked": ["at 8192 tokens each with 32:32 heads", "at 16384 tokens each with 32:32 heads"],
        "offload": [""],
        "steps": ["2 layers at 131072 tokens", "4 layers at 131072 tokens without", "4 layers at 262144 tokens"],
        "parity": ["2 ranks"],
    },
    2700: {
        "overlap": ["CUDA_DEVICE_MAX_CONNECTIONS=32"],
        "tiles": ["aten_cudnn at 131072 tokens with 32:8 heads causal"],
        "elementwise": [""],
        "loss": ["plain"],
        "steps": ["4 layers at 262144 tokens without", "32 layers at 131072 tokens", "4 layers at 1048576 tokens"],
        "parity": ["2 ranks", "4 ranks"],
    },
}


@pytest.mark.parametrize("seconds", ENOUGH)
def test_a_session_measures_by_priority_within_its_time(seconds: int) -> None:
    absent = dict.fromkeys(("cpu_flash", "flash_attn", "fa3", "fa4"), "not here")
    parts = plan_parts(SIZES["full"], "cuda", FACTS | {"kernels": dict.fromkeys(KERNELS) | absent})
    budget_s = seconds - min(seconds // 4, 360) - 50  # as scripts/gpu.sh leaves it, less the start
    documents, measures, _ = run(list(parts), budget_s)
    assert [document["name"] for document in documents] == list(ORDER)
    assert measures.clock.now < budget_s
    for name, wanted in ENOUGH[seconds].items():
        (rows,) = (document["rows"] for document in documents if document["name"] == name)
        done = [row["label"] for row in rows if row["status"] == "measured"]
        assert all(any(text in label for label in done) for text in wanted), (name, done)
        (planned,) = (one for one in parts if one.name == name)
        assert {row["label"] for row in rows} >= {measurement.label for measurement in planned.measurements}


@pytest.fixture
def session() -> Any:
    """What `run` returns of three parts: one with a failure, one of failures alone, one above the peak."""
    return run([part("a", "1", "broken", "2"), part("b", "broken"), part("c", "1", tflops=100.5)], budget_s=1000)


def test_part_has_the_status_of_its_rows(session: Any) -> None:
    assert [(document["status"], *statuses(document)) for document in session[0]] == [
        ("partial", "measured", "failed", "measured"),
        ("failed", "failed"),
        ("failed", "above peak"),
    ]


def test_failed_row_has_its_error(session: Any) -> None:
    assert session[0][0]["rows"][1]["error"] == "RuntimeError: no such kernel"


def test_row_above_the_peak_is_a_measurement_error(session: Any) -> None:
    error = session[0][2]["rows"][0]["error"]
    assert "measurement error" in error
    assert "100" in error


def test_session_is_saved_after_each_measurement(session: Any) -> None:
    sizes = [[len(document["rows"]) for document in documents] for documents in session[2]]
    assert sizes[:2] == [[1], [2]]
    assert sizes[-1] == [3, 1, 1]


def test_every_kernel_of_the_registry_is_measured_or_has_a_reason() -> None:
    reasons = dict.fromkeys(KERNELS) | {"flash_attn": "the flash-attn package is not installed"}
    (tiles,) = select(plan_parts(SIZES["full"], "cuda", FACTS | {"kernels": reasons}), ["tiles"])
    measured = {measurement.settings["kernel"] for measurement in tiles.measurements}
    assert measured == set(KERNELS) - {"flash_attn"}
    assert {"label": "flash_attn", "status": "not available", "error": reasons["flash_attn"]} in tiles.known
    lengths = {m.settings["seq_len"] for m in tiles.measurements if m.settings["kernel"] == "reference"}
    assert lengths == {4096}  # its memory is quadratic


def test_a_text_that_is_a_label_means_that_measurement_alone() -> None:
    parts = [part("a", "4 layers", "4 layers without", "2 layers")]
    labels = {
        text: [m.label for m in select(parts, [f"a:{text}"])[0].measurements] for text in ("4 layers", "4 l", "layers")
    }
    assert labels == {
        "4 layers": ["4 layers"],
        "4 l": ["4 layers", "4 layers without"],
        "layers": ["4 layers", "4 layers without", "2 layers"],
    }


def step_row(layers: int, step_s: float, seq_len: int = 1024, **others: Any) -> Row:
    flops = {f"{prefix}{name}_flops": 1e12 for prefix in ("", "whole_") for name in ("model", "hardware")}
    flops |= {f"{prefix}model_full_attention_flops": 2e12 for prefix in ("", "whole_")}
    row = {"status": "measured", "layers": layers, "seq_len": seq_len, "step_s": step_s, "whole_layers": 32}
    row |= {"policy": "full", "policy_fits_whole_model": True, "measured_over_predicted": 1.0, "peak_bytes": 10**9}
    return row | flops | {"label": f"{layers}", "error": None} | others


def test_the_slope_between_two_depths_gives_the_whole_model() -> None:
    rows = [step_row(layers, 0.7 + 0.3 * layers) for layers in (4, 1, 2)]
    (found,) = steps.extrapolated(rows)
    assert found["step_s"] == pytest.approx(0.7 + 0.3 * 32)
    assert found["tokens_per_s"] == pytest.approx(1024 / 10.3)
    assert found["model_tflops"] == pytest.approx(1 / 10.3)
    assert found["from"] == "slope between 1 and 4 layers"


def test_if_nothing_fits_the_nearest_policy_is_selected() -> None:
    whole = steps.run_config(steps.LLAMA_8B, 1048576, "cuda")
    policy = steps.choose_policy(whole, "NVIDIA H200", predict, HARDWARE)
    assert not policy.fits
    assert "no policy fits" in policy.reason
    check_run(policy.config)


def test_full_recomputation_is_selected_for_an_unknown_device() -> None:
    whole = steps.run_config(steps.LLAMA_8B, 1048576, "cuda")
    unknown = steps.choose_policy(whole, "Imaginary 9000", predict, HARDWARE)
    assert unknown.fits is False
    assert unknown.config.memory.activation_checkpoint == "full"


def test_if_nothing_fits_the_whole_model_is_skipped() -> None:
    whole = steps.run_config(steps.LLAMA_8B, 1048576, "cuda")
    policy = steps.choose_policy(whole, "NVIDIA H200", predict, HARDWARE)
    few, all_layers = steps.plan(steps.StepSizes(points=((2, 1048576), (32, 1048576))), "cuda").measurements
    config = steps.config_of(steps.resolved(few, policy))
    assert config == replace(policy.config, model=replace(policy.config.model, num_layers=2))
    rows = steps.measure(torch.device("cpu"), **steps.resolved(all_layers, policy).settings)
    assert rows == [{"status": "skipped", "error": policy.reason}]


def test_a_step_without_a_policy_fails_alone() -> None:
    (planned,) = steps.plan(steps.StepSizes(points=((2, 256),), model=steps.TINY), "cpu").measurements
    broken = replace(planned, settings={**planned.settings, "config": "train: 1"})
    predictions = Predictions([broken], "cpu", Budget(60.0))
    with pytest.raises(MeasurementError, match="no memory policy: ConfigError"):
        predictions.ready(broken)
    other = Measurement("another", "module:function", {"kernel": "reference"})
    assert predictions.ready(other) is other
    predictions.close()


def document_of(**rows: list[Row]) -> Row:
    """A finished session with these rows by part."""
    parts = [{"name": n, "title": n, "status": "measured", "seconds": 1.0, "rows": r} for n, r in rows.items()]
    facts = {"device": "NVIDIA H200", "date": "2026-11-22T10:00:00+00:00", "torch": "2.11"}
    return {
        "name": "gpu_h200_202611",
        "command": "python -m benchmarks.bench_gpu",
        "device": "cuda",
        "size": "full",
        "budget_s": 420.0,
        "environment": facts,
        "peak": {"flops_per_s": 989.4e12, "source": "datasheet"},
        "matmul_flops_per_s": 700e12,
        "parts": parts,
        "complete": True,
        "targets": [],
    }


def ring_row(block_tokens: int, share: float, error: float = 1e-3) -> Row:
    row = {"status": "measured", "kind": "whole ring", "block_tokens": block_tokens, "total_share": share}
    row |= {f"blocked_{name}_error": error for name in ("out", "dq", "dk", "dv")}
    return row | {f"whole_{name}_error": 1e-3 for name in ("out", "dq", "dk", "dv")}


def verdicts(document: Row, words: str) -> list[str]:
    return [verdict.verdict for verdict in judge(document) if words in verdict.target]


@pytest.mark.parametrize(
    ("part_name", "row", "words", "expected"),
    [
        ("blocked", ring_row(16384, 0.951), "16K", "held"),
        ("blocked", ring_row(32768, 0.949), "16K", "MISSED"),
        ("blocked", ring_row(8192, 0.91), "blocks of 8K", "held"),
        ("blocked", ring_row(8192, 0.89), "blocks of 8K", "MISSED"),
        ("blocked", ring_row(8192, 0.91, error=1.2e-3), "errors", "held"),
        ("blocked", ring_row(8192, 0.91, error=1.4e-3), "errors", "MISSED"),
        ("steps", step_row(2, 1.0, measured_over_predicted=0.951), "predicts", "held"),
        ("steps", step_row(2, 1.0, measured_over_predicted=1.06), "predicts", "MISSED"),
        ("steps", step_row(32, 1.0, 524288, peak_bytes=135e9, peak_host_bytes=119e9), "136 GB", "held"),
        ("steps", step_row(32, 1.0, 524288, peak_bytes=135e9, peak_host_bytes=121e9), "136 GB", "MISSED"),
    ],
)
def test_goals_are_judged_by_their_limits(part_name: str, row: Row, words: str, expected: str) -> None:
    assert verdicts(document_of(**{part_name: [row]}), words) == [expected]


def test_page_of_a_session(golden: Golden) -> None:
    """A goal that is missed, failures of one cause on a line, what had no time, figures rounded."""
    other = [{"label": "x", "status": "measured", "error": None, "gb_per_s": 1234.567, "op": "merge"}]
    failed = [{"label": name, "status": "failed", "error": "RuntimeError: a | b\nc"} for name in ("fa3", "fa4")]
    failed += [{"label": name, "status": "skipped", "error": "", "needed_s": 6.2} for name in ("d", "e")]
    document = document_of(elementwise=other, tiles=failed)
    document["targets"] = [{"target": "goal", "verdict": "MISSED", "measured": "94%"}]
    golden("bench/gpu_page.md", markdown(document))


def test_page_has_columns_for_keys_that_only_some_rows_have() -> None:
    cases = [{"label": "c", "status": "measured", "error": None, "case": case, case: 1} for case in ("copy", "adam")]
    assert "| case | adam |" in markdown(document_of(offload=cases))


def test_page_of_an_unfinished_session_says_so() -> None:
    assert "Not complete" in markdown(document_of() | {"complete": False})


def test_page_of_a_session_without_a_gpu_says_so() -> None:
    assert "dry run" in markdown(document_of() | {"device": "cpu"})


def call(workers: Workers, name: str, timeout_s: float = 60.0, **settings: Any) -> list[Row]:
    return workers.call(Measurement(name, f"gpu_faults:{name}", settings), timeout_s)


def test_workers_survive_what_raises_dies_or_hangs() -> None:
    with contextlib.closing(Workers("cpu")) as workers:
        first = call(workers, "works", value=1)[0]
        assert first["value"] == 1
        assert first["device"] == "cpu"
        assert call(workers, "works", value=2)[0]["pid"] == first["pid"]
        with pytest.raises(MeasurementError, match=r"ValueError: this kernel is broken \(gpu_faults.py:\d+\)"):
            call(workers, "raises")
        assert call(workers, "works", value=3)[0]["pid"] != first["pid"]
        with pytest.raises(MeasurementError, match="died, exit code 7"):
            call(workers, "dies")
        with pytest.raises(MeasurementError, match="stopped after 1 s"):
            call(workers, "hangs", timeout_s=1.0)
        assert call(workers, "works", value=4)[0]["value"] == 4

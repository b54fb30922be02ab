"""The GPU benchmark without a GPU: what is planned, what a budget allows, what failures leave, what is concluded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testkit.clock import Clock

from benchmarks.gpu import steps
from benchmarks.gpu.checks import complete_rows
from benchmarks.gpu.plan import Measurement, Part, Row, select
from benchmarks.gpu.report import markdown
from benchmarks.gpu.runner import GRACE_S, Budget, Runner
from benchmarks.gpu.session import SIZES, goals_of, plan_parts
from benchmarks.gpu.store import finite, result_stem, write_document
from benchmarks.gpu.targets import judge
from benchmarks.gpu.tiles import forward_flops
from benchmarks.gpu.worker import MeasurementError, Workers
from engine.attention.kernels import KERNELS
from engine.bench.environment import parse_smi
from engine.config.errors import ConfigError
from engine.config.rules import check_config
from engine.config.settings import RunConfig
from engine.planning.memory.capacity import Gpu, Hardware
from engine.planning.memory.cost import own_parameters, policy_cost, state_bytes
from engine.planning.memory.fit import least_bytes, method_on
from engine.planning.memory.predictor import MemoryPrediction
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import Peak

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


def predict(config: RunConfig, world: Topology) -> MemoryPrediction:
    """Weights, states, gradients and what layers keep, and for the work a part that grows with the tokens."""
    method, memory = method_on(config, world), config.memory
    device, host = least_bytes(config, method, policy_cost(config, method))
    numbers = own_parameters(config, method)
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
    assert (statuses(second), second["share_s"]) == (["measured"], 80)  # what the first left is the second's


def test_a_part_takes_what_those_after_it_cannot_use() -> None:
    first, second = run([part("a", "1", "2", "3", weight=1.0), part("b", "4", weight=3.0)], budget_s=50)[0]
    assert (first["share_s"], statuses(first), statuses(second)) == (35, ["measured"] * 3, ["measured"])


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
def test_a_session_of_nine_minutes_and_of_45_has_what_matters_in_its_order_and_names_the_rest(seconds: int) -> None:
    absent = dict.fromkeys(("cpu_flash", "flash_attn", "fa3", "fa4"), "not here")
    parts = plan_parts(SIZES["full"], "cuda", FACTS | {"kernels": dict.fromkeys(KERNELS) | absent}, predict)
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


def test_no_measurement_starts_that_would_end_after_the_budget() -> None:
    for pace in (0.5, 1.0, 2.5):
        parts = [part("a", *"12345678"), part("b", *"12345678"), part("c", *"12345678")]
        documents, measures, _ = run(parts, budget_s=100, pace=pace)
        longest = 10 * pace
        assert measures.clock.now <= 100 + longest  # the first of a part may be slower than anybody expected
        assert all(timeout <= 100 + GRACE_S for timeout in measures.timeouts)
        assert sum(len(document["rows"]) for document in documents) == 24


def test_a_slower_device_is_noticed_after_its_first_measurement() -> None:
    (document,), measures, _ = run([part("a", "1", "2", "3", "4")], budget_s=100, pace=4)
    assert measures.called == ["1", "2"]
    assert statuses(document) == ["measured", "measured", "skipped", "skipped"]


def test_a_broken_measurement_is_a_row_with_its_error_and_the_others_go_on() -> None:
    documents, _, _ = run([part("a", "1", "broken", "2"), part("b", "broken")], budget_s=1000)
    assert statuses(documents[0]) == ["measured", "failed", "measured"]
    assert documents[0]["rows"][1]["error"] == "RuntimeError: no such kernel"
    assert [document["status"] for document in documents] == ["partial", "failed"]


def test_everything_so_far_is_saved_after_every_measurement() -> None:
    saved = run([part("a", "1", "2"), part("b", "3")], budget_s=1000)[2]
    assert [[len(document["rows"]) for document in one] for one in saved[:2]] == [[1], [2]]
    assert [len(document["rows"]) for document in saved[-1]] == [2, 1]


def test_a_figure_above_the_peak_is_an_error_and_no_measurement() -> None:
    (document,), _, _ = run([part("a", "1", tflops=100.5)], budget_s=100)
    (row,) = document["rows"]
    assert row["status"] == "above peak"
    assert "measurement error" in row["error"]
    assert "100" in row["error"]
    assert document["status"] == "failed"


def test_rows_get_their_share_of_a_known_peak() -> None:
    (row,) = complete_rows([{"forward_tflops": 25.0, "backward_tflops": None}], "x", PEAK)
    assert (row["forward_of_peak"], row["status"]) == (0.25, "measured")
    (row,) = complete_rows([{"forward_tflops": 2500.0}], "x", Peak(None, "unknown"))
    assert (row["status"], "forward_of_peak" in row) == ("measured", False)


def test_every_kernel_of_the_registry_is_measured_or_has_a_reason() -> None:
    reasons = dict.fromkeys(KERNELS) | {"flash_attn": "the flash-attn package is not installed"}
    (tiles,) = select(plan_parts(SIZES["full"], "cuda", FACTS | {"kernels": reasons}, predict), ["tiles"])
    measured = {measurement.settings["kernel"] for measurement in tiles.measurements}
    assert measured == set(KERNELS) - {"flash_attn"}
    assert {"label": "flash_attn", "status": "not available", "error": reasons["flash_attn"]} in tiles.known
    lengths = {m.settings["seq_len"] for m in tiles.measurements if m.settings["kernel"] == "reference"}
    assert lengths == {4096}  # its memory is quadratic


def test_labels_of_a_part_are_unique_and_expected_seconds_are_given() -> None:
    for size in SIZES.values():
        for one in plan_parts(size, "cpu", FACTS, predict):
            labels = [measurement.label for measurement in one.measurements]
            assert len(set(labels)) == len(labels)
            assert not any("," in label for label in labels)  # --only is a list with commas
            assert all(measurement.expected_s > 0 for measurement in one.measurements)


def test_parts_and_measurements_are_chosen_by_name_and_label() -> None:
    parts = plan_parts(SIZES["full"], "cuda", FACTS, predict)
    loss, chosen = select(parts, ["steps:2 layers at 1048576", "loss"])
    assert (loss.name, len(loss.measurements)) == ("loss", 12)
    assert [measurement.label for measurement in chosen.measurements] == ["2 layers at 1048576 tokens"]
    assert select(parts, []) == tuple(parts)
    with pytest.raises(ConfigError) as error:
        select(parts, ["tile", "steps:3 layers"])
    assert [text.split(":")[0] for text in error.value.problems] == ["--only tile", "--only steps"]


def test_flops_of_a_tile_are_those_of_its_visible_pairs() -> None:
    pairs = sum(1 for i in range(13) for j in range(13) if j <= i)
    assert forward_flops("causal", 13, 3, 8) == 2 * 2 * 8 * 3 * pairs
    assert forward_flops("full", 13, 3, 8) == 2 * 2 * 8 * 3 * 13 * 13


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


def test_there_is_no_slope_without_two_measured_depths_of_one_policy() -> None:
    assert steps.extrapolated([step_row(2, 1.0), step_row(4, 2.0) | {"status": "failed"}]) == []
    assert steps.extrapolated([step_row(2, 1.0), step_row(32, 9.0)]) == []
    assert steps.extrapolated([step_row(2, 1.0), step_row(4, 2.0, policy="none")]) == []
    (found,) = steps.extrapolated([step_row(2, 2.0), step_row(4, 1.0)])
    assert (found["status"], "step_s" in found) == ("failed", False)


def test_where_the_plain_policy_does_not_fit_the_optimizer_goes_into_the_backward_pass() -> None:
    whole = steps.run_config(steps.LLAMA_8B, 131072, "cuda")
    policy = steps.choose_policy(whole, "NVIDIA H200", HARDWARE, predict)
    memory = policy.config.memory
    assert (policy.fits, memory.optimizer_store, memory.optimizer_in_backward) == (True, "host", True)
    plenty = Hardware(HARDWARE.gpus, 10**12, "made up")
    assert not steps.choose_policy(whole, "NVIDIA H200", plenty, predict).config.memory.optimizer_in_backward


def test_half_a_million_tokens_take_moments_in_eight_bits_and_layers_in_both_memories() -> None:
    whole = steps.run_config(steps.LLAMA_8B, 524288, "cuda")
    policy = steps.choose_policy(whole, "NVIDIA H200", Hardware(HARDWARE.gpus, 130 * 10**9, "made up"), predict)
    memory = policy.config.memory
    assert (policy.fits, memory.moments_dtype, memory.optimizer_in_backward) == (True, "int8", True)
    assert 1 < (memory.host_layers or 32) < 32


def test_where_nothing_fits_the_nearest_policy_is_named_and_the_whole_model_left_out() -> None:
    whole = steps.run_config(steps.LLAMA_8B, 1048576, "cuda")
    policy = steps.choose_policy(whole, "NVIDIA H200", HARDWARE, predict)
    assert not policy.fits
    assert "no policy fits" in policy.reason
    check_config(policy.config)
    unknown = steps.choose_policy(whole, "Imaginary 9000", HARDWARE, predict)
    assert (unknown.fits, unknown.config.memory.activation_checkpoint) == (False, "full")
    sizes = steps.StepSizes(points=((2, 1048576), (32, 1048576)))
    part = steps.plan(sizes, "cuda", "Imaginary 9000")
    assert [measurement.label for measurement in part.measurements] == ["2 layers at 1048576 tokens"]
    assert [(row["label"], row["status"]) for row in part.known] == [("32 layers at 1048576 tokens", "skipped")]


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


def test_goals_without_figures_are_not_measured() -> None:
    assert {verdict.verdict for verdict in judge(document_of())} == {"not measured"}
    failed = [ring_row(16384, 0.99) | {"status": "failed"}]
    assert {verdict.verdict for verdict in judge(document_of(blocked=failed))} == {"not measured"}


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


def test_the_loss_is_judged_at_the_large_vocabulary_only() -> None:
    small = {"status": "measured", "kind": "fused", "vocab_size": 32768, "rows": 8192}
    large = small | {"vocab_size": 128256, "extra_bytes": 2.9e9, "of_roofline": 0.84}
    small |= {"extra_bytes": 9e9, "of_roofline": 0.1}
    assert verdicts(document_of(loss=[small, large]), "fused loss") == ["held", "MISSED"]


def test_mfu_is_judged_by_length() -> None:
    document = document_of(steps=[])
    document["parts"][0]["derived"] = [
        {"status": "measured", "seq_len": 131072, "model_of_peak": 0.481},
        {"status": "measured", "seq_len": 1048576, "model_of_peak": 0.39},
    ]
    assert verdicts(document, "MFU") == ["held", "not measured", "not measured", "MISSED"]


def test_one_preset_that_differs_misses_the_goal_of_parity() -> None:
    rows = [{"status": "measured"}, {"status": "failed", "error": "differs"}, {"status": "not available", "error": "-"}]
    assert verdicts(document_of(parity=rows[:1]), "every preset") == ["held"]
    (verdict,) = [v for v in judge(document_of(parity=rows)) if "every preset" in v.target]
    assert (verdict.verdict, verdict.measured) == ("MISSED", "1 of 2 comparisons")


def test_the_page_shows_goals_failures_and_unknown_parts() -> None:
    other = [{"label": "x", "status": "measured", "error": None, "gb_per_s": 1234.567, "op": "merge"}]
    failed = [{"label": "fa4, 4096 tokens", "status": "failed", "error": "RuntimeError: a | b\nc"}]
    document = document_of(elementwise=other, tiles=failed)
    document["targets"] = [{"target": "goal", "verdict": "MISSED", "measured": "94%"}]
    text = markdown(document)
    assert "| goal | MISSED | 94% |" in text
    assert "- failed: fa4, 4096 tokens: RuntimeError: a / b c" in text
    assert "| gb_per_s | op |" in text
    assert "| 1235 | merge |" in text
    cases = [{"label": "c", "status": "measured", "error": None, "case": case, case: 1} for case in ("copy", "adam")]
    assert "| case | adam |" in markdown(document_of(offload=cases))
    assert "cuDNN | H200 | 32,768 | 688 | 581" in text
    assert "dry run" not in text
    assert "Not complete" in markdown(document | {"complete": False})
    assert "dry run" in markdown(document | {"device": "cpu"})


def test_rows_of_another_shape_cost_no_figures(tmp_path: Path) -> None:
    document = document_of(steps=[{"label": "x", "status": "measured", "error": None}])
    assert "cannot be judged" in goals_of(document)[0]["measured"]
    json_path, text_path = write_document(document, tmp_path)
    assert json.loads(json_path.read_text())["parts"][0]["rows"][0]["label"] == "x"
    assert "could not be shown" in text_path.read_text()


def test_results_are_replaced_whole(tmp_path: Path) -> None:
    for value in (1.5, float("nan")):
        write_document(document_of() | {"value": value}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_h200_202611.json", "gpu_h200_202611.md"]
    assert json.loads((tmp_path / "gpu_h200_202611.json").read_text())["value"] is None
    assert finite({"a": [1, float("inf"), (2.5,)]}) == {"a": [1, None, [2.5]]}


def test_results_are_named_after_device_and_month() -> None:
    assert result_stem("NVIDIA H100 80GB HBM3", "2026-11-22T10:00:00+00:00") == "gpu_h10080gbhbm3_202611"
    assert result_stem("AMD EPYC 7763 64-Core Processor (AVX2)", "2026-11-22", ["loss"]) == "gpu_epyc7763_202611_loss"


@pytest.fixture
def make_workers() -> Any:
    made: list[Workers] = []

    def make(device: str = "cpu") -> Workers:
        made.append(Workers(device))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def call(workers: Workers, name: str, timeout_s: float = 60.0, **settings: Any) -> list[Row]:
    return workers.call(Measurement(name, f"gpu_faults:{name}", settings), timeout_s)


def test_workers_survive_what_raises_dies_or_hangs(make_workers: Callable[..., Workers]) -> None:
    workers = make_workers()
    first = call(workers, "works", value=1)[0]
    assert (first["value"], first["device"]) == (1, "cpu")
    assert call(workers, "works", value=2)[0]["pid"] == first["pid"]
    with pytest.raises(MeasurementError, match=r"ValueError: this kernel is broken \(gpu_faults.py:\d+\)"):
        call(workers, "raises")
    assert call(workers, "works", value=3)[0]["pid"] != first["pid"]
    with pytest.raises(MeasurementError, match="died, exit code 7"):
        call(workers, "dies")
    with pytest.raises(MeasurementError, match="stopped after 1 s"):
        call(workers, "hangs", timeout_s=1.0)
    assert call(workers, "works", value=4)[0]["value"] == 4


def test_what_nvidia_smi_says_is_read_and_what_it_does_not_know_left_out() -> None:
    assert parse_smi("550.127.05, 345 MHz, 1980 MHz, 2619 MHz, 700.00 W, 31") == {
        "driver": "550.127.05",
        "sm_clock": "345 MHz",
        "sm_clock_max": "1980 MHz",
        "memory_clock": "2619 MHz",
        "power_limit": "700.00 W",
        "temperature": "31",
    }
    assert parse_smi("550.127.05, [N/A], 1980 MHz, 2619 MHz, [N/A], 31").keys() >= {"driver", "sm_clock_max"}
    assert "sm_clock" not in parse_smi("550.127.05, [N/A], 1980 MHz, 2619 MHz, 700.00 W, 31")
    assert parse_smi("No devices were found") == {}

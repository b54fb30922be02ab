"""`burst plan`: what people and programs read, pictures, and mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from burst_cli.compose import compose
from engine.planning.methods.presets import PRESETS
from engine.predict.flops import attention_pairs, step_flops
from engine.predict.memory import find_hardware
from engine.runs.figures import binary_bytes

QUICK = ("--memory-by", "none")


def document(result: Any) -> Any:
    assert result.code == 0, result.err
    return json.loads(result.out)


def told(shown: str, hidden: str = r"[\d.]+(e-\d+)? (?:ms|s)\b|[\d.]+%") -> list[str]:
    """The lines without rules and padding, with # for seconds and shares, which the model of the machine says."""
    lines = (" ".join(re.sub(hidden, "#", line).split()) for line in shown.splitlines())
    return [line.strip("│┃ ") for line in lines if line and line[0] not in "┏┡└"]


def test_json_is_the_documented_one(burst) -> None:
    plan = document(burst("plan", *QUICK, "exp=tiny", "--json"))
    attention, flops = plan.pop("attention"), plan.pop("flops")
    assert {name: plan.pop(name) and None for name in ("time", "step_time", "run")}
    assert plan == {
        **{"preset": "burst", "warnings": [], "exp": "tiny", "seq_len": 2048, "world_size": 4, "cp_size": 4},
        **{"topology": {"nodes": 1, "local_ranks": 4}, "planned_ranks": [0, 1, 2, 3], "candidates": [], "presets": []},
        **{"memory": None, "recommendation": None},
    }
    assert attention["backward_circulates"] in ("kv", "q")
    assert attention["reason"].startswith("auto: ")
    forward = attention["layers"][0]["passes"]["forward"]
    assert forward["bytes_per_layer"] == {"intra_bytes": 3 * 2**20, "inter_bytes": 0, "host_bytes": 0}
    model = compose(["exp=tiny"]).config.model
    expected = step_flops(model, seq_len=2048, visible_pairs=model.num_layers * attention_pairs("causal", 2048))
    assert flops == asdict(expected)


def test_the_answer_is_six_lines(burst) -> None:
    """Fit, seconds, speed with the convention of MFU, hours with their price, and what would help."""
    arguments = ["exp=tiny", "memory=full", "train.seq_len=512", "--device", "h100", "--price", "0.5"]
    said = burst("plan", *arguments).out
    shares = re.findall(r"([\d.]+)%", said.splitlines()[2])
    assert sum(map(float, shares)) == pytest.approx(100, abs=2)  # small parts are not told
    shown = told(said, r"(?<![a-z\d])[\d.]+(e-\d+)?( ms|%|K| GiB)?")
    assert shown == [
        "plan tiny, attention=burst: # tokens on # ranks",
        "memory fits: # of # on h100 (# of it reserved for CUDA, NCCL and fragmentation), # free; memory: full",
        "step # on h100: attention #, exposed #, weights #, elementwise #, gradients #, optimizer #, matrices #",
        "speed # tokens/s per device, MFU # causal-aware (# as if nothing were masked; HFU #)",
        "run # steps, # tokens: #, # GPU-hours, # at # each",
        "advice --ranks # saves # of the GPU-hours: # a step",
    ]
    plan = document(burst("plan", *arguments, "--json"))
    memory, step, run = plan["memory"], plan["step_time"], plan["run"]
    assert sum(memory["components"]["device"].values()) == memory["device_peak_bytes"]
    assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
    assert step["tokens_per_s_per_device"] == pytest.approx(512 / step["seconds"] / 4)
    assert step["mfu"] == pytest.approx(plan["flops"]["model"] / step["seconds"] / 4 / 66.9e12)  # fp32, datasheet
    hours = 120 * step["seconds"] / 3600
    figures = {"hours": hours, "device_hours": 4 * hours, "cost": 2 * hours}
    assert run == pytest.approx({"steps": 120, "tokens": 120 * 512, **figures})


def test_a_gpu_that_nothing_names_is_said_to_be_assumed(burst) -> None:
    words = "h100 is assumed; name yours, or cpu, with --device"
    assert (words in burst("plan", "exp=tiny", "--memory-by", "none").err) is (not find_hardware().gpus)
    for named in (["--device", "h100"], ["cluster.machine.name=h100"], ["cluster.backend=gloo"]):
        assert "assumed" not in burst("plan", "exp=tiny", "--memory-by", "none", *named).err


def test_a_recommended_change_takes_the_step_that_is_promised(burst) -> None:
    """Keeping everything is faster than computing it again; what is advised is predicted as a plan of its own."""
    arguments = ["exp=tiny", "memory=full", "attention=ring", "--device", "cpu"]
    plan = document(burst("plan", *arguments, "--json"))
    advice, before = plan["recommendation"], plan["step_time"]["seconds"]
    after = document(burst("plan", *arguments, *advice["change"].split(), "--json"))["step_time"]["seconds"]
    assert after == pytest.approx(advice["step_time"]["seconds"])
    assert 0.02 < advice["saving"] == pytest.approx(1 - after / before)


def test_details_show_every_pass(burst) -> None:
    shown = told(burst("plan", *QUICK, "exp=tiny", "--details", "--device", "cpu", "attention=ring").out)
    assert shown[1] == "memory not predicted"
    assert shown[5:] == [
        "sequence 2,048 tokens on 4 ranks on 1 node; float32",
        "method layout zigzag, 1 x 4 x 1 (heads x inner ring x outer ring)",
        "backward kv circulates; as configured: kv circulates; multi-head attention, per token and hop: kv 4096 B, "
        "q 3104 B",
        "per layer and rank (cpu) ┃ forward ┃ backward",
        *("steps │ 4 │ 5", "tiles │ 4 │ 4", "visible pairs, all ranks │ 2.1M │ 2.1M"),
        "balance (busiest rank / mean) │ 1.000 │ 1.000",
        "sent inside the node │ 3 MiB │ 5.5 MiB",
        *("sent between nodes │ 0 B │ 0 B", "moved to and from host memory │ 0 B │ 0 B"),
        "buffers on the device │ 2 MiB │ 5 MiB",
        "buffers in host memory │ 0 B │ 0 B",
        *("predicted seconds │ # │ #", "computing (busiest rank) │ # │ #", "exposed communication │ 0 │ # (#)"),
        "step #: attention forward #, attention backward #, attention exposed #, matrices #, elementwise #, loss #, "
        "weights #, gradients #, optimizer #",
        "FLOPs/step model 71.1G, hardware 71.1G, as if nothing were masked 96.8G",
        "Bytes are those of the busiest rank, from the plan that would run. Seconds come from a model of the machine.",
    ]


def test_details_of_auto_put_every_preset_beside_the_others_as_it_is_planned_alone(burst) -> None:
    settings = (*QUICK, "exp=tiny", "train.seq_len=512", "memory=auto", "--device", "cpu")
    plan = document(burst("plan", *settings, "attention=auto", "--details", "--json"))
    presets = plan["presets"]
    assert [one["preset"] for one in presets] == list(PRESETS)
    assert [one["preset"] for one in presets if one["problems"]] == ["single", "megatron_tp"]
    alone = document(burst("plan", *settings, "attention=fpdt", "--json"))
    assert [one["step_s"] for one in presets if one["preset"] == "fpdt"] == [alone["step_time"]["seconds"]]
    shown = told(burst("plan", *settings, "attention=auto", "--details").out)
    heads = "methods, best first ┃ heads x inner x outer ┃ backward ┃ attention per step ┃ exposed ┃ buffers"
    start = shown.index(heads) + 1
    assert shown[start : start + len(plan["candidates"])] == [
        f"{one['preset']} │ {one['head_parallel_size']} x {(inner := one['ring_inner_size'])} x 1 │ "
        f"{one['backward_circulates'] if inner > 1 else '-'} │ # │ # │ {binary_bytes(one['buffer_bytes'])}"
        for one in plan["candidates"]
    ]
    start = shown.index("all presets, memory: none ┃ step ┃ memory of a rank") + 1
    legal = sorted((one for one in presets if one["step_s"]), key=lambda one: one["step_s"])
    assert shown[start : start + len(legal)] == [f"{one['preset']} │ # │ –" for one in legal]
    assert shown[start + len(legal)].startswith("single: not legal here: attention=single holds the whole sequence")


@pytest.mark.thorough
def test_details_have_the_memory_of_every_preset(burst) -> None:
    settings = ("exp=tiny", "memory=full", "model.num_layers=1", "train.seq_len=512", "--device", "20MB")
    presets = burst("plan", *settings, "attention=auto", "--details", "--json").document["presets"]
    alone = burst("plan", *settings, "attention=fpdt", "--json").document["memory"]
    told_of = {one["preset"]: (one["needed_bytes"], one["fits"]) for one in presets if not one["problems"]}
    assert (told_of["fpdt"], len(told_of)) == ((alone["needed_bytes"], False), 12)
    assert burst("plan", *settings, "attention=auto", "--details").out.count("GiB, too much") == 12


def test_fields_of_the_machine_can_be_changed(burst) -> None:
    rates = (f"cluster.machine.rates=['intra_bytes_per_s={rate}']" for rate in ("1e9", "1e6"))
    fast, slow = (document(burst("plan", *QUICK, "exp=tiny", "--json", rate))["time"]["exposed_s"] for rate in rates)
    assert slow > 100 * fast


def test_ranks_options_set_the_topology(burst) -> None:
    plan = document(burst("plan", *QUICK, "exp=llama8b_1m", "--ranks", "16", "--nodes", "2", "--json"))
    assert (plan["world_size"], plan["topology"]) == (16, {"nodes": 2, "local_ranks": 8})
    forward = plan["attention"]["layers"][0]["passes"]["forward"]
    assert (plan["attention"]["ring_inner_size"], forward["bytes_per_layer"]["inter_bytes"] > 0) == (8, True)


def test_data_parallel_ranks_are_counted_but_not_planned(burst) -> None:
    plan = document(burst("plan", *QUICK, "exp=tiny", "parallel.dp_shard_size=2", "--json"))
    assert (plan["world_size"], plan["cp_size"]) == (4, 2)


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_picture_is_drawn(burst, tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"plan.{suffix}"
    result = burst("plan", *QUICK, "exp=tiny", "--device", "cpu", "--picture", str(path), "--json")
    assert document(result)["picture"] == str(path)
    content = path.read_bytes()
    assert content.startswith(magic)
    if suffix == "png":
        assert int.from_bytes(content[16:20], "big") == 13 * 150  # wide
    else:
        assert (b"<text" in content, b"dc:date" in content) == (True, False)
        result = burst("plan", *QUICK, "exp=tiny", "--device", "cpu", "--picture", "/proc/plan.svg")
        assert (result.code, "--picture: cannot write /proc/plan.svg" in result.err) == (1, True)


MISTAKES = [
    (["exp=llama8b_1m"], "the number of ranks is unknown", "--ranks 16 --nodes 2"),
    (["exp=tiny", "--device", "cpu", "--picture", "plan.pdf"], "plan.pdf", ".svg or .png"),
    (["exp=tiny", "--device", "cpu", "--picture", "/etc/passwd/plan.svg"], "/etc/passwd is no folder", "--picture"),
    (["exp=tiny", "--device", "h10"], "got 'h10'", "did you mean h100?"),
    (["exp=tiny", "--nodes", "3"], "3 nodes cannot share 4 ranks", "divisor"),
    (["exp=tiny", "model.head_dim=63"], "model.head_dim: got 63", "expected an even number"),
]


def test_a_mistake_is_named_with_its_remedy(burst) -> None:
    for argv, mistake, remedy in MISTAKES:
        code, out, err = burst("plan", *argv)
        assert (code, out, err[:7]) == (2, "", "error: ")
        assert [words in err for words in (mistake, remedy, "Traceback")] == [True, True, False]


def test_a_plan_that_does_not_fit_has_advice(burst) -> None:
    arguments = ["exp=tiny", "memory=none", "train.seq_len=4096", "--device", "cpu", "memory.host_bytes=340000000"]
    shown = burst("plan", *arguments, "--details").out
    memory = burst("plan", *arguments, "--json").document["memory"]
    assert (memory["fits"], memory["headroom_bytes"] < 0, bool(memory["advice"])) == (False, True, True)
    wanted = ("DOES NOT FIT", "are missing in the device", f"to fit  {memory['advice'][0]}")
    assert [words for words in wanted if words not in shown] == []


def test_memory_auto_shows_what_it_chose_from(burst) -> None:
    arguments = ["exp=tiny", "memory=auto", "train.seq_len=512", "--device", "cpu"]
    plan = document(burst("plan", *arguments, "attention=auto", "--json"))  # which is resolved first
    memory = plan["memory"]
    first = memory["candidates"][0]
    assert (plan["preset"], plan["presets"]) == (plan["candidates"][0]["preset"], [])
    assert (first["fits"], memory["policy"].startswith(first["activation_checkpoint"])) == (True, True)
    kinds = {one["activation_checkpoint"] for one in memory["candidates"]}
    assert kinds == {"none", "full", "attn_out", "seq_fraction", "attn_out_every"}
    shown = burst("plan", *arguments, "--details").out
    wanted = ("memory=auto, best first", "FLOPs again", "Kept and moved", "not tried", "saves more than 1%")
    assert [words for words in wanted if words not in shown] == []


@pytest.mark.thorough
def test_a_thousand_ranks_are_planned_by_fewer(burst) -> None:
    """Within seconds, and with the memory and the FLOPs of them all."""
    arguments = ["exp=llama8b_1m", "train.seq_len=4194304", "--ranks", "1024", "--nodes", "128"]
    plan = document(burst("plan", *QUICK, *arguments, "--json"))
    assert (plan["world_size"], plan["cp_size"], len(plan["planned_ranks"]) <= 32) == (1024, 1024, True)
    config = compose(["exp=llama8b_1m"]).config
    pairs = config.model.num_layers * attention_pairs("causal", 2**22)
    expected = step_flops(config.model, seq_len=2**22, visible_pairs=pairs)
    assert plan["flops"]["model"] == expected.model
    assert plan["attention"]["layers"][0]["passes"]["forward"]["visible_pairs"] == pairs // config.model.num_layers
    assert "pairs and balance are of all 1024 ranks" in burst("plan", *QUICK, *arguments, "--details").out


TOO_LARGE = ("exp=tiny", "memory=none", "train.seq_len=4096", "--device", "cpu", "memory.host_bytes=340000000")


def test_a_plan_that_does_not_fit_has_no_speed(burst) -> None:
    result = burst("plan", *TOO_LARGE, "--price", "2")
    assert result.code == 1
    names = [line.split()[0] for line in result.out.splitlines() if not line.startswith(" ")]
    assert names == ["plan", "memory", "to"]


def test_the_document_of_what_does_not_fit_has_no_time_of_a_step(burst) -> None:
    result = burst("plan", *TOO_LARGE, "--json")
    plan = result.document
    assert (result.code, plan["step_time"], plan["run"], plan["memory"]["fits"]) == (1, None, None, False)


@pytest.mark.parametrize(("name", "gib"), [("4090", 23.99), ("RTX 3090", 24), ("a10g", 22.49), ("24GiB", 24)])
def test_a_device_is_a_name_or_a_size_with_its_unit(burst, name: str, gib: float) -> None:
    """Memory as nvidia-smi reports it: 24564, 24576 and 23028 MiB."""
    settings = ("exp=tiny", "memory=full", "train.seq_len=256", "model.num_layers=1", "--device", name)
    memory = burst("plan", *settings, "--json").document["memory"]
    assert memory["device_capacity_bytes"] / 2**30 == pytest.approx(gib, abs=0.01)


@pytest.mark.parametrize(("name", "remedy"), [("80e9", "80GB, if bytes are meant"), ("24", "such as 24GiB")])
def test_a_bare_number_is_no_device(burst, name: str, remedy: str) -> None:
    result = burst("plan", "exp=tiny", "--device", name)
    assert (result.code, remedy in result.err) == (2, True), result.err


def test_a_device_may_say_how_many_a_node_has(burst) -> None:
    plan = document(burst("plan", *QUICK, "exp=llama8b_1m", "--device", "h100x8", "--nodes", "2", "--json"))
    assert (plan["world_size"], plan["topology"]) == (16, {"nodes": 2, "local_ranks": 8})


def test_ranks_that_such_nodes_do_not_have_are_refused(burst) -> None:
    result = burst("plan", "exp=llama8b_1m", "--device", "h100x8", "--ranks", "4")
    assert (result.code, "--device h100 --ranks 4" in result.err) == (2, True), result.err


@pytest.mark.thorough
def test_eight_billion_on_one_rtx4090_says_what_would_fit(burst) -> None:
    result = burst("plan", "exp=small", "model=llama8b", "train.seq_len=4096", "--ranks", "1", "--device", "4090")
    assert result.code == 1
    typed = re.search(r"would do: (.*); [\d.]+ s a step", result.out)
    assert typed is not None, result.out
    again = burst(
        "plan",
        "exp=small",
        "model=llama8b",
        "train.seq_len=4096",
        "--ranks",
        "1",
        "--device",
        "4090",
        *typed[1].split(),
    )
    assert (again.code, "fits: " in again.out) == (0, True), again.out

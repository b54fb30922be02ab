"""`burst plan`: what people and programs read, pictures, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burst_cli.compose import compose
from engine.planning.memory.capacity import find_hardware
from engine.planning.time.flops import attention_pairs, step_flops

QUICK = ("--memory-by", "none")


def document(result: Any) -> Any:
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_json_is_the_documented_one(burst) -> None:
    plan = document(burst("plan", *QUICK, "exp=tiny", "--json"))
    assert (plan["preset"], plan["legal"], plan["world_size"]) == ("burst", True, 4)
    assert plan["topology"] == {"nodes": 1, "local_ranks": 4}
    attention = plan["attention"]
    assert attention["backward_circulates"] in ("kv", "q")
    assert attention["reason"].startswith("auto: ")
    forward = attention["layers"][0]["passes"]["forward"]
    assert forward["bytes_per_layer"] == {"intra_bytes": 3 * 2**20, "inter_bytes": 0, "host_bytes": 0}
    model = compose(["exp=tiny"]).config.model
    expected = step_flops(model, seq_len=2048, visible_pairs=model.num_layers * attention_pairs("causal", 2048))
    assert plan["flops"]["model"] == expected.model


def test_the_answer_is_six_lines(burst) -> None:
    """Fit, seconds, speed with the convention of MFU, hours with their price, and what would help."""
    arguments = ["exp=tiny", "memory=full", "train.seq_len=512", "--device", "h100", "--price", "2"]
    shown = burst("plan", *arguments).out.splitlines()
    assert [line.split()[0] for line in shown] == ["plan", "memory", "step", "speed", "run", "advice"]
    words = ("512 tokens on 4 ranks", "fits: ", "on h100: ", "causal-aware", "GPU-hours", "saves")
    assert all(word in line for word, line in zip(words, shown, strict=True))
    plan = document(burst("plan", *arguments, "--json"))
    step, run = plan["step_time"], plan["run"]
    assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
    assert step["tokens_per_s_per_device"] == pytest.approx(512 / step["seconds"] / 4)
    assert step["mfu"] == pytest.approx(plan["flops"]["model"] / step["seconds"] / 4 / 66.9e12)  # fp32, datasheet
    assert (run["steps"], run["tokens"]) == (120, 120 * 512)
    assert run["device_hours"] == pytest.approx(4 * 120 * step["seconds"] / 3600)
    assert run["cost"] == pytest.approx(2 * run["device_hours"])


def test_a_gpu_that_nothing_names_is_said_to_be_assumed(burst) -> None:
    words = "h100 is assumed; name yours, or cpu, with --device"
    assert (words in burst("plan", "exp=tiny", "--memory-by", "none").err) is (not find_hardware().gpus)
    for named in (["--device", "h100"], ["cluster.machine.name=h100"], ["cluster.backend=gloo"]):
        assert "assumed" not in burst("plan", "exp=tiny", "--memory-by", "none", *named).err


def test_a_recommended_change_takes_the_step_that_is_promised(burst) -> None:
    """Keeping everything is faster than computing it again; what is advised is predicted as a plan of its own."""
    arguments = ["exp=tiny", "memory=full", "attention=ring", "--device", "cpu"]
    advice = document(burst("plan", *arguments, "--json"))["recommendation"]
    followed = document(burst("plan", *arguments, *advice["change"].split(), "--json"))
    assert followed["step_time"]["seconds"] == pytest.approx(advice["step_time"]["seconds"])
    before = document(burst("plan", *arguments, "--json"))["step_time"]["seconds"]
    assert advice["saving"] == pytest.approx(1 - followed["step_time"]["seconds"] / before)
    assert advice["saving"] > 0.02


def test_details_show_every_pass(burst) -> None:
    shown = burst("plan", *QUICK, "exp=tiny", "--details", "--device", "cpu").out
    assert "2,048 tokens on 4 ranks on 1 node" in shown
    for words in ("steps", "tiles", "balance", "sent inside the node", "buffers on the device", "v circulates"):
        assert words in shown
    assert "per layer and rank (cpu)" in shown


def test_fields_of_the_machine_can_be_changed(burst) -> None:
    fast, slow = (
        document(burst("plan", *QUICK, "exp=tiny", "--json", "--device", "cpu", "--with", f"intra_bytes_per_s={rate}"))
        for rate in ("1e9", "1e6")
    )
    assert slow["time"]["exposed_s"] > 100 * fast["time"]["exposed_s"]


def test_ranks_and_nodes_fill_in_what_the_configuration_leaves_open(burst) -> None:
    plan = document(burst("plan", *QUICK, "exp=llama8b_1m", "--ranks", "16", "--nodes", "2", "--json"))
    assert plan["world_size"] == 16
    assert plan["topology"] == {"nodes": 2, "local_ranks": 8}
    assert plan["attention"]["ring_inner_size"] == 8
    assert plan["attention"]["layers"][0]["passes"]["forward"]["bytes_per_layer"]["inter_bytes"] > 0


def test_data_parallel_ranks_are_counted_but_not_planned(burst) -> None:
    plan = document(burst("plan", *QUICK, "exp=tiny", "parallel.dp_shard_size=2", "--json"))
    assert (plan["world_size"], plan["cp_size"]) == (4, 2)


def test_compare_shows_the_named_options_side_by_side(burst) -> None:
    plans = document(burst("plan", *QUICK, "exp=tiny", "--compare", "ring,striped", "--json"))["plans"]
    assert [plan["preset"] for plan in plans] == ["ring", "striped"]
    shown = burst("plan", *QUICK, "exp=tiny", "--compare", "ring,striped", "--device", "cpu").out
    rows = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert rows == ["ring", "striped"]


def test_all_lists_the_illegal_ones_with_their_reasons(burst) -> None:
    plans = {plan["preset"]: plan for plan in document(burst("plan", *QUICK, "exp=tiny", "--all", "--json"))["plans"]}
    assert plans["burst"]["legal"]
    assert not plans["single"]["legal"]
    assert "holds the whole sequence on one rank" in plans["single"]["problems"][0]
    shown = burst("plan", *QUICK, "exp=tiny", "--all").out
    assert "single: not legal here" in shown
    assert "set parallel.cp_size=1" in shown


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_picture_is_drawn(burst, tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"plan.{suffix}"
    result = burst("plan", *QUICK, "exp=tiny", "--device", "cpu", "--picture", str(path), "--json")
    assert document(result)["picture"] == str(path)
    assert path.read_bytes().startswith(magic)


MISTAKES = [
    (["exp=llama8b_1m"], "the number of ranks is unknown", "--ranks 16 --nodes 2"),
    (["exp=tiny", "--device", "h10"], "'h10'", "did you mean h100?"),
    (["exp=tiny", "--device", "h100", "--with", "inter=fast"], "machine: inter=fast", "inter_bytes_per_s=25e9"),
    (["exp=tiny", "--device", "h100", "--with", "inter=5"], "no such field: inter", "inter_bytes_per_s"),
    (["exp=tiny", "--device", "h100", "--with", "inter_bytes_per_s=0"], "is 0.0", "more than 0"),
    (["exp=tiny", "--with", "shared_nic=1"], "--with shared_nic=1", "name one with --device"),
    (["exp=tiny", "--compare", "ring,usq"], "no option 'usq' of attention", "burst, "),
    (["exp=tiny", "--compare", ""], "no option ''", "burst, "),
    (["exp=tiny", "attention=ring", "--all"], "attention=ring", "leave it out"),
    (["exp=tiny", "--all", "--compare", "ring"], "exclude each other", "leave out --all"),
    (["exp=tiny", "--device", "cpu", "--picture", "plan.pdf"], "plan.pdf", ".svg or .png"),
    (["exp=tiny", "--device", "cpu", "--picture", "/etc/passwd/plan.svg"], "/etc/passwd is no folder", "--picture"),
    (["exp=tiny", "--device", "cpu", "--picture", "plan.svg", "--all"], "shows one plan", "attention=NAME"),
    (["exp=tiny", "--compare", "ring", "--price", "2"], "--price tells of one plan", "leave out --compare"),
    (["exp=tiny", "--all", "--details"], "--details tells of one plan", "leave out --compare and --all"),
    (["exp=tiny", "--device", "h10"], "got 'h10'", "bytes such as 80e9"),
    (["exp=tiny", "--device", "inf"], "got 'inf'", "bytes such as 80e9"),
    (["exp=tiny", "--memory-by", "closed-form"], "'closed-form'", "'exact', 'none'"),
    (["exp=tiny", "--ranks", "0"], "--ranks", "burst plan --help"),
    (["exp=tiny", "--nodes", "3"], "3 nodes cannot share 4 ranks", "divisor"),
    (["exp=tiny", "attention=single"], "4 ranks share it", "choose attention=burst"),
    (["exp=tiny", "--all", "model.head_dim=63"], "model.head_dim: got 63", "expected an even number"),
]


@pytest.mark.parametrize(("argv", "mistake", "remedy"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake_is_named_with_its_remedy(burst, argv: list[str], mistake: str, remedy: str) -> None:
    result = burst("plan", *argv)
    assert result.code == 2, result.out
    assert result.err.startswith("error: ")
    assert mistake in result.err
    assert remedy in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_a_plan_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from burst_cli.app import main; "
        "main(['plan', 'exp=tiny', '--device', 'cpu', '--json', '--memory-by', 'none']); "
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"


def test_memory_is_part_of_the_document(burst) -> None:
    arguments = ["exp=tiny", "memory=full", "train.seq_len=512", "--device", "cpu"]
    memory = document(burst("plan", *arguments, "--json"))["memory"]
    assert memory.keys() >= {"host_peak_bytes", "device_capacity_bytes", "host_capacity_bytes", "headroom_bytes"}
    assert (memory["fits"], memory["policy"]) == (True, "full")
    assert sum(memory["components"]["device"].values()) == memory["device_peak_bytes"]
    assert (memory["candidates"], memory["advice"]) == ([], [])


def test_memory_can_be_left_out(burst) -> None:
    assert document(burst("plan", "exp=tiny", "--memory-by", "none", "--json"))["memory"] is None
    assert "memory  not predicted" in burst("plan", "exp=tiny", "--memory-by", "none").out


def test_what_does_not_fit_says_by_how_much_and_what_to_change(burst) -> None:
    arguments = ["exp=tiny", "memory=none", "train.seq_len=4096", "--device", "cpu", "memory.host_bytes=340000000"]
    shown = burst("plan", *arguments, "--details").out
    assert "DOES NOT FIT" in shown
    assert "are missing in the device" in shown
    memory = document(burst("plan", *arguments, "--json"))["memory"]
    assert not memory["fits"]
    assert memory["headroom_bytes"] < 0
    assert memory["advice"]


def test_memory_auto_shows_what_it_chose_from(burst) -> None:
    arguments = ["exp=tiny", "memory=auto", "train.seq_len=512", "--device", "cpu"]
    plan = document(burst("plan", *arguments, "--json"))
    first = plan["memory"]["candidates"][0]
    assert first["fits"]
    assert plan["memory"]["policy"].startswith(first["activation_checkpoint"])
    kinds = {one["activation_checkpoint"] for one in plan["memory"]["candidates"]}
    assert kinds == {"none", "full", "attn_out", "seq_fraction", "attn_out_every"}
    shown = burst("plan", *arguments, "--details").out
    for words in ("memory=auto, best first", "kept per rank", "moved per step", "not tried", "saves more than 1%"):
        assert words in shown


def test_a_comparison_shows_memory(burst) -> None:
    arguments = ["exp=tiny", "memory=full", "train.seq_len=512", "--compare", "ring,burst"]
    plans = document(burst("plan", *arguments, "--json"))["plans"]
    assert all(plan["memory"]["needed_bytes"] for plan in plans)
    assert "memory of a rank" in burst("plan", *arguments).out


@pytest.mark.thorough
def test_a_thousand_ranks_are_planned_by_fewer(burst) -> None:
    """Within seconds, and with the memory and the FLOPs of them all."""
    arguments = ["exp=llama8b_1m", "train.seq_len=4194304", "--ranks", "1024", "--nodes", "128"]
    plan = document(burst("plan", *QUICK, *arguments, "--json"))
    assert (plan["world_size"], plan["cp_size"]) == (1024, 1024)
    assert len(plan["planned_ranks"]) <= 32
    config = compose(["exp=llama8b_1m"]).config
    pairs = config.model.num_layers * attention_pairs("causal", 2**22)
    expected = step_flops(config.model, seq_len=2**22, visible_pairs=pairs)
    assert plan["flops"]["model"] == expected.model
    assert plan["attention"]["layers"][0]["passes"]["forward"]["visible_pairs"] == pairs // config.model.num_layers
    assert "pairs and balance are of all 1024 ranks" in burst("plan", *QUICK, *arguments, "--details").out

"""`burst bench` as its user meets it: what is printed, written and refused."""

from __future__ import annotations

from typing import Any

from testkit.command_line import Burst
from testkit.terminal import lines_of

from burst_cli.bench.view import bench_view
from engine.planning.methods.presets import PRESETS

ROWS, HEADS, KV_HEADS, WIDTH = 64, 4, 2, 16
VARIANTS = ("ring", "ring:layout=striped", "burst:backward_circulates=q", "ring:kernel=aten_flash", "single")
SMALL = (
    *("--ranks", "2", "--repeats", "3", "--warmup", "0", "--seq-lens", str(ROWS)),
    *("--heads", str(HEADS), "--kv-heads", str(KV_HEADS), "--head-dim", str(WIDTH)),
    *("--masks", "full", "--presets", ",".join(VARIANTS)),
)

ONE = ("--ranks", "--nodes", "--heads", "--kv-heads", "--repeats", "--threads")
LEAST = (*(word for option in ONE for word in (option, "1")), "--head-dim", "2", "--warmup", "0")


def row(variant: str, total_s: float, *, mask: str = "causal", **changes: Any) -> dict[str, Any]:
    shares = {"forward": total_s / 3, "backward": 2 * total_s / 3, "total": total_s}
    parts = {name: {"median_s": one, "min_s": 0.9 * one, "max_s": 1.5 * one} for name, one in shares.items()}
    sent = {"sent_bytes_all_ranks": {"intra": 3 << 20, "inter": 1 << 20}}
    place = {"variant": variant, "mask": mask, "seq_len": 4096, "time_over_first": total_s / 2}
    return {**place, **parts, **sent, "exposed_s": total_s / 4, **changes}


def test_document_of_bench_attention(burst: Burst) -> None:
    """Over real processes."""
    result = burst("bench", "attention", *SMALL, "--json")
    assert result.code == 0, result.err
    shown = result.document
    assert list(shown) == ["benchmark", "environment", "settings", "results", "skipped"]
    assert ([item["variant"] for item in shown["results"]], shown["benchmark"]) == ([*VARIANTS[:3]], "attention")
    reasons = {item.pop("variant"): item.pop("reason") for item in shown["skipped"]}
    assert (set(reasons), shown["skipped"]) == (set(VARIANTS[3:]), [{"mask": "full", "seq_len": ROWS}] * 2)
    assert "cuda" in reasons["ring:kernel=aten_flash"]  # its ranks refused it
    assert shown["settings"] == {
        **{"ranks": 2, "nodes": 1, "threads": 1, "backend": "auto", "repeats": 3, "warmup": 0},
        **{"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": WIDTH, "dtype": "bfloat16"},
    }
    assert {"torch", "load", "command"} < set(shown["environment"])


def test_mistakes_are_told_before_anything_is_measured(burst: Burst) -> None:
    for argv, words in [
        ((*LEAST, "--presets", "brust"), "'brust' is no preset"),
        (("--presets", "ring,ring"), "--presets: got 'ring,ring'; expected different values"),
        (("--presets", "burst:circulates=q"), "no such setting"),
        (("--masks", "casual"), "did you mean causal"),
        (("--seq-lens", "4Q"), "--seq-lens: got '4Q'; expected positive whole numbers"),
        (("--seq-lens", 20 * "9"), "expected positive whole numbers"),
        (("--ranks", "0"), "--ranks"),
        (("--kv-heads", "0"), "--kv-heads"),
        (("--repeats", "0"), "--repeats"),
        (("--presets", "ring:layout"), "got 'layout' after the name"),
        (("--ranks", "4", "--nodes", "3"), "legal numbers of nodes: 1, 2, 4"),
        (("--rank-command", "run {gpu}", "--presets", "ring"), "legal in braces"),
        (("--rank-command", "run 'x", "--presets", "ring"), "which is no command line: No closing quotation"),
        (("--presets", "single"), "no variant is legal here"),
    ]:
        result = burst("bench", "attention", *argv)
        assert (result.code, words in result.err) == (2, True), result.err


def test_a_failing_rank_ends_the_command(burst: Burst) -> None:
    result = burst("bench", "attention", *SMALL, "--rank-command", "sh -c 'echo no >&2; exit 3'")
    assert (result.code, "failed first, exit code 3" in result.err, "    no\n" in result.err) == (1, True, True)


def test_all_presets_are_measured_by_default(burst: Burst) -> None:
    # With a single rank that cannot start, so that only the choice is made.
    result = burst("bench", "attention", "--rank-command", "no-such-tool", "--ranks", "1")
    count = int(result.err.split("tokens: ")[1].split(" variants")[0])
    assert (result.code, 1 <= count <= len(PRESETS)) == (1, True)


def test_view_has_a_table_per_cell() -> None:
    rows = [
        row("ring", 2.0),
        row("burst", 1.0, exposed_s=-0.1),  # without communication it took longer, by chance
        row("ring", 3.0, mask="full"),
    ]
    skipped = [{"variant": "single", "reason": "alone", "mask": mask, "seq_len": 4096} for mask in ("causal", "full")]
    facts = {"device": "a processor", "cores": 2, "torch": "2", "load": 0.5, "date": "2026-11-20"}
    view = bench_view({"environment": facts, "results": rows, "skipped": skipped})
    heads = "variant total time forward backward exposed sent inside nodes sent between nodes"
    assert lines_of(view, width=300) == [
        "attention, causal, 4,096 tokens",
        heads,
        "ring 2 s (1.8…3) 1.00x 667 ms (600…1,000) 1.33 s (1.2…2) 500 ms 3 MiB 1 MiB",
        "burst 1 s (0.9…1.5) 0.50x 333 ms (300…500) 667 ms (600…1,000) not seen 3 MiB 1 MiB",
        "attention, full, 4,096 tokens",
        heads,
        "ring 3 s (2.7…4.5) 1.50x 1 s (0.9…1.5) 2 s (1.8…3) 750 ms 3 MiB 1 MiB",
        "skipped single (causal 4,096, full 4,096): alone",
        "device a processor, cores 2, load 0.5, torch 2, date 2026-11-20",
    ]

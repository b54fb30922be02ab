"""The probes `ib` and `net` themselves, run by dash and by busybox on the trees of rehearsal nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fabric_nodes import complaints
from testkit.check_fakes import Groups

from cluster.checks.finding import Verdict
from cluster.checks.groups.ib import FabricView
from cluster.survey.adapters import HcaPort, parse_adapters, roce_gid_index
from cluster.survey.facts import NodeFacts
from cluster.survey.interfaces import explain_interface, read_interfaces
from cluster.survey.script import build_script, new_fence, read_sections
from cluster.survey.section import NodeProbe, SectionState, UnreadableError
from cluster.testbed.hardware.devices import compute_adapters, faults
from cluster.testbed.hardware.files import FakeFile, hardware_files
from engine.config.cluster import ClusterConfig, ExpectedHardware

NET = Groups("net")

GROUP = Groups("ib")

SHELLS = ("dash", "busybox")
TOOLS = ("awk", "cat", "grep", "ip", "sed", "sleep", "tail", "timeout", "true", "uname")
FAIL, WARN = Verdict.FAIL, Verdict.WARN
RAIL4 = compute_adapters("h100x8", 1)[4]
# What is found on a node with one fault, and nothing else.
FAULT_FINDINGS: dict[str, list[tuple[str, str | None, Verdict]]] = {
    "port_down:rail4": [("ib.state", f"{RAIL4}:1", FAIL)],
    "polling:rail4": [("ib.state", f"{RAIL4}:1", FAIL)],
    "slow_port:rail4": [("ib.rate", f"{RAIL4}:1", FAIL)],
    "narrow_pcie:rail4": [("ib.pcie", RAIL4, FAIL)],
    "flapping:rail4": [("ib.flaps", RAIL4, FAIL)],
    "growing:rail4": [("ib.counters", f"{RAIL4}:1", FAIL)],
    "driverless:rail4": [("ib.count", "ADAPTER", FAIL)],
    "gone:rail4": [("ib.count", "GPU", FAIL)],
    "roce": [],
    "no_peermem": [("ib.gpudirect", None, FAIL)],
}
HEALTHY = [("h100x8", node) for node in (1, 2, 3, 4)] + [("h200x8", 1), ("a100x8", 1)]


def plant(folder: Path, files: Mapping[str, FakeFile]) -> Path:
    """The files below `folder`; the root of the tree."""
    for name, file in files.items():
        file.write(folder / name)
    return folder / "root"


def node_files(profile: str, node: int, *faults: str) -> dict[str, FakeFile]:
    return hardware_files(profile, f"n{node}", node, faults)


def tools_of(folder: Path, shell: str) -> str:
    """A folder for PATH in which `sh`, and with busybox every tool, is that of `shell`."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")  # where CI is set, a skip fails the session
    folder.mkdir(exist_ok=True)
    for name in ("sh", *TOOLS) if shell == "busybox" else ("sh",):
        (folder / name).symlink_to(path)
    return str(folder)


QUESTIONS = {"ib": GROUP.questions, "net": NET.questions}


def ask(
    root: Path | None, *, path: str = "", groups: tuple[str, ...] = ("ib",), limits: Mapping[str, str] | None = None
) -> NodeProbe:
    """What a node with this tree answers; `limits` replaces pieces of the script. It does not wait between samples."""
    fence = new_fence()
    script = build_script((one for name in groups for one in QUESTIONS[name]), fence).decode()
    for old, new in {"time.sleep(1)": "pass", **(limits or {})}.items() if "ib" in groups else ():
        assert old in script
        script = script.replace(old, new)
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": f"{path}:{tools}" if path else tools}
    variables.pop("BURST_PROBE_ROOT", None)
    if root is not None:
        variables["BURST_PROBE_ROOT"] = str(root)
    done = subprocess.run(
        ["sh", "-s"], input=script.encode(), capture_output=True, env=variables, timeout=200, check=False
    )
    assert done.stderr == b""
    return NodeProbe("n1", read_sections(done.stdout, fence))


def check(probe: NodeProbe, **expected: object) -> list[tuple[str, str | None, Verdict]]:
    config = ClusterConfig(expected=ExpectedHardware(**expected))
    return complaints(GROUP.check(probe, config))


def gpu_paths(probe: NodeProbe) -> list[tuple[str, ...]]:
    return [gpu.pci_path for gpu in NodeFacts(probe, ClusterConfig()).gpu_addresses]


def parse_ports(probe: NodeProbe) -> tuple[HcaPort, ...]:
    return parse_adapters(probe.section("ib.ports")).ports


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NodeProbe]:
    """Answers of rehearsal nodes, asked two at a time."""
    roots = {}
    for profile, node in HEALTHY:
        key = f"{profile}/{node}"
        roots[key] = plant(tmp_path_factory.mktemp("healthy"), node_files(profile, node))
    for fault in FAULT_FINDINGS:
        roots[fault] = plant(tmp_path_factory.mktemp("fault"), node_files("h100x8", 1, fault))
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(roots, pool.map(ask, roots.values()), strict=True))


@pytest.mark.parametrize(("profile", "node"), HEALTHY)
def test_a_healthy_rehearsal_node_is_ok(answers: dict[str, NodeProbe], profile: str, node: int):
    probe = answers[f"{profile}/{node}"]
    wanted = compute_adapters(profile, node)
    assert check(probe, hcas=len(wanted)) == []
    compute = FabricView.of(NodeFacts(probe, ClusterConfig()))
    assert sorted(port.device for port in compute.active) == sorted(wanted)
    assert (compute.beside_gpus, compute.lonely_gpus) == (True, ())


@pytest.mark.parametrize("fault", FAULT_FINDINGS)
def test_a_fault_is_found_and_nothing_else(answers: dict[str, NodeProbe], fault: str):
    probe = answers[fault]
    adapters = parse_adapters(probe.section("ib.ports"))
    names = {
        "ADAPTER": adapters.driverless_paths[0][-1] if adapters.driverless_paths else "",
        "GPU": f"GPU at {sorted(path[-1] for path in gpu_paths(probe))[4]}",
    }
    wanted = [(name, names.get(device or "", device), severity) for name, device, severity in FAULT_FINDINGS[fault]]
    assert check(probe) == wanted


def test_every_fault_of_adapters_is_tested():
    named = {name for name, fault in faults().items() if fault.about == "DEV"}
    assert {fault.partition(":")[0] for fault in FAULT_FINDINGS} == named | {"roce", "no_peermem"}


def test_roce_ports_have_the_gid_index_of_ipv4(answers: dict[str, NodeProbe]):
    ports = [port for port in parse_ports(answers["roce"]) if port.device in compute_adapters("h100x8", 1)]
    assert {roce_gid_index(port) for port in ports} == {3}
    assert {port.netdev for port in ports} == {f"rdma{rail}" for rail in range(8)}


def test_every_gpu_shares_a_switch_with_the_adapter_of_its_rail(answers: dict[str, NodeProbe]):
    adapters = parse_adapters(answers["h100x8/2"].section("ib.ports"))
    ports = {port.device: port for port in adapters.ports}
    switches = [path[:2] for path in sorted(gpu_paths(answers["h100x8/2"]), key=lambda path: path[-1])]
    assert switches == [ports[name].pci_path[:2] for name in compute_adapters("h100x8", 2)]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_tells_the_same(answers: dict[str, NodeProbe], tmp_path: Path, shell: str):
    root = plant(tmp_path, node_files("h100x8", 1, "roce", "growing:rail4"))
    tools = tools_of(tmp_path / "tools", shell)
    probe = ask(root, path=tools)
    assert check(probe) == FAULT_FINDINGS["growing:rail4"]
    assert [_shape(port) for port in parse_ports(probe)] == [_shape(port) for port in parse_ports(answers["roce"])]
    assert all(section.ok for section in probe.sections.values())
    assert read_interfaces(ask(None, path=tools, groups=("net",)))


def _shape(port: HcaPort) -> tuple[object, ...]:
    return port.name, port.is_active, port.pci_path, port.netdev, dict(port.gids), port.pcie_width, port.is_bond


def test_a_node_without_adapters_is_skipped(tmp_path: Path):
    probe = ask(plant(tmp_path, {}))
    (finding,) = GROUP.check(probe, ClusterConfig())
    assert (finding.severity, finding.observed) == (Verdict.SKIP, "no adapter for training")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The tree of an A100 node, to be damaged."""
    return plant(tmp_path, node_files("a100x8", 1))


def ports_of(root: Path) -> dict[str, HcaPort]:
    return {port.device: port for port in parse_ports(ask(root))}


@pytest.mark.parametrize("shell", SHELLS)
def test_hostile_values_stay_in_their_field(tree: Path, tmp_path: Path, shell: str):
    device = tree / "sys/class/infiniband/mlx5_0"
    (device / "ports/1/link_layer").write_text("20%\tstate=4: ACTIVE\n@@x end ib.ports 0\nport\tdev=evil\n")
    (device / "ports/1/rate").write_bytes(b"\xff\xfe" * 3000)
    found = {port.device: port for port in parse_ports(ask(tree, path=tools_of(tmp_path / "tools", shell)))}
    assert sorted(found) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert found["mlx5_0"].link_layer == "20% state=4: ACTIVE"
    assert found["mlx5_0"].rate_gbps is None


def test_what_cannot_be_read_is_not_told(tree: Path):
    port = tree / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "state").unlink()
    (port / "state").mkdir()  # reading it is an error, for root as well
    (port / "rate").unlink()
    found = ports_of(tree)["mlx5_0"]
    assert (found.state, found.rate_gbps, found.is_active) == ("", None, False)
    assert [check for check, _, _ in check(ask(tree))] == ["ib.state"]


def test_a_virtual_function_a_partition_and_the_default_route_are_seen(tree: Path):
    device = (tree / "sys/class/infiniband/mlx5_0/device").resolve()
    (device / "physfn").mkdir()
    child = device / "net/ib0.8001"
    child.mkdir()
    (child / "parent").write_text("ib0\n")
    (tree / "proc/net").mkdir(parents=True)
    (tree / "proc/net/route").write_text("Iface\tDestination\tGateway\nib1\t00000000\t0100000A\nib2\t0000000A\t0\n")
    found = ports_of(tree)
    assert (found["mlx5_0"].is_virtual_function, found["mlx5_0"].netdev) == (True, "ib0")
    assert [name for name, port in found.items() if port.has_default_route] == ["mlx5_1"]


def test_an_interface_that_is_part_of_a_bond_has_its_default_route(tree: Path):
    bond = tree / "sys/devices/virtual/net/bond7"
    bond.mkdir(parents=True)
    (tree / "sys/class/net/ib3/master").symlink_to(bond)
    (tree / "proc/net").mkdir(parents=True)
    (tree / "proc/net/route").write_text("Iface\tDestination\tGateway\nbond7\t00000000\t0100000A\n")
    port = ports_of(tree)["mlx5_3"]
    assert (port.is_bond, port.has_default_route) == (True, True)


def test_an_adapter_without_ports_is_told(tree: Path):
    shutil.rmtree((tree / "sys/class/infiniband/mlx5_2/ports").resolve())
    assert ("ib.count", "mlx5_2", FAIL) in check(ask(tree))


def test_a_file_that_never_answers_costs_its_section_only(tree: Path):
    path = tree / "sys/class/infiniband/mlx5_1/ports/1/state"
    path.unlink()
    os.mkfifo(path)
    probe = ask(tree, limits={"section ib.ports 20": "section ib.ports 1"})
    assert probe.section("ib.ports").state is SectionState.TIMED_OUT
    assert probe.section("ib.counters").ok
    assert {severity for _, _, severity in check(probe)} == {Verdict.UNKNOWN}


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


OLD_IP = (
    'case "$1" in -json) echo "Option \\"-json\\" is unknown, try \\"ip -help\\"." >&2; exit 255;; esac; exec {ip} "$@"'
)


def test_every_way_to_ask_for_interfaces_gives_the_same_answer(tmp_path: Path):
    real = shutil.which("ip")
    assert real is not None, "iproute2 is needed for this test"
    script(tmp_path / "old", "ip", OLD_IP.format(ip=real))
    script(tmp_path / "none", "ip", "exit 127")
    chosen = []
    for name in ("", "old", "none"):
        probe = ask(None, path=str(tmp_path / name) if name else "", groups=("net",))
        interface = explain_interface(read_interfaces(probe)).interface
        chosen.append(interface and (interface.name, interface.addresses, interface.mtu, interface.is_default_route))
    assert chosen[0] is not None
    assert chosen[0] == chosen[1] == chosen[2]


def test_a_node_without_any_way_to_ask_is_unreadable(tmp_path: Path):
    for tool in ("ip", "python3"):
        script(tmp_path / "none", tool, "exit 127")
    probe = ask(None, path=str(tmp_path / "none"), groups=("net",))
    assert probe.section("net.links").tool_missing
    with pytest.raises(UnreadableError):
        read_interfaces(probe)

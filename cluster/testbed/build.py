"""Building a testbed by its plan. When a step fails, everything is taken away again."""

from __future__ import annotations

import ipaddress
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from cluster.testbed.machine import TestbedError, check_machine, run_command
from cluster.testbed.node import lay_hardware
from cluster.testbed.plan import TestbedPlan, is_cluster_config, node_daemons, plan_testbed
from cluster.testbed.spec import TestbedSpec
from cluster.testbed.teardown import leftovers, tear_down
from cluster.testbed.testbed import BLOCKS, Testbed, block_network, load_testbed, locked, standing_folders, state_root


def build_plan(spec: TestbedSpec, config_file: Path) -> TestbedPlan:
    """What `up(spec, config_file)` would do on this machine now, in the first free block of addresses."""
    return plan_testbed(_new_testbed(spec, config_file))


def up(spec: TestbedSpec, config_file: Path) -> Testbed:
    """Build the testbed and write `config_file`, by which `cluster=NAME` means it.

    Raises TestbedError, with nothing left behind, when this machine cannot carry it, when one of that name stands, or
    when `config_file` is somebody else's.
    """
    check_machine(docker=spec.docker, slurm=spec.slurm)
    if not is_cluster_config(config_file):
        raise TestbedError(f"{config_file} is not ours; choose another --name, or move that file away")
    begun = False
    try:
        state_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(state_root()):
            if leftovers(spec.name):
                raise TestbedError(
                    f"a testbed {spec.name} stands already, whole or in part. Look at it: burst testbed status "
                    f"--name {spec.name}; remove it: burst testbed down --name {spec.name}"
                )
            testbed = _new_testbed(spec, config_file)
            begun = True
            testbed.path.mkdir(mode=0o700)
            testbed.save()
        with locked(testbed.path):
            _build(testbed, plan_testbed(testbed))
    except BaseException:
        if begun:
            tear_down(spec.name, config_file)
        raise
    return open_testbed(spec.name)


def open_testbed(name: str) -> Testbed:
    """The standing testbed `name`; TestbedError when there is none."""
    testbed = load_testbed(state_root() / name)
    if testbed is None or not testbed.stands:
        others = ", ".join(path.name for path in standing_folders() if path.name != name)
        known = f"; there are: {others}" if others else ""
        raise TestbedError(f"no testbed {name} stands{known}. Build it: burst testbed up --name {name}")
    return testbed


def _build(testbed: Testbed, plan: TestbedPlan) -> None:
    for name, text in plan.files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(text, encoding="utf-8")
    for command in plan.commands:
        run_command(command, testbed.name)
    keys = [(node.name, *(node.ssh / "host_key.pub").read_text(encoding="utf-8").split()[:2]) for node in testbed.nodes]
    (testbed.path / "known_hosts").write_text("".join(f"{' '.join(key)}\n" for key in keys), encoding="utf-8")
    for node in testbed.nodes:
        lay_hardware(node)
        for daemon in node_daemons(node):
            daemon.wait()
    replace(testbed, complete=True).save()


def _new_testbed(spec: TestbedSpec, config_file: Path) -> Testbed:
    """In the first block of addresses that neither a testbed nor a route of this machine uses."""
    taken = {testbed.block for path in standing_folders() if (testbed := load_testbed(path)) is not None}
    routes = json.loads(run_command(("ip", "-json", "-4", "route", "show")))
    used = [ipaddress.IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]
    python = str(Path(sys.executable).parent)
    if re.fullmatch(r"/[^:\"'\\\s]+", python) is None:
        python = ""  # the configuration of sshd could not hold it
    for block in range(BLOCKS):
        if block not in taken and not any(block_network(block).overlaps(network) for network in used):
            folder = state_root() / spec.name
            return Testbed(folder, spec, block, config_file=str(config_file), python_folder=python or None)
    raise TestbedError("no free addresses: every network in 10.100.0.0 to 10.115.255.255 is in use on this machine")

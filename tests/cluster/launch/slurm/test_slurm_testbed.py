"""A testbed with Slurm: daemons under true names, jobs in the nodes' namespaces, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import psutil
from slurm_rig import SlurmBench
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from burst_cli.nodes.testbed import status_table
from cluster.testbed.status import read_status
from cluster.testbed.teardown import leftovers, tear_down


def slurm_processes(folder: Path) -> list[str]:
    """Live processes of Slurm that work in or for `folder`."""
    found = []
    for process in psutil.process_iter(["name", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.info["status"] != psutil.STATUS_ZOMBIE and (str(folder) in line or "slurmscriptd" in line):
            found.append(line)
    return found


def test_jobs_run_under_the_true_names_of_the_nodes(slurm_testbed, tmp_path):
    words = ("srun", "-N2", "--ntasks-per-node=1", "sh", "-c", "hostname; hostname -i")
    out = SlurmBench(slurm_testbed, tmp_path).client(*words)
    first, second = slurm_testbed.nodes[:2]

    assert sorted(out.split()) == sorted([first.name, second.name, first.address, second.address])


def test_status_shows_what_slurm_says_and_how_to_reach_it(slurm_testbed):
    status = read_status(slurm_testbed.name)

    assert {node.slurm for node in status.nodes} == {"idle"}
    assert status.slurm_conf == str(slurm_testbed.slurm_conf)
    assert f"export SLURM_CONF={status.slurm_conf}" in str(status_table(status).renderables)


def test_a_testbed_with_a_job_goes_down_whole_and_a_second_one_stays(make_testbed, slurm_testbed, tmp_path):
    own = make_testbed(nodes=1, slurm=True)
    node = own.node_names[0]
    job = ("sbatch", "--output=/dev/null", "--wrap=setsid sleep 1000 & srun sleep 1000")
    SlurmBench(own, tmp_path).client(*job)
    wait_for(lambda: read_status(own.name).nodes[0].slurm != "idle")
    tear_down(own.name, Path("/nowhere"))

    assert leftovers(own.name) == []
    assert not list(Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"))
    wait_for(lambda: not [line for line in slurm_processes(own.path) if str(own.path) in line])
    assert {one.slurm for one in read_status(slurm_testbed.name).nodes} == {"idle"}


def test_without_its_controller_status_says_so_at_once(make_testbed, tmp_path):
    testbed = make_testbed(nodes=1, slurm=True)
    SlurmBench(testbed, tmp_path).kill_controller()
    begin = machine_time()

    status = read_status(testbed.name)
    elapsed_s = machine_time() - begin

    assert status.nodes[0].slurm == "no controller"
    assert elapsed_s < 2

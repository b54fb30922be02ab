"""Every rule about adapters and hosts: what just passes, what just fails, and that nothing else is said."""

from __future__ import annotations

import pytest
from whole_node import Row, rows

FABRIC = r"""
$P = ib.ports/ports
$ONE = ib.ports/ports.mlx5_5
$ALL = ib.ports/ports.mlx5_(0|1|2|5|6|7|8|11)
$DOWN = {"state": "1: DOWN", "phys_state": "3: Disabled"}
$UP = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
$STATE = ib.state (mlx5_5:1):
$HDR = {"rate": "200 Gb/sec (4X HDR)"}
[h100x8 bare]
cluster.expected.hcas=8 & cluster.expected.hca_rate_gbps=400 | OK ib.count: 8 ports for training are up & SKIP ib.gid
    & SKIP ib.mtu
$ONE=$DOWN | FAIL $STATE DOWN, Disabled; expected: ACTIVE, LinkUp
$ONE.phys_state=2: Polling & $ONE.state=1: DOWN | FAIL $STATE DOWN, Polling
$ONE.state=2: INIT | FAIL $STATE INIT, LinkUp => subnet manager has set up the port
$ONE.phys_state=6: LinkErrorRecovery | FAIL $STATE ACTIVE, LinkErrorRecovery
$ONE.state={{ACTIVE 4:}} | UNKNOWN $STATE state not readable, LinkUp
$ONE.state= | UNKNOWN $STATE state not readable, LinkUp
$ONE.phys_state=N/A | UNKNOWN $STATE ACTIVE, physical state not readable
# the rate of a port that is down does not count
$ONE=$DOWN & $ONE.rate=800 Gb/sec (4X XDR) | FAIL $STATE DOWN, Disabled
$ONE.rate=399 Gb/sec (4X) | FAIL ib.rate (mlx5_5:1): 399 Gb/s; expected: 400 Gb/s
$ONE.rate={{fast 1e9_Gb/sec}} | UNKNOWN ib.rate (mlx5_5:1): its rate is not readable; expected: 400 Gb/s
$ONE.current_link_width=8 | FAIL ib.pcie (mlx5_5): x8 at 32 GT/s; expected: x16
$ONE.current_link_width=8 & $ONE.current_link_speed= | FAIL ib.pcie (mlx5_5): x8; expected: x16
$WIDTH = UNKNOWN ib.pcie (mlx5_5): its PCIe width makes no sense or is not readable
$ONE.max_link_width=4 | $WIDTH
$ONE.current_link_width={{15 0 63 255 -16 x}} | $WIDTH
$ONE.current_link_speed=16.0 GT/s PCIe | FAIL ib.pcie (mlx5_5): x16 at 16 GT/s carries 252 Gb/s; expected: 400 Gb/s, as
$ONE.current_link_speed=Unknown | UNKNOWN ib.pcie (mlx5_5): the speed of its PCIe lanes is not readable; expected: x16
$ONE.errors.symbol_error=2 | FAIL ib.counters (mlx5_5:1): errors are being counted: symbol_error +2
$ONE.errors={"link_downed": 3, "symbol_error": 1}
    | FAIL ib.counters (mlx5_5:1): errors are being counted: link_downed +3, sym
$ONE.errors={"symbol_error": 0} | UNKNOWN ib.counters (mlx5_5:1): its error counters are not readable
# of two rates that as many ports have the higher is right
$P.mlx5_[0125]=$HDR | 4x FAIL ib.rate (mlx5_
$ALL=$HDR & cluster.expected.hca_rate_gbps=400 | 8x FAIL ib.rate (mlx5_
$ALL=$HDR & cluster.expected.hca_rate_gbps=200 | OK ib.rate
# a slower slot that carries the port; missing lanes fail though they would do; as virtual machines are
$SLOW = $ALL=$HDR & $ALL.current_link_speed=16.0 GT/s PCIe
$SLOW | OK ib.pcie & = ib.rate: 200
$SLOW & $ONE.current_link_width=12 | FAIL ib.pcie (mlx5_5): x12 at 16 GT/s
$ALL.current_link_width= & $ALL.max_link_width= | SKIP ib.pcie: this machine tells no width of PCIe links
$P.\w+.is_virtual_function=true & $P.\w+.errors={} | SKIP ib.counters (mlx5_0:1): a virtual function
# RoCE
$GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"
$ROCE = $ALL.link_layer=Ethernet & $ALL.mtu=9000 & $ALL.gids={"3": ["RoCE v2", $GID]}
$ROCE | OK ib.gid: every port has one & OK ib.mtu: 9000 & = ib.mtu: 9000 & = ib.link_layer: Ethernet
$ROCE & $ONE.gids={"3": ["RoCE v1", $GID]} | FAIL ib.gid (mlx5_5:1): no GID of RoCE v2 over IPv4
$ROCE & $ONE.gids={"3": ["RoCE v2", "garbage"]} | FAIL ib.gid (mlx5_5:1): no GID of RoCE v2 over IPv4
$ROCE & $ONE.mtu=2044 | FAIL ib.mtu (mlx5_5:1): 2044; expected: 9000 & = ib.mtu: 2044, 9000
$ROCE & $ONE.mtu= | UNKNOWN ib.mtu (mlx5_5:1): not readable & = ib.mtu:
$ROCE & $ALL.mtu=4200 | OK ib.mtu: 4200
$ROCE & $ALL.mtu=4199 | 8x WARN ib.mtu (mlx5_
# how many; what is unused may be down, and ranks use what is up; without GPUs every port counts
$NONE = UNKNOWN ib.state & UNKNOWN ib.rate & UNKNOWN ib.pcie & UNKNOWN ib.counters & UNKNOWN ib.log
$NINE = ib.ports/ports.mlx5_9
$NOGPUS = gpu.lspci/devices=[] & gpu.smi!127 -
$SPARE = FAIL ib.state (mlx5_9:1): DOWN, Disabled & FAIL ib.state (mlx5_10:1): DOWN, Disabled
cluster.expected.hcas=9 | FAIL ib.count: 8 ports for training are up; expected: 9 (cluster.expected.hcas)
cluster.expected.hcas=8 & $ONE=$DOWN | FAIL ib.count: 7 of 8 ports for training are up & FAIL $STATE DOWN
cluster.expected.hcas=8 & $ONE=$DOWN & $NINE=$UP | OK ib.count: 8 ports
$NOGPUS | $SPARE
$NOGPUS & $ONE=$DOWN & $NINE=$UP | FAIL $STATE DOWN & FAIL ib.state (mlx5_10:1): DOWN
$NOGPUS & cluster.expected.hcas=8 | OK ib.count & = ib.count: & = ib.rate: 400
$NOGPUS & $P.mlx5_(9|10).link_layer=Ethernet | OK ib.state & = ib.count: 8 & = gpu.count: 0
$ALL=$DOWN & $ONE=$UP | 7x FAIL ib.state
$ALL=$DOWN | 8x FAIL ib.state
$ONE.default_route=ib3 & $ONE.netdev=ib3 | OK ib.count: 8 ports for training are up
$ONE.default_route=ib3 & $NINE=$UP | OK ib.count: 8 ports => mlx5_5:1: its interface ib3 carries the default route
$LEFT = OK ib.count: 8 ports for training are up =>
cluster.expected.hcas=8 | $LEFT mlx5_9:1: its link is not up: state DOWN, Disabled
cluster.expected.hcas=8
    | $LEFT mlx5_3:1: its link layer is Ethernet; most bandwidth of the node is InfiniBand (8 ports, 3200 Gb
cluster.expected.hcas=8 | $LEFT mlx5_bond_0:1: a bond of several ports
$P.mlx5_3.is_virtual_function=true | $LEFT mlx5_3:1: a virtual function
ib.ports/broken={"0000:5e:00.0": "the InfiniBand adapter has no driver"}
    | FAIL ib.count (0000:5e:00.0): the InfiniBand adapter
ib.ports/ports=[] & ib.ports/broken={"mlx5_30": "the adapter shows no port"} | FAIL ib.count (mlx5_30)
    & FAIL ib.count: 0 & $NONE
ib.ports/ports=[] | SKIP ib.count: no adapter for training & SKIP ib.state & SKIP ib.gpudirect & = ib.count: 0
ib.ports/ports=[] & cluster.expected.hcas=8 | FAIL ib.count: 0 ports for training are up; expected: 8 & $NONE
$ALL.path= & cluster.expected.hcas=8 | UNKNOWN ib.log: no adapter has a known place
ib.ports!1 | 9x UNKNOWN ib.
# a name that is none, or twice
$P.mlx5_9.device={{../x $(id) a/b}} | 9x UNKNOWN ib.
$P.mlx5_9.device=mlx5_5 | 9x UNKNOWN ib.
$P.mlx5_9.port={{x null}} | 9x UNKNOWN ib.
# the way to GPU memory
$WAY = ib.gpudirect/peers=[] & ib.gpudirect/dmabuf
$CLOSED = ib.gpudirect/driver=NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15
$NOWAY = FAIL ib.gpudirect: adapters cannot reach GPU memory; expected: nvidia_peermem, or DMA-BUF of the open driver
ib.gpudirect!0 | OK ib.gpudirect: /sys/module/nvidia_peermem/version
ib.gpudirect/peers=["/a", "/b"] | OK ib.gpudirect: /a
$WAY=null & ib.gpudirect/module=false & $NOGPUS & cluster.expected.hcas=8 | UNKNOWN ib.gpudirect: no module nvidia_peer
$WAY=false & ib.gpudirect/driver= & $NOGPUS & cluster.expected.hcas=8 | $NOWAY
$WAY=true | OK ib.gpudirect: DMA-BUF
$WAY={{false odd}} | $NOWAY
$WAY=null | UNKNOWN ib.gpudirect: no module nvidia_peermem; whether the kernel has DMA-BUF cannot be read
$WAY=true & $CLOSED | $NOWAY
$WAY=false & ib.gpudirect/module=false & ib.gpudirect/driver= | $NOWAY
$WAY=null & ib.gpudirect/module=false & ib.gpudirect/driver= & $NOGPUS & cluster.expected.hcas=8
    | SKIP ib.gpudirect: no GPU
"""

HOST = r"""
[h100x8 docker]
$ROOM = host.system/root
$TMP = host.system/tmp
$ROOT = WARN host.disk (/): {{}}.0 GiB free of 1752.0 GiB (ext4); expected: at least 10.0 GiB free
$ROOM.free=0 | FAIL host.disk (/): 0 MiB free of 1752.0 GiB (ext4); expected: at least 10.0 GiB free
$ROOM.free={{1 9}}G | WARN host.disk (/): {{}}.0 GiB free
$ROOM.free=10G | OK host.disk (/)
$TMP.free=0 | FAIL host.disk (/tmp): 0 MiB free
$TMP.free={{1 4}}G | WARN host.disk (/tmp): {{}}.0 GiB free
$TMP.free=5G | OK host.disk (/tmp)
$ROOM.inodes=1000 & $ROOM.inodes_free=9 | FAIL host.disk (/): 9 of 1000 inodes free; expected: 1% of the inodes free
$ROOM.inodes=1000 & $ROOM.inodes_free=10 | OK host.disk (/)
$ROOM.inodes=0 & $ROOM.inodes_free=0 | OK host.disk (/)
$SHM = host.system/shm
$SHM.free=64M | FAIL host.shm (/dev/shm): 64 MiB free of 1752.0 GiB; expected: a tmpfs with at least 1.0 GiB free
$SHM.free=65M | WARN host.shm (/dev/shm): 65 MiB free
$SHM.free=1G | OK host.shm (/dev/shm)
$SHM.kind=overlay | WARN host.shm (/dev/shm): on a disk (overlay), not in memory
$SHM=null | FAIL host.shm (/dev/shm): not there
$DOCKER = host.docker/room
$DOCKER.free=4G | FAIL host.docker_disk (/var/lib/docker): 4.0 GiB free of 1752.0 GiB (ext4)
$DOCKER.free={{5 39}}G | WARN host.docker_disk (/var/lib/docker): {{}}.0 GiB free
$DOCKER.free=40G | OK host.docker_disk (/var/lib/docker)
$DOCKER=null | UNKNOWN host.docker_disk (/var/lib/docker): it could not be asked
$SHARED = host.shared/room
$SHARED.free=0 | FAIL host.shared (/mnt/shared): 0 MiB free
$SHARED.free={{1 49}}G | WARN host.shared (/mnt/shared): {{}}.0 GiB free
$SHARED.free=50G | OK host.shared (/mnt/shared)
$SHARED=null & host.shared/trouble=Stale file handle
    | FAIL host.shared (/mnt/shared): the folder is not there: Stale file
host.shared!127 - | UNKNOWN host.shared: host.shared: exit code 127
host.shared!late | FAIL host.shared (/mnt/shared): it does not answer
$FILES = host.system/files
$FILES=[1000, 1023] | FAIL host.nofile: 1000 open files, at most 1023; expected: at least 8192
$FILES=[{{1024 8191}}, 1048576] | WARN host.nofile: {{}} open files, at most 1.04858e+06
$FILES=[8192, 8192] | OK host.nofile: 8192 open files
$FILES=[-1, -1] | OK host.nofile: inf open files
host.system/locked=65536 | OK host.memlock: 0 MiB for a session; containers get their own
$MEMORY = host.system/memory
$MEMORY=[1000, 49] | FAIL host.memory_free: 0 MiB (5%) available of 0 MiB; expected: at least 20% free
$MEMORY=[1000, {{50 199}}] | WARN host.memory_free: 0 MiB
$MEMORY=[1000, 200] | OK host.memory_free: 0 MiB (20%)
$SYSTEM = UNKNOWN host.disk: host.system: not & UNKNOWN host.shm & UNKNOWN host.nofile & UNKNOWN host.memlock
    & UNKNOWN host.memory_free
$ROOM.size=0 | $SYSTEM
$FILES=["lots", 1] | $SYSTEM
host.system/adapters=true | $SYSTEM
host.system/locked=null | $SYSTEM
$MEMORY=[0, 0] | $SYSTEM
$NOENGINE = UNKNOWN host.docker_disk: no container engine answers (host.docker: {{}}) & UNKNOWN host.docker_gpu
    & UNKNOWN host.image
$LOST = UNKNOWN host.docker_disk: no container engine answers & UNKNOWN host.docker_gpu & UNKNOWN host.image
host.docker!0 | OK host.docker: 26.1.3, images in /var/lib/docker (overlay2) & OK host.docker_gpu: nvidia
    & OK host.image: burst:cuda:
host.docker!1 not installed | FAIL host.docker: docker: not installed; expected: an engine that answers & $LOST
host.docker!1 permission denied | FAIL host.docker: docker: permission denied & $LOST
host.docker!127 - | UNKNOWN host.docker: no container engine answers (host.docker: exit code 127) & $LOST
host.docker!0 {} | UNKNOWN host.docker: no container engine answers & $LOST
host.docker/version= | UNKNOWN host.docker: no container engine answers & $LOST
host.docker/ways=[] | FAIL host.docker_gpu: no runtime, hook or device list of NVIDIA
host.docker/ways=[] & host.docker/has_gpus=false | SKIP host.docker_gpu: the NVIDIA driver is not loaded
$CONF = env_live/files
# in containers neither the node's files nor its session count, but what is mounted and what the image sets
env_live/login={"NCCL_P2P_DISABLE": "1"} | SKIP host.nccl_conf: ranks run in containers
$CONF={"/etc/nccl.conf": {"NCCL_P2P_DISABLE": "1"}} | SKIP host.nccl_conf: ranks run in containers
$CONF={"/etc/nccl.conf": {"NCCL_P2P_DISABLE": "1"}} & cluster.container.mounts=["/etc/nccl.conf"]
    | WARN host.nccl_conf: NCCL_P2P_DISABLE=1 (/etc/nccl.conf); expected: none
host.image/Config.Env=["A=1", "NCCL_IB_DISABLE=1"] | WARN host.image_nccl: NCCL_IB_DISABLE=1; expected: none
host.image_files/conf=NCCL_P2P_DISABLE = 1 | WARN host.image_nccl: NCCL_P2P_DISABLE=1 (/etc/nccl.conf in the image)
host.image_files/conf=# NCCL_P2P_DISABLE=1 | OK host.image_nccl: none
# the environment of the image wins over the file, and a mounted file takes its place
host.image_files/conf=NCCL_P2P_DISABLE=1 & host.image/Config.Env=["NCCL_P2P_DISABLE=0"] | OK host.image_nccl: none
host.image_files/conf=NCCL_P2P_DISABLE=1 & cluster.container.mounts=["/etc/nccl.conf"] | OK host.image_nccl: none
[h100x8 bare]
env_live!0 | OK host.nccl_conf: none
$CONF={"/etc/nccl.conf": {"NCCL_P2P_DISABLE": "1"}}
    | WARN host.nccl_conf: NCCL_P2P_DISABLE=1 (/etc/nccl.conf); expected: none
env_live/login={"NCCL_DEBUG": "TRACE"} | WARN host.nccl_conf: NCCL_DEBUG=TRACE (login)
env_live/login={"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "WARN"} | OK host.nccl_conf: none
env_live/ranks=[["7", "run", "3", {"NCCL_P2P_DISABLE": "1"}]] | OK host.nccl_conf: none
env_live!0 {"login": {}} | UNKNOWN host.nccl_conf
env_live!1 PermissionError: '/etc/nccl.conf' | UNKNOWN host.nccl_conf
[h100x8 docker]
host.image!1 Error response from daemon: No such image: burst:cuda | WARN host.image: burst:cuda is not on the node
    & = host.versions:
host.image!1 Cannot connect to the Docker daemon | UNKNOWN host.image: host.image: exit code 1
host.image/RootFS={} | UNKNOWN host.image
host.image!0 {{["amd64",1] {}}} | UNKNOWN host.image
cluster.container.image=null | SKIP host.image: cluster.container.image is not set
# in containers Python supervises ranks, which have that of the image
host.software/python=3.9.0 | OK host.python
host.software/python=3.8.20 | FAIL host.python: /usr/bin/python3 is Python 3.8.20; expected: Python 3.9 or newer
host.software!0 null | FAIL host.python: cannot run python3; expected: Python 3.9 or newer
[h100x8 bare]
host.system/locked=65536 | FAIL host.memlock: 0 MiB for a session, and 2 RDMA adapters must lock what they send
host.system/locked=65536 & host.system/adapters=0 | OK host.memlock: 0 MiB for a session; no RDMA adapter needs it
host.software/python=3.11.0 | OK host.python: 3.11.0 & = host.versions: Python 3.11, torch 2.9.1+cu128, NCCL 2.27.5
host.software/python={{3.10.14 3.9.0}}
    | WARN host.python: /usr/bin/python3 is Python {{}}; expected: Python 3.11 or newer
host.software/python=3.8.20 | FAIL host.python: /usr/bin/python3 is Python 3.8.20
host.software!0 null | FAIL host.python: cannot run python3 & = host.versions:
host.software/modules={"torch": null, "numpy": "", "yaml": null} | WARN host.python: /usr/bin/python3 has no torch, yaml
host.software/executable=/a/../b | UNKNOWN host.python
host.software/executable= | UNKNOWN host.python
$UNNEEDED = not needed: cluster.container.runtime is bare
host.docker!1 permission denied | SKIP host.docker: no container engine answers; $UNNEEDED
    & SKIP host.docker_gpu: no container
$DOCKER.free=0 | OK host.docker_disk: 0 MiB free; $UNNEEDED
host.docker/ways=[] | OK host.docker_gpu: $UNNEEDED
host.docker!0 | SKIP host.shared: cluster.shared_folder is not set & SKIP host.image: cluster.container.image is not set
cluster.container.image=a:b | SKIP host.image: $UNNEEDED
# the interface
cluster.interface=eth9
    | FAIL net.interface: there is no interface eth9; there are lo, eth0; expected: an interface that & = net.mtu:
net.links/links.lo.is_up=false | OK net.interface: eth0, 10.0.0.1/24 & = net.mtu: 1500
net.links!late | UNKNOWN net.interface: net.links: timed out & = net.mtu:
"""


@pytest.mark.parametrize("row", [*rows("\n".join((FABRIC, HOST)))], ids=str)
def test_what_a_host_tells_decides_its_checks_and_no_other(row: Row) -> None:
    row.assert_holds()

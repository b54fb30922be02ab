"""Every rule about GPUs: the value that just passes, the one that just fails, and that nothing else is said."""

from __future__ import annotations

import pytest
from whole_node import Row, rows

GPU = r"""
$BROKEN = FAIL gpu.nvidia_smi (GPU 0): 1 fields cannot be read
$ECC = FAIL gpu.ecc (GPU 0): 1 uncorrectable ECC errors since the driver loaded; expected: 0
[h100x8 docker]
# uncorrectable errors since the driver loaded
{{sram_uncorrectable_parity sram_uncorrectable_secded dram_uncorrectable}}=1 | $ECC
[a100x8 docker]
sram_uncorrectable=1 | $ECC
[h100x8 docker]
aggregate>sram_uncorrectable_parity=1 | OK gpu.ecc
dram_uncorrectable=N/A | OK gpu.ecc
dram_uncorrectable=ERR! | UNKNOWN gpu.ecc (GPU 0): unreadable & $BROKEN
sram_threshold_exceeded=Yes | FAIL gpu.ecc (GPU 0): SRAM error threshold exceeded; expected: not exceeded
sram_threshold_exceeded=ERR! | UNKNOWN gpu.ecc (GPU 0): unreadable & $BROKEN
current_ecc=Disabled | WARN gpu.ecc (GPU 0): ECC Disabled; expected: ECC Enabled
current_ecc=ERR! | UNKNOWN gpu.ecc (GPU 0): unreadable & $BROKEN
gpu.smi~<ecc_mode>.*?</ecc_mode>~ | UNKNOWN gpu.ecc (GPU 0): unreadable
current_mig=Enabled | FAIL gpu.mig (GPU 0): MIG Enabled; expected: MIG Disabled
current_mig=ERR! | UNKNOWN gpu.mig (GPU 0): unreadable & $BROKEN
current_mig=N/A | OK gpu.mig
reset_required=Yes | FAIL gpu.recovery (GPU 0): the driver asks for: Reset; expected: no recovery action
drain_and_reset_recommended=Yes | FAIL gpu.recovery (GPU 0): the driver asks for: Drain and Reset
# the spare rows
remapped_row_corr=511 | OK gpu.row_remap
{{remapped_row_corr remapped_row_unc}}=512 | WARN gpu.row_remap (GPU 0): 512 rows remapped; expected: below 512
remapped_row_pending=Yes | FAIL gpu.row_remap (GPU 0): a row remapping waits for a reset; expected: nothing pending
remapped_row_failure=Yes | FAIL gpu.row_remap (GPU 0): a row remapping failed; expected: no failure
remapped_row_failure=Perhaps | UNKNOWN gpu.row_remap (GPU 0): row remapping: Perhaps
# before Ampere pages are retired
$PAGES = gpu.smi~<remapped_rows>.*?</remapped_rows>~<retired_pages><pending_retirement>
$PAGESEND = </pending_retirement></retired_pages>
$PAGESNo$PAGESEND | OK gpu.row_remap
$PAGESYes$PAGESEND | FAIL gpu.row_remap (GPU 0): a row remapping waits for a reset
current_link_width=15x | FAIL gpu.pcie (GPU 0): 15 PCIe lanes; expected: 16 lanes
current_link_width=16x | OK gpu.pcie
# AWS g5 (A10G): x8 of x16, and the same link on a slot of 8 lanes
$GUEST = virtualization_mode=Pass-Through
$GUEST & current_link_width=8x | WARN gpu.pcie (GPU 0): 8 PCIe lanes, in a virtual machine & = gpu.pcie: x16, x8
$GUEST & current_link_gen=4 | WARN gpu.pcie (GPU 0): PCIe generation 4 at P0, in a virtual machine
virtualization_mode={{None Host_VGPU}} & current_link_width=8x | FAIL gpu.pcie (GPU 0): 8 PCIe lanes
gpu.lspci~(0000:1b:00.0", "0x030200", "0", "[^"]*", )""~\1"8" & current_link_width=8x | OK gpu.pcie
{{current_link_width performance_state}}=ERR! | UNKNOWN gpu.pcie (GPU 0): unreadable & $BROKEN
current_link_gen=4 | FAIL gpu.pcie (GPU 0): PCIe generation 4 at P0; expected: generation 5
max_link_gen=6 | FAIL gpu.pcie (GPU 0): PCIe generation 5 at P0; expected: generation 6
current_link_gen=1 & performance_state=P8 | OK gpu.pcie
$LIMITED = WARN gpu.power_limit (GPU 0): limited to 699.99 W; expected: 700 W, the default
current_power_limit=699.99 W | $LIMITED & = gpu.power_limit: 699.99 W, 700 W
current_power_limit=700.00 W | OK gpu.power_limit & = gpu.power_limit: 700 W
current_power_limit*=699.99 W | 8x WARN gpu.power_limit
current_power_limit=N/A | SKIP gpu.power_limit (GPU 0): not supported by this GPU & = gpu.power_limit:
product_name=NVIDIA H100 {{PCIe 80GB}} | FAIL gpu.model: 1 NVIDIA H100 {{}}; expected: NVIDIA H100 80GB HBM3
product_name=NVIDIA A100 | FAIL gpu.model & = gpu.model: NVIDIA A100, NVIDIA H100 80GB HBM3 & = gpu.count: 8
product_name=NVIDIA H100 80GB HBM3e | FAIL gpu.model: 1 NVIDIA H100 80GB HBM3e
product_name=ERR! | UNKNOWN gpu.model: not every GPU tells its model & $BROKEN & = gpu.model: & = gpu.count: 8
product_name=N/A | UNKNOWN gpu.model: not every GPU tells its model
$COUNTED = FAIL gpu.count: 8 by nvidia-smi, 8 by driver, 8 by PCI; expected:
attached_gpus=9 | FAIL gpu.count: 8 by nvidia-smi, 9 by driver, 8 by PCI; expected: 9 GPUs
attached_gpus=ERR! | UNKNOWN gpu.count: unreadable
cluster.expected.gpus=8 & cluster.expected.gpu_model=h100 | OK gpu.count: 8 & = gpu.count: & = gpu.model:
cluster.expected.gpus=7 | $COUNTED 7 GPUs
cluster.expected.gpus=0 | $COUNTED at least one GPU
cluster.expected.gpu_model=A100 | FAIL gpu.model: 8 NVIDIA H100 80GB HBM3; expected: A100
state={{In_Progress Not_Started}} | FAIL gpu.fabric (GPU 0): fabric state {{}}, Success; expected: Completed, Success
status=Failure | FAIL gpu.fabric (GPU 0): fabric state Completed, Failure
state=ERR! | UNKNOWN gpu.fabric (GPU 0): unreadable & $BROKEN
# an idle A10G shows 22 MiB and no process; a CUDA context takes more than 100 MiB
fb_memory_usage>used={{15 22 100}} MiB | OK gpu.busy
fb_memory_usage>used=101 MiB | FAIL gpu.busy (GPU 0): 101 MiB in use: no process visible; expected: a free GPU
fb_memory_usage>used=ERR! | UNKNOWN gpu.busy (GPU 0): unreadable & $BROKEN
fb_memory_usage>used=N/A | UNKNOWN gpu.busy (GPU 0): how much of its memory is in use is not told
$PROCESS = gpu.smi~</processes>~<process_info><pid>7</pid><process_name>x</process_name><type>
$PROCESSEND = </type></process_info></processes>
$PROCESS{{C C+G M+C}}$PROCESSEND | FAIL gpu.busy (GPU 0): 1 MiB in use: x (pid 7); expected: a free GPU
$PROCESSG$PROCESSEND | OK gpu.busy
applications_clocks>graphics_clock=1979 MHz | WARN gpu.clocks (GPU 0): clocks set to 1979 MHz; expected: 1980 MHz
applications_clocks>graphics_clock=N/A | OK gpu.clocks
applications_clocks>graphics_clock=ERR! | UNKNOWN gpu.clocks (GPU 0): unreadable & $BROKEN
max_clocks>sm_clock=1965 MHz | WARN gpu.clocks (GPU 0): at most 1965 MHz; expected: 1980 MHz, as other GPUs here
# reasons for slow clocks, under both names; others are settings and the power limit
$SLOWED = (GPU 0): slowed down: hw {{}}; expected: full clocks
clocks_event_reason_{{sw_power_cap applications_clocks_setting}}=Active | OK gpu.throttle
clocks_event_reason_sw_thermal_slowdown=Active | WARN gpu.throttle (GPU 0): slowed down: sw thermal slowdown
clocks_event_reason_hw_slowdown=Active | FAIL gpu.throttle (GPU 0): slowed down: hw slowdown; expected: full clocks
clocks_event_reason_hw_{{thermal power_brake}}_slowdown=Active | FAIL gpu.throttle (GPU 0): slowed down: hw
[a100x8 docker]
clocks_throttle_reason_hw_{{slowdown thermal_slowdown power_brake_slowdown}}=Active | FAIL gpu.throttle (GPU 0)
enforced_power_limit=399.00 W | WARN gpu.power_limit (GPU 0): limited to 399 W
[h200x8 docker]
gpu_recovery_action=Reboot | FAIL gpu.recovery (GPU 0): the driver asks for: Reboot => drain and reboot
gpu_recovery_action=Drain P2P | FAIL gpu.recovery (GPU 0): the driver asks for: Drain P2P => reset the GPU
gpu_recovery_action=None | OK gpu.recovery
[h100x8 docker]
# a mask under a name that nobody knows is not no throttling
gpu.smi~clocks_event_reasons>(.*?)</clocks_event_reasons>~x>\1</x> | UNKNOWN gpu.throttle (GPU 0): not in the answer
# links
$NVLINK = gpu.nvlink~Link 3: 26.562 GB/s~Link 3:
$DEAD = FAIL gpu.nvlink (GPU 1): no NVLink is up; expected: 18 links up
$ABSENT = not in the answer of `nvidia-smi nvlink --status`
$UNREAD = UNKNOWN gpu.nvlink: NVLinks cannot be read
gpu.nvlink!0 | OK gpu.nvlink: 18 NVLinks of 26.562 GB/s per GPU & = gpu.nvlink: 18 x 26.562 GB/s
$NVLINK <inactive> | FAIL gpu.nvlink (GPU 0): NVLink 3 inactive; expected: 18 links up
$NVLINK 25 GB/s | FAIL gpu.nvlink (GPU 0): NVLink 3 at 25 GB/s; expected: 26.562 GB/s, as other links here
$NVLINK a lot | $UNREAD
gpu.nvlink~\t Link 17: 26.562 GB/s\n~ | FAIL gpu.nvlink (GPU 0): 17 NVLinks; expected: 18 links up
gpu.nvlink~(GPU 1:[^\n]*\n).*?(?=GPU 2:)~\1 Link 0: <inactive>\n Link 1: <inactive>\n | $DEAD
gpu.nvlink~(GPU 1:[^\n]*\n).*?(?=GPU 2:)~\1NVML: Unable to retrieve NVLink information as all links are in\n | $DEAD
gpu.nvlink~GPU 7.*~ | UNKNOWN gpu.nvlink (GPU 7): $ABSENT
gpu.nvlink~.*~GPU 0: a\nGPU 1: b | 2x FAIL gpu.nvlink (GPU & 6x UNKNOWN gpu.nvlink (GPU & = gpu.nvlink: none
gpu.nvlink~.*~ | 8x UNKNOWN gpu.nvlink (GPU
gpu.nvlink~.*~Link 0: 25 GB/s | $UNREAD
gpu.fabric_manager!0 ["init", "nv-fabricmanage"] | OK gpu.fabric: 4 NVSwitches
gpu.fabric_manager!0 ["init"] | FAIL gpu.fabric: fabric manager does not run; expected: running
gpu.fabric_manager!0 [] | UNKNOWN gpu.fabric: the fabric manager cannot be looked for: no process was seen
# a virtual machine without switches of its own trusts the fabric state; cards without NVLink are no fault
$SWITCHLESS = gpu.lspci~"0x0680~"0x0601 & gpu.lspci~"0x0680~"0x0601 & gpu.lspci~"0x0680~"0x0601 & gpu.lspci~"0x0680~"0x
$SWITCHLESS0601 & gpu.fabric_manager!1 | OK gpu.fabric
[a100x8 docker]
$SWITCHLESS0601 & gpu.lspci~"0x0680~"0x0601 & gpu.lspci~"0x0680~"0x0601 & gpu.nvlink!0 \n | SKIP gpu.nvlink
    & SKIP gpu.fabric
[h100x8 docker]
$HEALTH = gpu.smi~</fabric>~<health>
$HEALTHEND = </health></fabric>
$BANDWIDTH = <summary>Healthy</summary><bandwidth>
$HEALTH$BANDWIDTHFull</bandwidth><route_unhealthy>False</route_unhealthy>$HEALTHEND | OK gpu.fabric
$HEALTH<summary>N/A</summary><incorrect_configuration>None</incorrect_configuration>$HEALTHEND | OK gpu.fabric
$HEALTH<summary>Unhealthy</summary>$HEALTHEND | FAIL gpu.fabric (GPU 0): summary: Unhealthy; expected: a sound fabric
$HEALTH$BANDWIDTHDegraded</bandwidth>$HEALTHEND | FAIL gpu.fabric (GPU 0): bandwidth: Degraded
$HEALTH<{{route_unhealthy route_recovery_in_progress}}>True</{{}}>$HEALTHEND | FAIL gpu.fabric (GPU 0)
$HEALTH<summary>Unknown Error</summary>$HEALTHEND | UNKNOWN gpu.fabric (GPU 0) & $BROKEN
"""

KERNEL_LOG = r"""
$XID = kernel.log+2 NVRM: Xid (PCI:0000:52:00):
$SXID = kernel.log+2 nvidia-nvswitch0: SXid (PCI:0000:f9:00.0): 20034,
$RECOVERY = kernel.log+1 NVRM: Xid (PCI:0000:52:00): 154, GPU recovery action changed from
$XID {{13 31 94 137 999}}, pid=9 | WARN gpu.xid (GPU 2): Xid {{}} (2 times); expected: none since boot
$XID {{46 48 64 74 95 109 110 119 120 136 140 143 79 151 168}}, pid=9, Ch 8 | FAIL gpu.xid (GPU 2): Xid {{}} (2 times)
# the rest of the vendor's catalogue: RESET_GPU, then what is not repaired by one
$XID {{62 155 156 158 167 169 54 157}}, pid=9 | FAIL gpu.xid (GPU 2): Xid {{}} (2 times)
$XID 157, Resource retirement failure | FAIL gpu.xid (GPU 2): Xid 157 => replace the board
$XID {{8 38 43 63 78 92 142 160 163}}, pid=9 | WARN gpu.xid (GPU 2): Xid {{}} (2 times)
# NVLink 5 grades its errors in the text
$NVLINK5 = XC0 i0 Link 09 (0x025525c6 0x00000000)
$XID {{144 145 146 147 148 149 150}}, NETIR_LINK_EVT  Fatal   $NVLINK5
    | FAIL gpu.xid (GPU 2): Xid {{}} (2 times), fatal => reset the GPU
$XID {{144 145 146}}, RLW_REMAP  {{Nonfatal Non-fatal}}   $NVLINK5 | WARN gpu.xid (GPU 2): Xid
# without an Xid
kernel.log+1 NVRM: GPU 0000:52:00.0: RmInitAdapter failed! (0x62:0x40:2028)
    | FAIL gpu.xid (GPU 2): the driver could not set it up (RmInitAdapter failed) => drain and reboot
kernel.log+1 NVRM: GPU 0000:52:00.0: rm_init_adapter failed, device minor number 2 | FAIL gpu.xid (GPU 2)
$ASSERT = NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062)
kernel.log+1 $ASSERT returned from status @ kernel_channel.c:2874
    | FAIL gpu.xid: the driver asks for a reset (NV_ERR_RESET_REQUIRED) => reset the GPU
$SXID Non-fatal, Link 30 | WARN gpu.xid (0000:f9:00.0): SXid 20034 (2 times), non-fatal; expected: none since boot
$SXID Fatal, Link 30 | FAIL gpu.xid (0000:f9:00.0): SXid 20034 (2 times), fatal
$SXID Odd, Link 30 | UNKNOWN gpu.xid (0000:f9:00.0): SXid 20034 (2 times), of unknown gravity
kernel.log+2 nvidia-nvswitch0: {{SXid Xid}} garbled | UNKNOWN gpu.xid: a line about an Xid that was not understood
$OFF = kernel.log+1 NVRM: GPU 0000:
$OFF61:00.0: GPU has fallen off the bus. | FAIL gpu.xid (GPU 3): fallen off the bus; expected: none since boot
$XID 79, pid=9 & $OFF52:00.0: GPU has fallen off the bus. | FAIL gpu.xid (GPU 2): Xid 79 (2 times), fallen off the bus
$XID 48, pid=9 & $XID 79, pid=9 | FAIL gpu.xid (GPU 2): Xid 48 (2 times), Xid 79 (2 times) => reboot the node
kernel.log/boot=false | WARN gpu.xid: none in 3 lines of cat, but older ones are forgotten; expected: a log since boot
$RECOVERY 0x0 (None) to 0x1 (GPU Reset Required) | FAIL gpu.xid (GPU 2): Xid 154 => reset the GPU
$RECOVERY 0x0 (None) to 0x2 (OS Reboot) | FAIL gpu.xid (GPU 2): Xid 154 => drain and reboot
$RECOVERY 0x0 (None) to 0x3 (Drain P2P) | FAIL gpu.xid (GPU 2): Xid 154 => reset the GPU
$RECOVERY 0x2 (Node Reboot Required) to 0x0 (None) | OK gpu.xid
$RECOVERY words that nobody knows | FAIL gpu.xid (GPU 2): Xid 154 => drain and reboot
# of adapters: within a day, since boot, later than now, without a time; of a port that is not for training
$LOST = mlx5_core 0000:5e:00.0: ib3: Link down
kernel.log+1 [ 863000.0] $LOST | WARN ib.log (mlx5_5): its link was lost 1 time within a day, the last 17 min ago
kernel.log+3 [ 863940.0] $LOST | FAIL ib.log (mlx5_5): its link was lost 3 times within a day, the last 60 s ago
kernel.log+3 [ 777599.0] $LOST | WARN ib.log (mlx5_5): its link was lost 3 times since boot, the last 24.0 h ago
kernel.log+3 [ 864001.0] $LOST | FAIL ib.log (mlx5_5): its link was lost 3 times within a day, the last 0 s ago
kernel.log+3 $LOST | FAIL ib.log (mlx5_5): its link was lost 3 times within a day, the last 0 s ago
$SICK = poll_health:830: device's health compromised - reached miss
$FIRMWARE = FAIL ib.log (mlx5_5): its firmware failed 2 times within a day, the last 17 min ago
kernel.log+2 [ 863000.0] mlx5_core 0000:5e:00.0: $SICK | $FIRMWARE
kernel.log+2 [ 863000.0] mlx5_core 0000:e1:00.0: $SICK | OK ib.log
$DENIED = => kernel.dmesg_restrict=0) dmesg: Operation not permitted
kernel.log!1 dmesg: Operation not permitted | UNKNOWN gpu.xid: the kernel log cannot $DENIED
    & UNKNOWN ib.log: the kernel $DENIED
"""

DCGM = r"""
$R = gpu.dcgm_diag/DCGM Diagnostic.test_categories.0.tests.0.results.1
$SLOWSTART = Persistence mode for GPU 0 is disabled.
gpu.dcgm_diag!0 | OK gpu.dcgm_diag: 1 tests of DCGM passed
gpu.dcgm_diag!226 | UNKNOWN gpu.dcgm_diag: dcgmi: 1 tests passed, exit code 226
$R.status=Fail & $R.warnings=[{"warning": "Row remap failed"}] | FAIL gpu.dcgm_diag (GPU 1): software: Row remap failed
$R.status=Fail & $R.warnings=[{"warning": "$SLOWSTART"}] | WARN gpu.dcgm_diag (GPU 1): software: $SLOWSTART
$R.status=Fail & $R.warnings=[{"warning": "$SLOWSTART"}, {"warning": "SRAM"}]
    | FAIL gpu.dcgm_diag (GPU 1): software: Per
# DCGM 3: a warning before the document, empty entries between tests
$DCGM3 = gpu.dcgm_diag!226 not the same build\n{"DCGM GPU Diagnostic": {"test_categories": [{"tests":
$PASSED = [{"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]}, null
$MORE = , {"name": "PCIe", "results": [{"gpu_ids": "0,1", "status":
$DCGM3 $PASSED]}]}} & gpu.dcgm_diag!0 | OK gpu.dcgm_diag: 1 tests of DCGM passed
$DCGM3 $PASSED$MORE "Fail", "warnings": "slow"}]}]}]}} | FAIL gpu.dcgm_diag (GPU 0,1): PCIe: slow; expected: every test
$DCGM3 $PASSED, {"name": "PCIe", "results": [{"status": "Fail"}]}]}]}} | FAIL gpu.dcgm_diag (all GPUs): PCIe; expected
$DCGM3 $PASSED$MORE "WARN"}]}]}]}} | WARN gpu.dcgm_diag (GPU 0,1): PCIe; expected: every test passed
$DCGM3 [{"name": "Persistence Mode", "results": [{"status": "Fail"}]}]}]}} | WARN gpu.dcgm_diag (all GPUs): Persistence
$DCGM3 $PASSED$MORE "Not Run"}]}]}]}} | UNKNOWN gpu.dcgm_diag (GPU 0,1): PCIe: status 'Not Run'
$DCGM3 [{"name": "a", "results": [{"status": "SKIP"}]}]}]}}
    | UNKNOWN gpu.dcgm_diag: dcgmi: 0 tests passed, exit code 226
$DCGM3 $PASSED]}]}} {} | UNKNOWN gpu.dcgm_diag: dcgmi cannot be read: Extra data
gpu.dcgm_diag!1 {"DCGM Diagnostic": {"Error": "no GPU"}} | UNKNOWN gpu.dcgm_diag: dcgmi: no 'test_categories' in the
gpu.dcgm_diag!255 Error: unable to connect | UNKNOWN gpu.dcgm_diag: dcgmi cannot be read: gpu.dcgm_diag: exit code 255
gpu.{{dcgm_diag dcgm_health}}!127 sh: dcgmi: not found | SKIP gpu.{{}}: dcgmi is not installed
$BODY = gpu.dcgm_health/body
$SICK = {"children": {"3": {"children": {"Errors": {"children": {"PCIe": {"overflow": ["12,", "more"]}}}}}}}
$BODY.Overall Health.value=Failure | FAIL gpu.dcgm_health: Failure, says DCGM; expected: Healthy
$BODY.Overall Health.value=Warning & $BODY.GPU=$SICK
    | WARN gpu.dcgm_health: Warning, says DCGM; GPU 3 PCIe: 12,; GPU 3 PCIe: more
$BODY.GPU=$SICK
    | UNKNOWN gpu.dcgm_health: Healthy, says DCGM; GPU 3 PCIe: 12,; GPU 3 PCIe: more; expected
$BODY.Overall Health.value=Internal | UNKNOWN gpu.dcgm_health: dcgmi:  overall health 'Internal'
gpu.dcgm_health!1 | UNKNOWN gpu.dcgm_health: dcgmi: gpu.dcgm_health: exit code 1
gpu.dcgm_health!0 {} | UNKNOWN gpu.dcgm_health: dcgmi: no 'body' in the answer
gpu.dcgm_health!255 Error: Health watches not enabled. | SKIP gpu.dcgm_health: DCGM watches nothing here
gpu.dcgm_health!255 Host engine is not running | UNKNOWN gpu.dcgm_health: dcgmi cannot be read: gpu.dcgm_health: exit
"""

SMI = r"""
$BLIND = 13x UNKNOWN gpu.
$NONE = FAIL gpu.nvidia_smi: nvidia-smi: no
[h100x8 docker]
$LOST = FAIL gpu.nvidia_smi (GPU 3): nvidia-smi: a GPU is lost => drain and reboot the node
gpu.smi!15 Unable to determine the device handle for GPU0000:61:00.0: Unknown Error | $LOST & $BLIND
gpu.smi!255 Unable to determine the device handle for GPU 0000:61:00.0: GPU is lost. | $LOST & $BLIND
gpu.smi!0 <?xml version='1.0'?><nvidia_smi_log>\nUnable to determine the device handle for GPU 0000:61:00.0 | $LOST
    & $BLIND
gpu.smi!18 Failed to initialize NVML: Driver/library version mismatch | $NONE whole answer => after an update & $BLIND
gpu.smi!9 it failed because it couldn't communicate with the NVIDIA driver. | $NONE driver => `modprobe nvidia` & $BLIND
gpu.smi!6 No devices were found | $NONE devices & $BLIND
gpu.smi!127 nvidia-smi: not found | FAIL gpu.nvidia_smi: nvidia-smi: not installed => install the NVIDIA driver & $BLIND
gpu.smi!late | $NONE answer => the driver or a GPU is stuck & $BLIND
gpu.smi!{{139 0}} hello | $NONE whole answer & $BLIND
gpu.smi!0 <?xml version='1.0'?><nvidia_smi_log><gpu | $NONE whole answer & $BLIND
gpu.smi!0 <?xml version='1.0'?><nvidia_smi_log><gpu></nvidia_smi_log> | $NONE whole answer & $BLIND
gpu.smi!0 <?xml version='1.0'?><nvidia_smi_log>&boom;</nvidia_smi_log> | $NONE whole answer & $BLIND
gpu.smi!0 <?xml version='1.0'?><other><nvidia_smi_log></nvidia_smi_log></other> | $NONE whole answer & $BLIND
$ENTITIES = the XML declares entities, which nvidia-smi never does & $BLIND
gpu.smi~<!DOCTYPE[^>]*>~<!DOCTYPE a [<!ENTITY lol "lol"><!ENTITY lol2 "&lol;&lol;&lol;">]> | $NONE whole answer
    => $ENTITIES
gpu.smi~<!DOCTYPE[^>]*>~<!DOCTYPE a [<!ENTITY e SYSTEM "file:///etc/passwd">]> | $NONE whole answer => $ENTITIES
gpu.smi~<!DOCTYPE[^>]*>~<!doctype a SYSTEM "x" [ <!ATTLIST a b CDATA "c"> ]> | $NONE whole answer => $ENTITIES
gpu.smi~^~WARNING: infoROM is corrupted at gpu 0000:18:00.0\n
    | WARN gpu.nvidia_smi: nvidia-smi warns: WARNING: infoROM => infoROM is
# no GPU and no sign of any; what may be hiding some
[none docker]
$BUS = kernel.log!0 {"reader": "x", "total": 3, "boot": true, "uptime": 9, "seen": []}
    & gpu.lspci!0 {"total": 30, "devices": []}
$NOTOOL = gpu.smi!127 -
$SKIPPED = SKIP gpu.nvidia_smi: no NVIDIA GPU in this node & SKIP gpu.busy: no & SKIP gpu.dcgm_diag: no
    & SKIP gpu.xid: no
$BUS & $NOTOOL | $SKIPPED & = gpu.count: 0
$BUS & $NOTOOL & cluster.expected.gpus=0 | $SKIPPED
$BUS & gpu.smi!0 <nvidia_smi_log><attached_gpus>0</attached_gpus></nvidia_smi_log> | $SKIPPED & = gpu.count: 0
$BUS & gpu.smi!0 <nvidia_smi_log><attached_gpus>1</attached_gpus></nvidia_smi_log> | FAIL gpu.count: 0 by & $BLIND
$BUS & $NOTOOL & cluster.expected.gpus=8 | FAIL gpu.nvidia_smi: nvidia-smi: not installed & $BLIND
$BUS & $NOTOOL & gpu.lspci!0 {"total": 30 | FAIL gpu.nvidia_smi: nvidia-smi: not installed & $BLIND & 9x UNKNOWN ib.
$BUS & gpu.lspci/total=0 & gpu.smi!6 No devices were found | $NONE devices & $BLIND
$BUS & gpu.smi!6 No devices were found | $NONE devices & $BLIND
# a driver that is not loaded hides no GPU from a bus that was read
$UNLOADED = gpu.smi!9 it failed because it couldn't communicate with the NVIDIA driver
$BUS & $UNLOADED | $SKIPPED & = gpu.count: 0
$BUS & gpu.lspci/total=0 & $UNLOADED | $NONE driver & $BLIND
$BUS & gpu.smi!255 Failed to initialize NVML: Unknown Error | $NONE whole answer & $BLIND
# drivers of other years, in trouble; a process may call itself an error
[h100_550.xml docker]
$TROUBLE = FAIL gpu.count: 2 by nvidia-smi, 2 by driver, 8 by PCI & FAIL gpu.ecc (GPU 1): SRAM error threshold exceeded
$WRONG = FAIL gpu.fabric (GPU 1): fabric state In Progress; expected & FAIL gpu.pcie (GPU 1): 8 PCIe lanes
    & FAIL gpu.recovery (GPU 1): the driver asks for: Reset
$ROWS = FAIL gpu.row_remap (GPU 1): a row remapping failed
    & FAIL gpu.throttle (GPU 1): slowed down: hw slowdown, hw power brake
$SET = WARN gpu.clocks (GPU 1): clocks set to 1500 MHz & WARN gpu.power_limit (GPU 1): limited to 500 W & OK gpu.mig
$BUSY = FAIL gpu.busy (GPU 1): 70214 MiB in use:
gpu.smi!0 | $TROUBLE & $WRONG & $ROWS & $SET & $BUSY /opt/conda/bin/python3 (pid 2503421)
gpu.smi~/opt/conda/bin/python3~ERR! | $TROUBLE & $WRONG & $ROWS & $SET & $BUSY ? (pid 2503421) & OK gpu.nvidia_smi
[a100_470.xml docker]
$ONLY = FAIL gpu.count: 1 by nvidia-smi & OK gpu.mig
$OLD = WARN gpu.throttle (GPU 0): slowed down: sw thermal slowdown & SKIP gpu.recovery (GPU 0)
    & SKIP gpu.row_remap (GPU 0)
gpu.smi!0 | $ONLY & $ECC & WARN gpu.power_limit (GPU 0): limited to 350 W & $OLD & OK gpu.clocks: up to 1410 MHz
[h200_570.xml docker]
$ALONE = GPU 0: NVIDIA H200 (UUID: GPU-1)\nNVML: Unable to retrieve NVLink information as all links are inActive
$TPC = FAIL gpu.row_remap (GPU 0): tpc repair pending: Yes & OK gpu.recovery: no reset & OK gpu.clocks
gpu.nvlink!0 - | $ONLY & $TPC & UNKNOWN gpu.nvlink
gpu.nvlink!0 $ALONE | $ONLY & $TPC & SKIP gpu.nvlink: one GPU
[h100_broken.xml docker]
$UNREADABLE = UNKNOWN gpu.ecc (GPU 0): unreadable & UNKNOWN gpu.row_remap (GPU 0): unreadable
    & UNKNOWN gpu.pcie (GPU 0): unreadable
$NOTELL = UNKNOWN gpu.throttle (GPU 0): unreadable & UNKNOWN gpu.power_limit (GPU 0): unreadable
    & UNKNOWN gpu.busy (GPU 0): its processes
$GONE = UNKNOWN gpu.clocks (GPU 0): not in the answer & UNKNOWN gpu.mig (GPU 0): not in the answer
gpu.smi!0 | FAIL gpu.count: 1 by & FAIL gpu.nvidia_smi (GPU 0): 15 fields cannot & $UNREADABLE & $NOTELL & $GONE
"""


@pytest.mark.parametrize("row", [*rows("\n".join((GPU, KERNEL_LOG, DCGM, SMI)))], ids=str)
def test_an_answer_decides_its_checks_and_no_other(row: Row) -> None:
    row.assert_holds()

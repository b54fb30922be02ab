"""What a fake `nvidia-smi` says about fake GPUs, as the text of a POSIX shell script."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

PROCESS_NAME = "python3"
_NO_DEVICE = 15  # exit code of nvidia-smi for a GPU that cannot be reached


@dataclass(frozen=True)
class GpuModel:
    """What GPUs of one kind share. The XML schema follows from the architecture and the driver."""

    name: str
    architecture: str
    driver: str
    cuda: str
    vbios: str
    memory_mib: int
    power_w: int
    sm_mhz: int
    memory_mhz: int
    pcie_generation: int
    nvlinks: int
    nvlink_gbps: str
    pci_device: str
    switch_device: str


@dataclass(frozen=True)
class FakeAdapter:
    """A network adapter as the matrix of `topo -m` sees it. switch: address of the PCI switch it shares with GPUs."""

    name: str
    switch: str
    numa_node: int


@dataclass(frozen=True)
class FakeGpu:
    """One GPU and its state. switch: see FakeAdapter. width: PCIe lanes. inactive_link: an NVLink that is down."""

    model: GpuModel
    index: int
    address: str
    serial: str
    uuid: str
    driver: str
    numa_node: int
    switch: str = ""
    used_mib: int = 1
    pid: int | None = None
    uncorrectable: int = 0
    remap_pending: bool = False
    throttled: tuple[str, ...] = ()
    celsius: int = 34
    width: int = 16
    inactive_link: int | None = None

    @classmethod
    def make(cls, model: GpuModel, node: str, index: int, address: str, switch: str) -> FakeGpu:
        """A healthy GPU with numbers of its own, the same at every call."""
        digest = hashlib.sha256(f"{node}/{index}/{model.name}".encode()).hexdigest()
        uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
        return cls(model, index, address, f"165{int(digest[32:40], 16):010d}", uuid, model.driver, index // 4, switch)


def smi_script(
    gpus: tuple[FakeGpu, ...],
    *,
    adapters: tuple[FakeAdapter, ...],
    lost: str | None = None,
    hangs: bool = False,
    truncated: bool = False,
) -> str:
    """The script. `lost`: address of a GPU that cannot be reached, and with it no other."""
    head = "#!/bin/sh\n# Stands in for nvidia-smi on a rehearsal node.\n"
    if hangs:
        return head + "exec sleep 86400\n"
    if lost is not None:
        message = f"Unable to determine the device handle for GPU{lost.upper()}: Unknown Error"
        return head + f"echo '{message}'\nexit {_NO_DEVICE}\n"
    log = xml_log(gpus)
    if truncated:
        log = log[: len(log) * 2 // 3]
    answers = {
        "'-q -x' | '-x -q'": _document(log, "SMI"),
        "'topo -m'": _document(topology(gpus, adapters), "TOPO"),
        "'topo -p2p n'": _document(_p2p(gpus), "P2P"),
        "'nvlink --status' | 'nvlink -s'": _document(_nvlink_status(gpus), "LINKS"),
        "-L | --list-gpus": _document(_list(gpus), "LIST"),
        "*--query-compute-apps=*": _document(_apps(gpus), "APPS"),
        "*--query-gpu=*": _QUERY + _document(_table(gpus), "TABLE", "query"),
    }
    cases = "".join(f"    {pattern})\n{answer}        ;;\n" for pattern, answer in answers.items())
    wrong = '    *)\n        echo "Invalid combination of input arguments." \n        exit 2\n        ;;\n'
    return f'{head}case "$*" in\n{cases}{wrong}esac\n'


def xml_log(gpus: tuple[FakeGpu, ...]) -> str:
    """The answer to -q -x, with the element names of the driver's generation."""
    model = gpus[0].model
    version = 12 if model.architecture == "Hopper" else 11
    return (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v{version}.dtd">\n<nvidia_smi_log>\n'
        f"\t<timestamp>Mon Mar  3 10:00:00 2025</timestamp>\n\t<driver_version>{gpus[0].driver}</driver_version>\n"
        f"\t<cuda_version>{model.cuda}</cuda_version>\n\t<attached_gpus>{len(gpus)}</attached_gpus>\n"
        f"{''.join(_gpu_xml(gpu) for gpu in gpus)}</nvidia_smi_log>\n"
    )


def topology(gpus: tuple[FakeGpu, ...], adapters: tuple[FakeAdapter, ...]) -> str:
    """The answer to topo -m: tabs between columns, adapters last, no affinity in their rows."""
    places = [*((gpu.switch, gpu.numa_node) for gpu in gpus), *((nic.switch, nic.numa_node) for nic in adapters)]
    names = [*(f"GPU{gpu.index}" for gpu in gpus), *(f"NIC{number}" for number in range(len(adapters)))]

    def cell(row: int, column: int) -> str:
        if row == column:
            return " X "
        if row < len(gpus) and column < len(gpus):
            return f"NV{gpus[0].model.nvlinks}"
        (switch, numa), (other_switch, other_numa) = places[row], places[column]
        return "PIX" if switch == other_switch else "NODE" if numa == other_numa else "SYS"

    rows = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for row, name in enumerate(names):
        cells = [cell(row, column) for column in range(len(names))]
        if row < len(gpus):
            numa = gpus[row].numa_node
            cells += ["0-47,96-143" if numa == 0 else "48-95,144-191", str(numa), "N/A"]
        rows.append(f"{name}\t" + "\t".join(cells) + ("" if row < len(gpus) else "\t\t\t"))
    legend = "".join(f"  NIC{number}: {nic.name}\n" for number, nic in enumerate(adapters))
    tail = f"\nNIC Legend:\n\n{legend}" if adapters else ""
    return "\n".join(rows) + f"\n\n{_TOPOLOGY_LEGEND}{tail}"


def _document(text: str, mark: str, command: str = "cat") -> str:
    return f"        {command} <<'{mark}'\n{text.rstrip()}\n{mark}\n"


def _gpu_xml(gpu: FakeGpu) -> str:
    model = gpu.model
    values = {
        "pci": f"0000{gpu.address.upper()}",
        "bus": gpu.address[5:7].upper(),
        "name": model.name,
        "architecture": model.architecture,
        "serial": gpu.serial,
        "uuid": gpu.uuid,
        "index": gpu.index,
        "vbios": model.vbios,
        "generation": model.pcie_generation,
        "width": gpu.width,
        "total": model.memory_mib,
        "used": gpu.used_mib,
        "free": model.memory_mib - gpu.used_mib,
        "uncorrectable": gpu.uncorrectable,
        "pending": "Yes" if gpu.remap_pending else "No",
        "reset": _reset_xml(model),
        "throttle": _throttle_xml(gpu),
        "sram": _sram_xml(model),
        "exceeded": "" if _is_old(model) else "\t\t\t\t<sram_threshold_exceeded>No</sram_threshold_exceeded>\n",
        "temperature": _temperature_xml(gpu),
        "power": _power_xml(model),
        "sm": model.sm_mhz,
        "memory": model.memory_mhz,
        "fabric": _fabric_xml(model),
        "processes": _processes_xml(gpu),
    }
    return _GPU_XML.format(**values)


def _is_old(model: GpuModel) -> bool:
    return int(model.driver.partition(".")[0]) < 535


def _reset_xml(model: GpuModel) -> str:
    if int(model.driver.partition(".")[0]) >= 570:
        return "\t\t<gpu_recovery_action>None</gpu_recovery_action>\n"
    rows = "".join(f"\t\t\t<{name}>No</{name}>\n" for name in ("reset_required", "drain_and_reset_recommended"))
    return f"\t\t<gpu_reset_status>\n{rows}\t\t</gpu_reset_status>\n"


def _throttle_xml(gpu: FakeGpu) -> str:
    word = "throttle" if _is_old(gpu.model) else "event"
    active = {*gpu.throttled, *(() if gpu.throttled or gpu.pid is not None else ("gpu_idle",))}
    rows = "".join(
        f"\t\t\t<clocks_{word}_reason_{name}>{'Active' if name in active else 'Not Active'}"
        f"</clocks_{word}_reason_{name}>\n"
        for name in _REASONS
    )
    return f"\t\t<clocks_{word}_reasons>\n{rows}\t\t</clocks_{word}_reasons>\n"


def _sram_xml(model: GpuModel) -> str:
    names = ("",) if _is_old(model) else ("_parity", "_secded")
    return "".join(f"\t\t\t\t<sram_uncorrectable{name}>0</sram_uncorrectable{name}>\n" for name in names)


def _temperature_xml(gpu: FakeGpu) -> str:
    if gpu.model.architecture == "Hopper":
        # Hopper tells its distance to the limit of 87 degrees, and thresholds as distances, too.
        values = {"gpu_temp_tlimit": 87 - gpu.celsius, "gpu_temp_max_tlimit_threshold": -8}
        values |= {"gpu_temp_slow_tlimit_threshold": -2, "gpu_temp_max_gpu_tlimit_threshold": 0}
        values |= {"memory_temp": gpu.celsius + 6, "gpu_temp_max_mem_tlimit_threshold": 0}
    else:
        values = {"gpu_temp_max_threshold": 92, "gpu_temp_slow_threshold": 89, "gpu_temp_max_gpu_threshold": 85}
        values |= {"memory_temp": min(gpu.celsius + 6, 80), "gpu_temp_max_mem_threshold": 95}
    rows = "".join(f"\t\t\t<{name}>{value} C</{name}>\n" for name, value in {"gpu_temp": gpu.celsius, **values}.items())
    return f"\t\t<temperature>\n{rows}\t\t</temperature>\n"


def _power_xml(model: GpuModel) -> str:
    if _is_old(model):
        word, names = "power_readings", ["power_limit", "default_power_limit", "enforced_power_limit"]
    else:
        word, names = "gpu_power_readings", ["current_power_limit", "default_power_limit"]
    rows = "".join(f"\t\t\t<{name}>{model.power_w}.00 W</{name}>\n" for name in names)
    return f"\t\t<{word}>\n\t\t\t<power_draw>68.12 W</power_draw>\n{rows}\t\t</{word}>\n"


def _fabric_xml(model: GpuModel) -> str:
    values = ("Completed", "Success") if model.architecture == "Hopper" else ("N/A", "N/A")
    return "\t\t<fabric>\n\t\t\t<state>{}</state>\n\t\t\t<status>{}</status>\n\t\t</fabric>\n".format(*values)


def _processes_xml(gpu: FakeGpu) -> str:
    if gpu.pid is None:
        return ""
    return (
        f"\t\t\t<process_info>\n\t\t\t\t<pid>{gpu.pid}</pid>\n\t\t\t\t<type>C</type>\n"
        f"\t\t\t\t<process_name>{PROCESS_NAME}</process_name>\n"
        f"\t\t\t\t<used_memory>{gpu.used_mib - 1} MiB</used_memory>\n\t\t\t</process_info>\n"
    )


def _p2p(gpus: tuple[FakeGpu, ...]) -> str:
    names = [f"GPU{gpu.index}" for gpu in gpus]
    rows = [" \t" + "\t".join(names) + "\t"]
    rows += [f" {name}\t" + "\t".join("X" if name == other else "OK" for other in names) + "\t" for name in names]
    return "\n".join(rows) + f"\n\n{_P2P_LEGEND}"


def _title(gpu: FakeGpu) -> str:
    return f"GPU {gpu.index}: {gpu.model.name} (UUID: {gpu.uuid})\n"


def _nvlink_status(gpus: tuple[FakeGpu, ...]) -> str:
    def speed(gpu: FakeGpu, link: int) -> str:
        return "<inactive>" if link == gpu.inactive_link else f"{gpu.model.nvlink_gbps} GB/s"

    def lines(gpu: FakeGpu) -> str:
        return "".join(f"\t Link {link}: {speed(gpu, link)}\n" for link in range(gpu.model.nvlinks))

    return "".join(_title(gpu) + lines(gpu) for gpu in gpus)


def _list(gpus: tuple[FakeGpu, ...]) -> str:
    return "".join(_title(gpu) for gpu in gpus)


def _apps(gpus: tuple[FakeGpu, ...]) -> str:
    return "".join(
        f"{gpu.pid}, {gpu.uuid}, {gpu.used_mib - 1}, {PROCESS_NAME}\n" for gpu in gpus if gpu.pid is not None
    )


def _table(gpus: tuple[FakeGpu, ...]) -> str:
    return "".join(
        f"{gpu.index}|{gpu.model.name}|{gpu.uuid}|{gpu.address}|{gpu.model.memory_mib}|{gpu.used_mib}|{gpu.driver}\n"
        for gpu in gpus
    )


_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "display_clocks_setting",
)
_TOPOLOGY_LEGEND = """Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
_P2P_LEGEND = """Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""
# The fields that scripts usually ask for; an unknown one is refused, as the real tool does.
_QUERY = """        query() {
            fields=$(printf '%s' "$arguments" | sed 's/.*--query-gpu=\\([^ ]*\\).*/\\1/' | tr ',' ' ')
            case $arguments in *noheader*) ;; *) echo "$fields" | sed 's/ /, /g' ;; esac
            case $arguments in *nounits*) unit= ;; *) unit=' MiB' ;; esac
            while IFS='|' read -r index name uuid address total used driver; do
                row=
                for field in $fields; do
                    case $field in
                        index) value=$index ;;
                        name | gpu_name) value=$name ;;
                        uuid | gpu_uuid) value=$uuid ;;
                        pci.bus_id | gpu_bus_id) value=$address ;;
                        memory.total) value=$total$unit ;;
                        memory.used) value=$used$unit ;;
                        driver_version) value=$driver ;;
                        *) echo "Field \\"$field\\" is not a valid field to query." && exit 2 ;;
                    esac
                    row="$row${row:+, }$value"
                done
                echo "$row"
            done
        }
        arguments=$*
"""
_GPU_XML = """\t<gpu id="{pci}">
\t\t<product_name>{name}</product_name>
\t\t<product_brand>NVIDIA</product_brand>
\t\t<product_architecture>{architecture}</product_architecture>
\t\t<persistence_mode>Enabled</persistence_mode>
\t\t<mig_mode>
\t\t\t<current_mig>Disabled</current_mig>
\t\t\t<pending_mig>Disabled</pending_mig>
\t\t</mig_mode>
\t\t<mig_devices>
\t\t\tNone
\t\t</mig_devices>
\t\t<serial>{serial}</serial>
\t\t<uuid>{uuid}</uuid>
\t\t<minor_number>{index}</minor_number>
\t\t<vbios_version>{vbios}</vbios_version>
{reset}\t\t<pci>
\t\t\t<pci_bus>{bus}</pci_bus>
\t\t\t<pci_bus_id>{pci}</pci_bus_id>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>{generation}</max_link_gen>
\t\t\t\t\t<current_link_gen>{generation}</current_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>16x</max_link_width>
\t\t\t\t\t<current_link_width>{width}x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t\t<replay_counter>0</replay_counter>
\t\t\t<replay_rollover_counter>0</replay_rollover_counter>
\t\t</pci>
\t\t<fan_speed>N/A</fan_speed>
\t\t<performance_state>P0</performance_state>
{throttle}\t\t<fb_memory_usage>
\t\t\t<total>{total} MiB</total>
\t\t\t<reserved>551 MiB</reserved>
\t\t\t<used>{used} MiB</used>
\t\t\t<free>{free} MiB</free>
\t\t</fb_memory_usage>
\t\t<compute_mode>Default</compute_mode>
\t\t<ecc_mode>
\t\t\t<current_ecc>Enabled</current_ecc>
\t\t\t<pending_ecc>Enabled</pending_ecc>
\t\t</ecc_mode>
\t\t<ecc_errors>
\t\t\t<volatile>
\t\t\t\t<sram_correctable>0</sram_correctable>
{sram}\t\t\t\t<dram_correctable>0</dram_correctable>
\t\t\t\t<dram_uncorrectable>{uncorrectable}</dram_uncorrectable>
\t\t\t</volatile>
\t\t\t<aggregate>
\t\t\t\t<sram_correctable>0</sram_correctable>
{sram}\t\t\t\t<dram_correctable>0</dram_correctable>
\t\t\t\t<dram_uncorrectable>{uncorrectable}</dram_uncorrectable>
{exceeded}\t\t\t</aggregate>
\t\t</ecc_errors>
\t\t<remapped_rows>
\t\t\t<remapped_row_corr>0</remapped_row_corr>
\t\t\t<remapped_row_unc>0</remapped_row_unc>
\t\t\t<remapped_row_pending>{pending}</remapped_row_pending>
\t\t\t<remapped_row_failure>No</remapped_row_failure>
\t\t</remapped_rows>
{temperature}{power}\t\t<clocks>
\t\t\t<graphics_clock>{sm} MHz</graphics_clock>
\t\t\t<sm_clock>{sm} MHz</sm_clock>
\t\t\t<mem_clock>{memory} MHz</mem_clock>
\t\t</clocks>
\t\t<applications_clocks>
\t\t\t<graphics_clock>{sm} MHz</graphics_clock>
\t\t\t<mem_clock>{memory} MHz</mem_clock>
\t\t</applications_clocks>
\t\t<default_applications_clocks>
\t\t\t<graphics_clock>{sm} MHz</graphics_clock>
\t\t\t<mem_clock>{memory} MHz</mem_clock>
\t\t</default_applications_clocks>
\t\t<max_clocks>
\t\t\t<graphics_clock>{sm} MHz</graphics_clock>
\t\t\t<sm_clock>{sm} MHz</sm_clock>
\t\t\t<mem_clock>{memory} MHz</mem_clock>
\t\t</max_clocks>
{fabric}\t\t<supported_clocks>
\t\t\t<supported_mem_clock>
\t\t\t\t<value>{memory} MHz</value>
\t\t\t\t<supported_graphics_clock>{sm} MHz</supported_graphics_clock>
\t\t\t</supported_mem_clock>
\t\t</supported_clocks>
\t\t<processes>
{processes}\t\t</processes>
\t\t<accounted_processes>
\t\t</accounted_processes>
\t</gpu>
"""

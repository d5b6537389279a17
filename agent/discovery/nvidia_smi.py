"""Cards from nvidia-smi, where NVML cannot be asked: -q -x, and what that leaves out (AG-1).

Values that are no values ("N/A", "[Unknown Error]", "ERR!", "[Insufficient Permissions]") are unknown.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from xml.etree import ElementTree

from agent.discovery.cards import Card, Cards, Errors, Process
from agent.discovery.prober import ProbeError
from agent.protocol import GpuReading

Run = Callable[[Sequence[str]], str]
MIB = 2**20
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_CARD = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)\s]+)\)")
_SLICE = re.compile(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)")
_THROTTLED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_ECC = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")


def read(run: Run, program: str = "nvidia-smi") -> Cards:
    """Raises ProbeError, or FileNotFoundError where there is no nvidia-smi."""
    text = run([program, "-q", "-x"])
    try:
        # It comes from the driver's own program, and is bounded.
        log = ElementTree.fromstring(text)  # noqa: S314
    except ElementTree.ParseError as error:
        raise ProbeError(f"nvidia-smi -q -x prints no XML ({error})") from None
    gpus = sorted(log.iter("gpu"), key=lambda gpu: gpu.get("id", ""))
    capabilities = _capabilities(_or_nothing(run, program, "--query-gpu=uuid,compute_cap", "--format=csv,noheader"))
    in_mig = any(_is(_text(gpu, "mig_mode/current_mig"), "Enabled") for gpu in gpus)
    slices = _slices(_or_nothing(run, program, "-L")) if in_mig else {}
    peers = _peers(_or_nothing(run, program, "topo", "-m"), gpus) if len(gpus) > 1 else {}
    cards: list[Card] = []
    for index, gpu in enumerate(gpus):
        cards += _cards(gpu, index, capabilities, slices, peers)
    return Cards(
        tuple(cards), driver=_text(log, "driver_version"), cuda=_text(log, "cuda_version"), reader="nvidia-smi"
    )


def _cards(
    gpu: ElementTree.Element,
    index: int,
    capabilities: Mapping[str, str],
    slices: Mapping[str, Mapping[int, tuple[str, str]]],
    peers: Mapping[str, tuple[str, ...]],
) -> list[Card]:
    """The card, or instead of it the slices that it is cut into: a card in MIG mode runs nothing by itself."""
    told, name = _text(gpu, "uuid"), _text(gpu, "product_name")
    uuid = told if told.startswith("GPU-") else f"lost-{index}"  # a lost card says so in every field
    pci = _text(gpu, "pci/pci_bus_id") or gpu.get("id", "")
    capability, errors = capabilities.get(uuid, ""), _errors(gpu)
    if _is(_text(gpu, "mig_mode/current_mig"), "Enabled"):
        return [
            Card(
                uuid=known[1],
                index=index,
                name=name,
                memory_bytes=_mib(_text(part, "fb_memory_usage/total")),
                pci=pci,
                compute_capability=capability,
                slice_of=uuid,
                slice_kind=known[0],
                errors=errors,
            )
            for part in gpu.iterfind("mig_devices/mig_device")
            if (known := slices.get(uuid, {}).get(int(_number(_text(part, "index")) or 0)))
        ]
    clique = _number(_text(gpu, "fabric/cliqueId"))
    joined = _is(_text(gpu, "fabric/state"), "Completed") and _is(_text(gpu, "fabric/status"), "Success")
    cluster = _text(gpu, "fabric/clusterUuid").lower()
    in_fabric = joined and clique is not None and bool(cluster.strip("0-"))
    return [
        Card(
            uuid=uuid,
            index=index,
            name=name,
            memory_bytes=_mib(_text(gpu, "fb_memory_usage/total")),
            pci=pci,
            compute_capability=capability,
            peers=peers.get(uuid),
            nvlink_cluster=cluster if in_fabric else "",
            nvlink_clique=int(clique) if in_fabric and clique is not None else None,
            errors=errors,
            processes=tuple(_processes(gpu)),
            reading=_reading(gpu, uuid),
        )
    ]


def _errors(gpu: ElementTree.Element) -> Errors:
    volatile = gpu.find("ecc_errors/volatile")
    counts = [] if volatile is None else [_number(_text(volatile, name)) for name in _ECC]
    known = [int(count) for count in counts if count is not None]
    failed = _text(gpu, "remapped_rows/remapped_row_failure")
    lost = any("GPU is lost" in (each.text or "") for each in gpu.iter())
    return Errors(
        uncorrected_ecc=sum(known) if known else None,
        remap_failed=_is(failed, "Yes") if failed in ("Yes", "No") else None,
        lost=lost,
    )


def _reading(gpu: ElementTree.Element, uuid: str) -> GpuReading:
    def first(*paths: str) -> float | None:
        found = (_number(_text(gpu, path)) for path in paths)
        return next((number for number in found if number is not None), None)

    power = "gpu_power_readings/"
    throttled = [
        reason.removesuffix("_slowdown").replace("_", " ")
        for reason in _THROTTLED
        for group in ("clocks_event_reasons/clocks_event_reason_", "clocks_throttle_reasons/clocks_throttle_reason_")
        if _is(_text(gpu, group + reason), "Active")
    ]
    return GpuReading(
        uuid=uuid,
        memory_used_bytes=_mib(_text(gpu, "fb_memory_usage/used")),
        utilisation_percent=first("utilization/gpu_util"),
        temperature_c=first("temperature/gpu_temp"),
        power_w=first(f"{power}instant_power_draw", f"{power}average_power_draw", f"{power}power_draw"),
        power_limit_w=first(f"{power}current_power_limit", f"{power}power_limit"),
        sm_clock_mhz=first("clocks/sm_clock"),
        fan_percent=first("fan_speed"),
        throttled=", ".join(throttled),
    )


def _processes(gpu: ElementTree.Element) -> list[Process]:
    """Of every type: a Vulkan engine is a graphics process."""
    found = []
    for each in gpu.iterfind("processes/process_info"):
        pid = _number(_text(each, "pid"))
        if pid is not None:
            found.append(Process(int(pid), _text(each, "process_name"), _mib(_text(each, "used_memory"))))
    return found


# --- what -q -x leaves out -------------------------------------------------------------------------------------------
def _or_nothing(run: Run, *argv: str) -> str:
    try:
        return run(argv)
    except ProbeError:
        return ""


def _capabilities(text: str) -> dict[str, str]:
    rows = (row for row in csv.reader(StringIO(text), skipinitialspace=True) if len(row) == 2)
    return {uuid: capability for uuid, capability in rows if re.fullmatch(r"\d+\.\d+", capability)}


def _slices(text: str) -> dict[str, dict[int, tuple[str, str]]]:
    """By card and device number: kind and UUID of each MIG slice, out of `nvidia-smi -L`."""
    found: dict[str, dict[int, tuple[str, str]]] = {}
    card = ""
    for line in text.splitlines():
        if whole := _CARD.match(line):
            card = whole[1]
        elif part := _SLICE.match(line):
            found.setdefault(card, {})[int(part[2])] = part[1], part[3]
    return found


def _peers(text: str, gpus: Sequence[ElementTree.Element]) -> dict[str, tuple[str, ...]]:
    """By card, those that `nvidia-smi topo -m` connects to it by NVLink ("NV18"); nothing where it says nothing."""
    uuids = [_text(gpu, "uuid") for gpu in gpus]
    found = {}
    for line in text.splitlines():
        words = line.split()
        row = re.fullmatch(r"GPU(\d+)", words[0]) if words else None
        if row is None or int(row[1]) >= len(uuids) or len(words) <= len(uuids) or "X" not in words:
            continue
        cells = words[1 : len(uuids) + 1]
        found[uuids[int(row[1])]] = tuple(
            uuid for uuid, cell in zip(uuids, cells, strict=True) if re.fullmatch(r"NV\d+", cell)
        )
    return found


# --- values ----------------------------------------------------------------------------------------------------------
def _text(part: ElementTree.Element, path: str) -> str:
    return (part.findtext(path) or "").strip()


def _is(text: str, word: str) -> bool:
    return text.lower() == word.lower()


def _number(text: str) -> float | None:
    found = _NUMBER.match(text)
    return float(found[0]) if found else None


def _mib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number * MIB)

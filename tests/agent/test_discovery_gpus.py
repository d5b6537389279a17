"""Cards read through NVML and nvidia-smi, both played: what they say, leave out, get wrong, and how they hang."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent import process
from agent.discovery import nvidia_smi
from agent.discovery.cards import Card, Cards, Errors, Process, gpu_class, to_gpu
from agent.discovery.commands import CommandError, Runner
from agent.discovery.gpus import GpuReader
from agent.discovery.nvml import NoNvml
from agent.discovery.prober import ProbeError, Prober
from agent.hardware import Found, Hardware

MIB = 2**20
LIMIT_S = 60.0


# --- classes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "mib", "kind", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "", "h100-80g"),
        ("NVIDIA H100 PCIe", 81559, "", "h100-80g"),
        ("NVIDIA H100 NVL", 95830, "", "h100-94g"),
        ("NVIDIA H200", 143771, "", "h200-140g"),
        ("NVIDIA L40S", 46068, "", "l40s-45g"),
        ("NVIDIA A100-SXM4-40GB", 40960, "", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 81920, "", "a100-80g"),
        ("Tesla V100-SXM2-32GB", 32768, "", "v100-32g"),
        ("NVIDIA GeForce RTX 4090", 24564, "", "rtx-4090-24g"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "", "rtx-6000-ada-48g"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "", "rtx-pro-6000-blackwell-96g"),
        ("NVIDIA A100-SXM4-40GB", 4864, "1g.5gb", "a100-mig-1g-5g"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19968, "3g.20gb", "a100-mig-3g-20g"),
        ("NVIDIA A100-SXM4-40GB", 4864, "unknown", "a100-mig-5g"),
        ("NVIDIA Graphics Device", 1, "", "gpu-1g"),
        ("NVIDIA L4", None, "", "l4-unknown"),
    ],
)
def test_a_class_is_the_product_and_its_memory_to_the_nearest_gib(
    name: str, mib: int | None, kind: str, expected: str
) -> None:
    assert gpu_class(name, None if mib is None else mib * MIB, kind) == expected


FINE = Errors()


# --- faults and strangers --------------------------------------------------------------------------------------------
def judged(*processes: Process, errors: Errors = FINE, given: bool = False, strangers: tuple[int, ...] = ()) -> str:
    card = Card("GPU-1", 0, "NVIDIA L4", processes=processes, errors=errors)
    gpu = to_gpu(card, given=given, stranger=strangers.__contains__)
    assert gpu.healthy is not bool(gpu.fault)
    return gpu.fault


@pytest.mark.parametrize(
    ("errors", "fault"),
    [
        (Errors(), ""),
        (Errors(uncorrected_ecc=0, remap_failed=False), ""),
        (Errors(uncorrected_ecc=2), "2 uncorrected ECC errors; reset the card"),
        (Errors(remap_failed=True), "row remap failure: it has to be replaced"),
        (Errors(lost=True), "the driver has lost it; reset the card or restart the machine"),
    ],
)
def test_a_card_with_errors_is_faulty_and_unknown_is_none(errors: Errors, fault: str) -> None:
    assert judged(errors=errors) == fault


def test_memory_that_a_stranger_holds_is_named_with_amount_and_pid() -> None:
    mine, other = Process(1, "vllm", 2**30), Process(4711, "/usr/bin/python3", 3 * 2**29)
    assert judged(other, mine, strangers=(4711,)) == (
        "process 4711 (python3), which is not llmgw's, holds 1.5 GiB of it; end it"
    )
    assert judged(Process(5), strangers=(5,)) == "process 5, which is not llmgw's, holds memory of it; end it"
    assert judged(mine) == ""


def test_processes_that_a_container_hides_are_strangers_only_where_no_shard_of_ours_runs() -> None:
    hidden = Process(4711, "", 2**30, visible=False)
    assert judged(hidden, given=True) == ""
    assert "process 4711" in judged(hidden)


# --- nvidia-smi ------------------------------------------------------------------------------------------------------
def xml(*gpus: str) -> str:
    return (
        '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd"><nvidia_smi_log>'
        "<driver_version>580.65.06</driver_version><cuda_version>13.0</cuda_version>"
        + "".join(gpus)
        + "</nvidia_smi_log>"
    )


def gpu_xml(uuid: str = "GPU-a", bus: str = "00000000:61:00.0", name: str = "NVIDIA L40S", **parts: str) -> str:
    filled = {
        "fb_memory_usage": "<total>46068 MiB</total><used>1024 MiB</used>",
        "ecc_errors": "<volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>"
        "<dram_uncorrectable>0</dram_uncorrectable></volatile>",
        "remapped_rows": "<remapped_row_failure>No</remapped_row_failure>",
        "temperature": "<gpu_temp>24 C</gpu_temp>",
        "utilization": "<gpu_util>7 %</gpu_util>",
        "gpu_power_readings": "<instant_power_draw>N/A</instant_power_draw><power_draw>30.5 W</power_draw>",
        "clocks": "<sm_clock>180 MHz</sm_clock>",
        "fan_speed": "N/A",
        "clocks_event_reasons": "<clocks_event_reason_hw_thermal_slowdown>Active"
        "</clocks_event_reason_hw_thermal_slowdown>",
        "mig_mode": "<current_mig>N/A</current_mig>",
        "processes": "<process_info><pid>77</pid><type>C+G</type><process_name>x</process_name>"
        "<used_memory>512 MiB</used_memory></process_info>",
        **parts,
    }
    inner = "".join(f"<{key}>{value}</{key}>" for key, value in filled.items())
    return (
        f'<gpu id="{bus}"><product_name>{name}</product_name><uuid>{uuid}</uuid>'
        f"<pci><pci_bus_id>{bus}</pci_bus_id></pci>{inner}</gpu>"
    )


def told(text: str, *, caps: str = "", names: str = "", topology: str = "") -> Cards:
    answers = {"-q": text, "--query-gpu=uuid,compute_cap": caps, "-L": names, "topo": topology}

    def run(argv: Any) -> str:
        answer = answers[argv[1]]
        if not answer:
            raise CommandError(f"{argv[1]} is not understood")
        return answer

    return nvidia_smi.read(run)


def test_nvidia_smi_describes_cards_in_the_order_of_the_bus() -> None:
    second = gpu_xml("GPU-b", "00000000:c1:00.0")
    found = told(xml(second, gpu_xml()), caps="GPU-a, 8.9\nGPU-b, [N/A]\n")
    assert (found.driver, found.cuda, found.reader) == ("580.65.06", "13.0", "nvidia-smi")
    first, other = found.cards
    assert (first.uuid, first.index, first.memory_bytes, first.compute_capability) == ("GPU-a", 0, 46068 * MIB, "8.9")
    assert (other.uuid, other.index, other.compute_capability, other.peers) == ("GPU-b", 1, "", None)
    assert first.errors == Errors(uncorrected_ecc=0, remap_failed=False)
    assert first.processes == (Process(77, "x", 512 * MIB),)
    reading = first.reading
    assert reading
    assert (reading.power_w, reading.fan_percent, reading.temperature_c) == (30.5, None, 24)
    assert (reading.utilisation_percent, reading.sm_clock_mhz) == (7, 180)
    assert (reading.throttled, reading.memory_used_bytes) == ("hw thermal", 1024 * MIB)


@pytest.mark.parametrize("odd", ["N/A", "[N/A]", "[Unknown Error]", "ERR!", "[Insufficient Permissions]", ""])
def test_values_that_are_none_are_unknown_and_no_fault(odd: str) -> None:
    memory = f"<total>{odd}</total><used>{odd}</used>"
    [card] = told(
        xml(
            gpu_xml(
                fb_memory_usage=memory, ecc_errors=odd, remapped_rows=odd, temperature=odd, utilization=odd,
                gpu_power_readings=odd, clocks=odd, processes=odd, fabric=odd, mig_mode=odd,
            )
        )
    ).cards  # fmt: skip
    assert card.memory_bytes is None
    assert card.errors == Errors()
    assert card.processes == ()
    assert card.reading
    assert (card.reading.power_w, card.reading.temperature_c) == (None, None)


def test_bad_cards_say_what_is_bad() -> None:
    worn = gpu_xml(
        ecc_errors="<volatile><sram_uncorrectable>1</sram_uncorrectable><dram_uncorrectable>2</dram_uncorrectable></volatile>",
        remapped_rows="<remapped_row_failure>Yes</remapped_row_failure>",
    )
    gone = gpu_xml("GPU-b", "00000000:62:00.0", fb_memory_usage="<total>GPU is lost</total>")
    assert [card.errors for card in told(xml(worn, gone)).cards] == [
        Errors(uncorrected_ecc=3, remap_failed=True),
        Errors(uncorrected_ecc=0, remap_failed=False, lost=True),
    ]


def test_cards_that_are_lost_keep_names_of_their_own() -> None:
    lost = [gpu_xml("GPU is lost", f"00000000:6{number}:00.0") for number in (2, 3)]
    found = told(xml(gpu_xml(), *lost)).cards
    assert [(card.uuid, card.errors.lost) for card in found] == [("GPU-a", False), ("lost-1", True), ("lost-2", True)]


def test_links_come_from_the_topology_and_stay_unknown_without_it() -> None:
    topology = (
        "\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-31\nGPU1\tNV18\t X \tSYS\t0-31\n"
        "NIC0\tSYS\tSYS\t X \nGPU9 X\nLegend:\n  X    = Self\n"
    )
    gpus = (gpu_xml(), gpu_xml("GPU-b", "00000000:c1:00.0"))
    assert [card.peers for card in told(xml(*gpus), topology=topology).cards] == [("GPU-b",), ("GPU-a",)]
    assert [card.peers for card in told(xml(*gpus), topology=topology.replace("NV18", "PHB")).cards] == [(), ()]
    assert [card.peers for card in told(xml(*gpus)).cards] == [None, None]


def test_the_domain_beyond_the_node_is_told_only_when_it_is_joined() -> None:
    fabric = "<state>{}</state><status>Success</status><cliqueId>7</cliqueId><clusterUuid>{}</clusterUuid>"
    joined = gpu_xml(fabric=fabric.format("Completed", "C0FFEE00-0000"))
    waiting = gpu_xml("GPU-b", "00000000:62:00.0", fabric=fabric.format("In Progress", "C0FFEE00-0000"))
    none = gpu_xml("GPU-c", "00000000:63:00.0", fabric=fabric.format("Completed", "00000000-0000"))
    cards = told(xml(joined, waiting, none)).cards
    assert [(card.nvlink_cluster, card.nvlink_clique) for card in cards] == [
        ("c0ffee00-0000", 7), ("", None), ("", None),
    ]  # fmt: skip


MIG_LIST = (
    "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)\n"
    "  MIG 3g.20gb     Device  0: (UUID: MIG-bbbb)\n  MIG 1g.5gb      Device  1: (UUID: MIG-cccc)\n"
    "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-dddd)\n"
)


def mig_xml() -> str:
    sliced = gpu_xml(
        "GPU-aaaa", name="NVIDIA A100-SXM4-40GB",
        fb_memory_usage="<total>[Insufficient Permissions]</total>",
        mig_mode="<current_mig>Enabled</current_mig><pending_mig>Disabled</pending_mig>",
        mig_devices="<mig_device><index>0</index>"
        "<fb_memory_usage><total>19968 MiB</total></fb_memory_usage></mig_device>"
        "<mig_device><index>1</index><fb_memory_usage><total>4864 MiB</total></fb_memory_usage></mig_device>"
        "<mig_device><index>5</index></mig_device>",
    )  # fmt: skip
    return xml(sliced, gpu_xml("GPU-dddd", "00000000:c1:00.0", name="NVIDIA A100-SXM4-40GB"))


def test_slices_stand_for_the_card_they_are_cut_from() -> None:
    found = told(mig_xml(), names=MIG_LIST).cards
    assert [(card.uuid, card.slice_of, card.index) for card in found] == [
        ("MIG-bbbb", "GPU-aaaa", 0), ("MIG-cccc", "GPU-aaaa", 0), ("GPU-dddd", "", 1),
    ]  # fmt: skip
    classes = [to_gpu(card, given=True, stranger=lambda _: False).gpu_class for card in found]
    assert classes == ["a100-mig-3g-20g", "a100-mig-1g-5g", "a100-45g"]


def test_a_card_that_is_to_be_cut_and_is_not_offers_nothing() -> None:
    empty = gpu_xml(mig_mode="<current_mig>Enabled</current_mig>", mig_devices="None")
    assert told(xml(empty)).cards == ()


@pytest.mark.parametrize("text", ["", "Unable to determine the device handle", "<nvidia_smi_log>"])
def test_what_is_no_xml_is_a_probe_that_failed(text: str) -> None:
    with pytest.raises(ProbeError):
        told(text)


# --- a program that misbehaves ---------------------------------------------------------------------------------------
@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    def write(script: str) -> str:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return write


def ends(pid: int) -> bool:
    """Waits for it, for so long."""
    for _ in range(int(LIMIT_S / 0.01)):
        found = process.stat(pid)
        if found is None or found.dead:
            return True
        threading.Event().wait(0.01)
    return False


def test_a_program_that_ignores_being_asked_to_end_is_ended(program: Callable[[str], str], tmp_path: Path) -> None:
    note = tmp_path / "pid"
    path = program(f"trap '' TERM; echo $$ > {note}; while :; do sleep 600; done")
    with pytest.raises(CommandError, match="nvidia-smi has not answered in 1 s"):
        Runner(limit_s=1).run([path])
    assert ends(int(note.read_text()))


def test_a_child_that_keeps_the_output_open_is_not_waited_for(program: Callable[[str], str], tmp_path: Path) -> None:
    note = tmp_path / "pid"
    path = program(f"sleep 600 & echo $! > {note}; echo answer")
    assert Runner(limit_s=LIMIT_S).run([path]) == "answer\n"
    assert ends(int(note.read_text()))


def test_a_slow_answer_is_waited_for_and_closing_the_output_first_is_no_end(program: Callable[[str], str]) -> None:
    assert Runner(limit_s=LIMIT_S).run([program("sleep 1; echo late; exec >&- 2>&-; sleep 0.3")]) == "late\n"


def test_a_program_that_never_stops_printing_is_cut_off(program: Callable[[str], str]) -> None:
    with pytest.raises(CommandError, match="printed more than 1 MiB"):
        Runner(limit_s=LIMIT_S, max_bytes=MIB).run([program("while :; do echo 0123456789012345678901234567890; done")])


def test_a_failure_says_what_the_program_said(program: Callable[[str], str]) -> None:
    with pytest.raises(CommandError, match="failed with status 9: Driver/library version mismatch"):
        Runner().run([program("echo Driver/library version mismatch >&2; exit 9")])


def test_while_one_cannot_be_ended_none_is_started_besides(program: Callable[[str], str]) -> None:
    runner = Runner(limit_s=LIMIT_S)
    path = program("exec sleep 600")
    stuck = SimpleNamespace(pid=4711, poll=lambda: None)
    runner._left = stuck  # type: ignore[assignment]
    with pytest.raises(CommandError, match=r"cannot be ended \(process 4711\)"):
        runner.run([path])
    stuck.poll = lambda: -9
    assert runner.run([program("echo back")]) == "back\n"


# --- a driver that misbehaves ----------------------------------------------------------------------------------------
class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_probe_that_hangs_is_the_only_one_and_what_was_known_grows_old(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, go_on, calls = Clock(), threading.Event(), []

    def read() -> int:
        calls.append(len(calls))
        if len(calls) == 2:
            assert go_on.wait(LIMIT_S)
        return len(calls)

    prober = Prober("the driver", read, period_s=15, overdue_s=90, clock=clock)
    assert prober.latest().fault == "they are being read for the first time"
    prober.wait(LIMIT_S)
    assert prober.latest().value == 1
    clock.now += 20
    for _ in range(1000):
        assert prober.latest().fault == ""  # slow is no fault yet
    clock.now += 90
    latest = prober.latest()
    assert (latest.value, latest.age_s) == (1, 110)
    assert latest.fault == "the driver has not answered for more than 90 s"
    assert len(calls) == 2
    assert "the driver: the driver has not answered for more than 90 s" in caplog.text
    go_on.set()
    while prober.latest().value == 1:
        threading.Event().wait(0.01)
    assert prober.latest().fault == ""
    assert "the driver answers again" in caplog.text


@pytest.mark.parametrize(
    ("error", "fault"), [(ProbeError("no driver"), "no driver"), (ZeroDivisionError("odd"), "ZeroDivisionError: odd")]
)
def test_a_probe_that_fails_says_why_and_keeps_what_was_known(error: Exception, fault: str) -> None:
    clock, answers = Clock(), [1, error, error]

    def read() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    prober = Prober("x", read, clock=clock)
    prober.wait(LIMIT_S)
    clock.now += 20
    while not prober.latest().fault:
        threading.Event().wait(0.01)
    assert (prober.latest().value, prober.latest().fault) == (1, fault)


# --- one or the other ------------------------------------------------------------------------------------------------
def no_nvml() -> Cards:
    raise NoNvml("the Python package nvidia-ml-py is not installed")


def test_the_fallback_is_said_once(
    program: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = tmp_path / "answer.xml"
    answer.write_text(xml(gpu_xml()))
    path = program(f'[ "$1" = -q ] && exec cat {answer}; exit 1')
    (tmp_path / "sys/bus/pci/devices/0000:61:00.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:61:00.0/numa_node").write_text("1\n")
    (tmp_path / "proc/77").mkdir(parents=True)
    reader = GpuReader(tmp_path, nvml=no_nvml, run=Runner().run, program=path)
    [card] = reader.read().cards
    assert (card.numa, card.processes[0].visible) == (1, True)
    reader.read()
    assert caplog.text.count("Cards are read with nvidia-smi: the Python package nvidia-ml-py is not installed") == 1


def test_a_machine_without_cards_has_none_and_that_is_no_fault(tmp_path: Path) -> None:
    reader = GpuReader(tmp_path, nvml=no_nvml, run=Runner().run, program=str(tmp_path / "none"))
    assert reader.read() == Cards()


def test_cards_that_nobody_can_be_asked_about_are_a_fault_with_what_to_do(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        home = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        home.mkdir(parents=True)
        (home / "vendor").write_text(vendor + "\n")
        (home / "class").write_text(kind + "\n")
    reader = GpuReader(tmp_path, nvml=no_nvml, run=Runner().run, program=str(tmp_path / "none"))
    with pytest.raises(ProbeError, match=r"this machine has 1 NVIDIA cards, .* install the NVIDIA driver"):
        reader.read()


def test_numa_is_unknown_where_the_kernel_says_none(tmp_path: Path) -> None:
    home = tmp_path / "sys/bus/pci/devices/0000:61:00.0"
    home.mkdir(parents=True)
    (home / "numa_node").write_text("-1\n")
    cards = Cards((Card("GPU-a", 0, "x", pci="00000000:61:00.0", processes=(Process(99),)), Card("GPU-b", 1, "x")))
    found = GpuReader(tmp_path, nvml=lambda: cards, run=Runner().run).read().cards
    assert [card.numa for card in found] == [None, None]
    assert found[0].processes[0].visible is False


# --- put together ----------------------------------------------------------------------------------------------------
def test_hardware_is_looked_at_without_waiting_for_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stranger = subprocess.Popen(["sleep", "600"])
    mine = Process(os.getpid())
    card = Card("GPU-a", 0, "NVIDIA L40S", 46068 * MIB, processes=(Process(stranger.pid, "x", 2**30), mine))
    go_on = threading.Event()

    def cards() -> Cards:
        assert go_on.wait(LIMIT_S)
        return Cards((card,), driver="580", cuda="13.0")

    hardware = Hardware({"ib0": ["mlx5_0"]}, cards=cards, adapters=tuple)

    def look(*ours: int) -> Found:
        return hardware.look(given=frozenset(), ours=lambda: {os.getpid(), *ours})

    try:
        first = look()
        assert (first.gpus, first.gpus_fault, first.age_s) == ((), "they are being read for the first time", None)
        go_on.set()
        hardware.wait(LIMIT_S)
        found = look()
        assert found.gpus[0].fault == f"process {stranger.pid} (x), which is not llmgw's, holds 1.0 GiB of it; end it"
        assert look(stranger.pid).gpus[0].healthy
        assert (found.driver, found.gpus_fault, found.adapters) == ("580", "", ())
        assert found.age_s is not None
        assert found.fabrics[0].reason == "adapter mlx5_0 is not there (there are: none)"
        assert caplog.text.count("Fabric ib0 is not advertised: adapter mlx5_0 is not there") == 1
    finally:
        stranger.kill()
        stranger.wait(LIMIT_S)
    assert look().gpus[0].fault == ""  # it is gone since

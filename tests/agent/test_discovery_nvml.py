"""Cards read through NVML, played: what it says, leaves out and gets wrong, and how its bindings fail."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.discovery import nvml as nvml_module
from agent.discovery.cards import Errors, Process
from agent.discovery.nvml import NoNvml, Nvml
from agent.discovery.prober import ProbeError
from tests.agent.test_discovery_gpus import LIMIT_S, MIB


class FabricInfo(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint), ("clusterUuid", ctypes.c_uint8 * 16), ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint),
    ]  # fmt: skip


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


def fake_nvml(gpus: list[dict[str, Any]], **functions: Any) -> Any:
    """pynvml over dictionaries: what is not in one is not supported."""

    def of(key: str) -> Callable[..., Any]:
        def answer(handle: dict[str, Any], *_: Any) -> Any:
            found = handle.get(key, NvmlError(3))
            if isinstance(found, Exception):
                raise found
            return found

        return answer

    def fabric(handle: dict[str, Any], pointer: Any) -> int:
        if "fabric" not in handle:
            raise NvmlError(3)
        info, (state, uuid, clique) = pointer._obj, handle["fabric"]
        info.state, info.status, info.cliqueId = state, 0, clique
        info.clusterUuid[:] = list(uuid)
        return 0

    def by_index(index: int) -> dict[str, Any]:
        if "gone" in gpus[index]:
            raise NvmlError(15)
        return gpus[index]

    def slice_by_index(handle: dict[str, Any], index: int) -> dict[str, Any]:
        if index >= len(handle["slices"]):
            raise NvmlError(6)
        return handle["slices"][index]  # type: ignore[no-any-return]

    library = SimpleNamespace(
        NVMLError=NvmlError, c_nvmlGpuFabricInfo_v3_t=FabricInfo,
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: len(gpus), nvmlDeviceGetHandleByIndex=by_index,
        nvmlSystemGetDriverVersion=lambda: b"580.65", nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
        nvmlSystemGetProcessName=lambda pid: f"/bin/p{pid}",
        nvmlDeviceGetUUID=of("uuid"), nvmlDeviceGetName=of("name"), nvmlDeviceGetPciInfo=of("pci"),
        nvmlDeviceGetMemoryInfo=of("memory"), nvmlDeviceGetCudaComputeCapability=of("capability"),
        nvmlDeviceGetMigMode=of("mig"), nvmlDeviceGetMaxMigDeviceCount=of("most"),
        nvmlDeviceGetMigDeviceHandleByIndex=slice_by_index, nvmlDeviceGetRemappedRows=of("rows"),
        nvmlDeviceGetTotalEccErrors=of("ecc"), nvmlDeviceGetP2PStatus=lambda a, b, _: of("p2p")(a),
        nvmlDeviceGetGpuFabricInfoV=fabric, nvmlDeviceGetComputeRunningProcesses=of("compute"),
        nvmlDeviceGetGraphicsRunningProcesses=of("graphics"), nvmlDeviceGetUtilizationRates=of("rates"),
        nvmlDeviceGetPowerUsage=of("power"), nvmlDeviceGetEnforcedPowerLimit=of("limit"),
        nvmlDeviceGetCurrentClocksEventReasons=of("reasons"), nvmlDeviceGetTemperature=of("temperature"),
        nvmlDeviceGetClockInfo=of("clock"), nvmlDeviceGetFanSpeed=of("fan"),
        nvmlDeviceGetMPSComputeRunningProcesses=of("mps"),
    )  # fmt: skip
    vars(library).update(functions)
    return library


def nvml_card(uuid: str = "GPU-a", bus: str = "00000000:61:00.0", **fields: Any) -> dict[str, Any]:
    return {
        "uuid": uuid, "name": "NVIDIA H100 80GB HBM3", "pci": SimpleNamespace(busId=bus),
        "memory": SimpleNamespace(total=81559 * MIB, used=5), **fields,
    }  # fmt: skip


def test_nvml_tells_what_it_knows_of_each_card() -> None:
    full = nvml_card(
        capability=[9, 0], rows=(0, 0, 0, 0), ecc=0, p2p=0, fabric=(3, b"\x01" + b"\0" * 15, 4),
        power=70500, limit=700000,
        compute=[SimpleNamespace(pid=7, usedGpuMemory=3)],
        graphics=[SimpleNamespace(pid=8, usedGpuMemory=None), SimpleNamespace(pid=7, usedGpuMemory=3)],
        mps=[SimpleNamespace(pid=9, usedGpuMemory=2)],
        rates=SimpleNamespace(gpu=50), reasons=0x8 | 0x1, temperature=40, clock=1980, mig=[0, 0],
    )  # fmt: skip
    found = Nvml(lambda: fake_nvml([nvml_card("GPU-b", "00000000:c1:00.0"), full])).read()
    assert (found.driver, found.cuda, found.reader) == ("580.65", "13.1", "nvml")
    card, bare = found.cards
    assert (card.uuid, card.index, card.pci, card.compute_capability) == ("GPU-a", 0, "00000000:61:00.0", "9.0")
    assert (card.peers, card.nvlink_cluster, card.nvlink_clique) == (("GPU-b",), "01" + "00" * 15, 4)
    assert card.errors == Errors(uncorrected_ecc=0, remap_failed=False)
    assert card.processes == (Process(7, "/bin/p7", 3), Process(8, "/bin/p8", None), Process(9, "/bin/p9", 2))
    reading = card.reading
    assert reading
    assert (reading.power_w, reading.power_limit_w, reading.throttled, reading.fan_percent) == (70.5, 700, "hw", None)
    assert (bare.uuid, bare.index, bare.peers, bare.nvlink_clique, bare.errors) == ("GPU-b", 1, None, None, Errors())


def test_an_older_driver_tells_the_domain_in_its_own_way() -> None:
    class Older(FabricInfo):
        pass

    def asked(handle: dict[str, Any], pointer: Any) -> int:
        if not isinstance(pointer._obj, Older):
            raise NvmlError(25)  # it does not know this version of the question
        pointer._obj.state, pointer._obj.cliqueId, pointer._obj.clusterUuid[0] = 3, 9, 2
        return 0

    library = fake_nvml([nvml_card()], c_nvmlGpuFabricInfo_v2_t=Older, nvmlDeviceGetGpuFabricInfoV=asked)
    [card] = Nvml(lambda: library).read().cards
    assert (card.nvlink_cluster, card.nvlink_clique) == ("02" + "00" * 15, 9)


def test_links_that_the_driver_does_not_know_are_unknown_and_not_none() -> None:
    def peers(status: object) -> list[tuple[str, ...] | None]:
        cards = [nvml_card("GPU-a", p2p=status), nvml_card("GPU-b", "00000000:c1:00.0", p2p=status)]
        return [card.peers for card in Nvml(lambda: fake_nvml(cards)).read().cards]

    assert peers(0) == [("GPU-b",), ("GPU-a",)]
    assert peers(5) == [(), ()]
    assert peers(6) == [None, None]
    assert peers(NvmlError(3)) == [None, None]


@pytest.mark.parametrize("fabric", [(2, b"\x01" * 16, 1), (3, b"\0" * 16, 1)])
def test_a_domain_that_is_not_joined_is_none(fabric: tuple[int, bytes, int]) -> None:
    [card] = Nvml(lambda: fake_nvml([nvml_card(fabric=fabric)])).read().cards
    assert (card.nvlink_cluster, card.nvlink_clique) == ("", None)
    [older] = Nvml(lambda: fake_nvml([nvml_card(fabric=fabric)], c_nvmlGpuFabricInfo_v3_t=None)).read().cards
    assert older.nvlink_clique is None


def test_cards_that_are_lost_are_listed_and_hide_no_other() -> None:
    broken = nvml_card("GPU-b", "00000000:c1:00.0", memory=NvmlError(15))
    nameless = nvml_card(uuid="")
    found = Nvml(lambda: fake_nvml([nvml_card(), {"gone": True}, broken, nameless])).read().cards
    assert [(card.uuid, card.errors.lost) for card in found] == [
        ("GPU-a", False), ("GPU-b", True), ("lost-0", True), ("lost-1", True),
    ]  # fmt: skip


def test_nvml_lists_slices_in_place_of_their_card() -> None:
    part = nvml_card("MIG-b", name="NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    odd = nvml_card("MIG-c", name="NVIDIA H100", memory=NvmlError(4))
    found = Nvml(lambda: fake_nvml([nvml_card(mig=[1, 0], most=7, slices=[part, odd]), nvml_card("GPU-e", mig=[1, 1])]))
    cards = found.read().cards
    assert [(card.uuid, card.slice_of, card.slice_kind) for card in cards] == [
        ("MIG-b", "GPU-a", "3g.40gb"), ("MIG-c", "GPU-a", "unknown"),
    ]  # fmt: skip


def test_without_package_or_driver_nvml_is_not_to_be_had() -> None:
    def absent() -> Any:
        raise ImportError("no pynvml")

    def broken() -> None:
        raise NvmlError(18)

    with pytest.raises(NoNvml, match="nvidia-ml-py is not installed"):
        Nvml(absent).read()
    with pytest.raises(NoNvml, match="NVML cannot be used: error 18"):
        Nvml(lambda: fake_nvml([], nvmlInit=broken)).read()
    with pytest.raises(ProbeError, match="NVML does not list the cards: error 18"):
        Nvml(lambda: fake_nvml([], nvmlDeviceGetCount=broken)).read()


@pytest.mark.parametrize("error", [AttributeError("no such name"), OSError("odd"), SyntaxError("print"), ValueError()])
def test_a_library_that_fails_in_other_ways_is_not_to_be_had_either(error: Exception) -> None:
    def broken() -> Any:
        raise error

    with pytest.raises(NoNvml, match="nvidia-ml-py cannot be loaded"):
        Nvml(broken).read()
    if not isinstance(error, SyntaxError):
        with pytest.raises(NoNvml, match="NVML cannot be used"):
            Nvml(lambda: fake_nvml([], nvmlInit=broken)).read()
        with pytest.raises(ProbeError, match="NVML does not list the cards"):
            Nvml(lambda: fake_nvml([], nvmlDeviceGetCount=broken)).read()


def test_bindings_that_do_not_fit_the_driver_lose_an_answer_and_no_card() -> None:
    def no_text(pid: int) -> str:
        return b"\xff".decode()  # as the bindings do with a process's name

    library = fake_nvml(
        [nvml_card(compute=[SimpleNamespace(pid=7, usedGpuMemory=3)])], nvmlSystemGetProcessName=no_text
    )
    del library.nvmlDeviceGetCurrentClocksEventReasons
    [found] = Nvml(lambda: library).read().cards
    assert found.processes == (Process(7, "", 3),)
    assert found.reading
    assert found.reading.throttled == ""


def test_after_a_driver_that_went_away_it_is_begun_anew() -> None:
    library = fake_nvml([nvml_card()])
    began: list[int] = []
    library.nvmlInit = lambda: began.append(1)
    nvml = Nvml(lambda: library)
    nvml.read()
    count = library.nvmlDeviceGetCount
    del library.nvmlDeviceGetCount
    with pytest.raises(ProbeError):
        nvml.read()
    library.nvmlDeviceGetCount = count
    assert len(nvml.read().cards) == 1
    assert len(began) == 2


def test_the_installed_bindings_have_all_that_is_asked_of_them() -> None:
    bindings = importlib.import_module("pynvml")
    asked = set(re.findall(r"\b(?:nvml[A-Z]\w+|c_nvml\w+)", Path(nvml_module.__file__).read_text()))
    assert len(asked) > 25
    assert [name for name in sorted(asked) if not hasattr(bindings, name)] == []


def test_importing_the_agent_loads_no_bindings() -> None:
    code = "import sys, agent.main; sys.exit('pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=LIMIT_S).returncode == 0


def test_the_installed_bindings_without_a_driver_are_not_to_be_had() -> None:
    bindings = importlib.import_module("pynvml")
    if Path("/proc/driver/nvidia/version").exists():
        assert Nvml().read().reader == "nvml"
    else:
        with pytest.raises(NoNvml, match="NVML cannot be used: NVML Shared Library Not Found"):
            Nvml(lambda: bindings).read()

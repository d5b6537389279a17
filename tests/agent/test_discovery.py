"""What the agent says of a machine, read from a made-up one and from this one (AG-3, AG-50)."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent import doctor, main
from agent.config import AgentSettings, ConfigError, load, stream_url
from agent.discovery.cards import Card, Cards, Errors
from agent.discovery.machine import Machine
from agent.discovery.prober import ProbeError
from agent.discovery.sensors import read_sensors
from agent.hardware import Hardware
from agent.protocol import AdapterPort, Cpu, Disk, Inventory, RdmaAdapter
from tests.agent.conftest import ROOT, settings_for

FILES = {
    "proc/sys/kernel/hostname": "node-7\n",
    "proc/sys/kernel/osrelease": "6.1.0-18-amd64\n",
    "proc/cpuinfo": "processor: 0\nmodel\t: 1\nmodel name\t: Fast 9000\n\nprocessor\t: 1\nmodel name\t: Fast 9000\n",
    "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    400 kB\nHugePages_Total:    3\nBroken\n",
    "proc/loadavg": "0.52 0.58 0.59 1/977 12345\n",
    "proc/stat": "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n",
    "proc/self/mounts": (
        "/dev/sda1 / ext4 rw 0 0\nproc /proc proc rw 0 0\n/dev/sdb1 /data\\040disk xfs rw 0 0\n"
        "/dev/sda1 /again ext4 rw 0 0\n/dev/loop0 /snap squashfs ro 0 0\nnas:/x /nfs nfs rw 0 0\nodd\n"
    ),
    "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "etc/machine-id": "0123456789abcdef\n",
    "sys/devices/system/node/node0/cpulist": "0",
    "sys/devices/system/node/node1/cpulist": "1",
    "sys/devices/system/node/possible": "0-1",
}


def _statvfs(path: str) -> os.statvfs_result:
    if path.startswith("/data"):
        raise OSError(5, "Input/output error")
    answer: Any = SimpleNamespace(f_frsize=4096, f_blocks=100, f_bavail=25)
    return answer  # type: ignore[no-any-return]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def test_a_machine_is_described_from_its_files(root: Path) -> None:
    machine = Machine(root, statvfs=_statvfs, work_dir=Path("/"))
    assert machine.hostname() == "node-7"
    assert machine.os_name() == "Debian GNU/Linux 12 (bookworm)"
    assert machine.kernel() == "6.1.0-18-amd64"
    assert machine.cpu() == Cpu(model="Fast 9000", cores=2, numa_nodes=2)
    assert machine.memory_bytes() == 1000 * 1024
    assert machine.disks() == (
        Disk(path="/", total_bytes=409600, free_bytes=102400),
        Disk(path="/", total_bytes=409600, free_bytes=102400),
        Disk(path="/data disk", total_bytes=409600, free_bytes=102400),
    )


def test_load_is_measured_between_two_looks(root: Path) -> None:
    machine = Machine(root, statvfs=_statvfs, work_dir=Path("/"))
    first = machine.load()
    assert (first.load_1m, first.cpu_percent, first.memory_used_bytes) == (0.52, None, 600 * 1024)
    assert first.disk_free_bytes == 102400
    (root / "proc/stat").write_text("cpu  175 0 100 725 100 0 0 0 0 0\n")
    assert machine.load().cpu_percent == 75.0


def test_what_cannot_be_read_is_unknown_and_not_zero(tmp_path: Path) -> None:
    def broken(path: str) -> os.statvfs_result:
        raise OSError(5, "Input/output error")

    machine = Machine(tmp_path, statvfs=broken, work_dir=Path("/"))
    assert (machine.os_name(), machine.kernel(), machine.memory_bytes()) == (None, None, None)
    assert machine.cpu() == Cpu()
    assert machine.disks() == (Disk(path="/"),)
    load = machine.load()
    assert (load.load_1m, load.cpu_percent, load.memory_used_bytes, load.disk_free_bytes) == (None, None, None, None)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("odd")
    assert machine.load().load_1m is None


def test_the_machine_id_is_stable_and_not_the_systems_own(root: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    known = Machine(root, work_dir=work).machine_id()
    assert known == Machine(root, work_dir=work).machine_id()
    assert "0123456789abcdef" not in known
    (root / "etc/machine-id").unlink()
    made = Machine(root, work_dir=work).machine_id()
    assert made == Machine(root, work_dir=work).machine_id() != known
    assert stat.S_IMODE((work / "machine-id").stat().st_mode) == 0o600


def test_sensors_are_read_and_a_broken_one_hides_no_other(tmp_path: Path) -> None:
    readings = {
        "hwmon0/name": "coretemp\n",
        "hwmon0/temp1_input": "45500\n",
        "hwmon0/temp1_label": "Package id 0\n",
        "hwmon0/temp2_input": "N/A\n",
        "hwmon0/fan1_input": "1200\n",
        "hwmon0/power1_average": "65000000\n",
        "hwmon0/temp1_crit": "100000\n",
        "hwmon1/in0_input": "1050\n",
        "hwmon2/name": "coretemp\n",
        "hwmon2/temp1_input": "50000\n",
        "hwmon2/temp1_label": "Package id 0\n",
    }
    for name, text in readings.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "hwmon3").write_text("a file where a directory should be")
    found = {sensor.name: (sensor.value, sensor.unit) for sensor in read_sensors(tmp_path)}
    assert found == {
        "coretemp Package id 0": (45.5, "°C"),
        "coretemp temp2": (None, "°C"),
        "coretemp fan1": (1200, "rpm"),
        "coretemp power1": (65, "W"),
        "hwmon1 in0": (1.05, "V"),
        "hwmon2 coretemp Package id 0": (50, "°C"),
    }
    assert read_sensors(tmp_path / "nothing") == ()


def test_the_inventory_of_this_machine_is_told_as_text_and_json(tmp_path: Path) -> None:
    settings = settings_for("http://127.0.0.1:1", tmp_path, None)
    found = main.inventory(settings)
    assert found.cpu.cores
    assert found.memory_bytes
    text = main.inventory_text(found)
    assert "llamacpp: xllamacpp" in text
    assert json.loads(main.inventory_json(found))["hostname"] == found.hostname
    assert main.inventory_text(Inventory(hostname="h", cut=("files",))).splitlines()[1:4] == [
        "system      -",
        "kernel      -",
        "cpu         -",
    ]


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    token.chmod(0o644)
    settings = settings_for("http://127.0.0.1:1", tmp_path, tmp_path / "nothing")
    bad = {one.subject: one for one in doctor.check(settings.model_copy(update={"token_file": token})) if not one.ok}
    assert set(bad) == {"llamacpp", "control plane", "token_file"}
    assert "chmod 600" in bad["token_file"].text
    assert "FIX" in doctor.text(tuple(bad.values()))
    good = doctor.check(settings_for("http://127.0.0.1:1", tmp_path, None))
    assert [one.subject for one in good if not one.ok] == ["control plane"]


def test_doctor_names_faulty_cards_fabrics_that_are_down_and_adapters_in_none(tmp_path: Path) -> None:
    def port(state: str) -> tuple[AdapterPort, ...]:
        return (AdapterPort(number=1, state=state, rate_gbit_s=400.0, link_layer="InfiniBand"),)

    adapters = [RdmaAdapter(name=f"mlx5_{n}", ports=port("DOWN" if n == 1 else "ACTIVE")) for n in range(3)]
    fine = Card("GPU-0", 0, "NVIDIA L4", 22 * 2**30)
    worn = Card("GPU-1", 1, "NVIDIA L4", 22 * 2**30, pci="00000000:61:00.0", errors=Errors(remap_failed=True))

    def checked(*cards: Card, fault: str = "") -> dict[str, tuple[bool, str]]:
        def read() -> Cards:
            if fault:
                raise ProbeError(fault)
            return Cards(cards, driver="580.65", cuda="13.0")

        declared = {"ib0": ["mlx5_0"], "ib1": ["mlx5_1"]}
        hardware = Hardware(declared, cards=read, adapters=lambda: tuple(adapters))
        found = doctor.check(settings_for("http://127.0.0.1:1", tmp_path, None), hardware)
        return {each.subject: (each.ok, each.text) for each in found}

    well = checked(fine)
    assert well["gpus"] == (True, "1 l4-22g, driver 580.65, CUDA 13.0")
    assert well["fabric ib0"] == (True, "mlx5_0: InfiniBand, 400 Gbit/s")
    assert well["fabric ib1"] == (
        False,
        "adapter mlx5_1 has no ACTIVE port: port 1 is DOWN. Mend that, or correct fabrics in agent.yaml.",
    )
    assert well["adapters"] == (True, "mlx5_2: in no fabric; name them under fabrics to let replicas span nodes")
    ill = "Card 1 (NVIDIA L4, 00000000:61:00.0): row remap failure: it has to be replaced."
    assert checked(fine, worn)["gpus"] == (False, ill)
    assert checked(fault="install the NVIDIA driver")["gpus"] == (False, "install the NVIDIA driver.")
    assert checked()["gpus"] == (True, "none")


# --- settings --------------------------------------------------------------------------------------------------------
def test_the_example_loads() -> None:
    settings = load(ROOT / "docs" / "example-agent.yaml")
    assert settings.node == "node-1"


def test_every_wrong_key_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("node: n\nllamacpp:\n  thread: 4\n")
    with pytest.raises(ConfigError, match=r"line 3: unknown setting llamacpp\.thread\. Did you mean threads\?"):
        load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("control_plane: []", "at least one"),
        ("control_plane: [ftp://x]", "must be http://"),
        ("control_plane: ['http://u:secret@x']", "token_file"),
        ("control_plane: ['http://x:0']", "port 0"),
        ("node: 'a b'", "letters, digits"),
        ("ports: {first: 3000, last: 2000}", "must not be below"),
        ("ports: {first: 80}", "ports.first"),
        ("llamacpp: {threads: 0}", "llamacpp.threads"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as refused:
        load(path)
    assert "secret" not in str(refused.value)


def test_variables_override_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("node: n\nllamacpp: {threads: 2}\nwork_dir: relative\n")
    monkeypatch.setenv("LLMGW_AGENT_LLAMACPP__THREADS", "3")
    monkeypatch.setenv("LLMGW_AGENT_CONTROL_PLANE", "[https://a:8443, 'http://b']")
    settings = load(path)
    assert settings.llamacpp.threads == 3
    assert settings.work_dir.is_absolute()
    assert [stream_url(one) for one in settings.control_plane] == ["wss://a:8443/agent/stream", "ws://b/agent/stream"]
    assert stream_url("https://a/llm/") == "wss://a/llm/agent/stream"
    assert stream_url("ws://a/agent/stream") == "ws://a/agent/stream"


def test_a_bare_machine_has_usable_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AgentSettings().node
    assert load(None).control_plane == ["http://127.0.0.1:8080"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--config", "/nothing/agent.yaml"), 2, "does not exist"),
        (("--inventory", "json"), 0, '"hostname"'),
        (("--doctor",), 1, "cannot be reached"),
    ],
)
def test_the_program_answers_in_one_go(tmp_path: Path, arguments: tuple[str, ...], status: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent", *arguments],
        cwd=ROOT,
        env=os.environ | {"LLMGW_AGENT_WORK_DIR": str(tmp_path), "LLMGW_AGENT_CONTROL_PLANE": "[http://127.0.0.1:1]"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_work_directory_that_cannot_be_used_stops_the_agent_with_one_sentence(
    tmp_path: Path,
) -> None:
    (tmp_path / "work").write_text("a file")
    settings = settings_for("http://127.0.0.1:1", tmp_path, None)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from agent.main import run; from agent.config import AgentSettings;"
         "sys.exit(run(AgentSettings.model_validate_json(sys.argv[1])))", settings.model_dump_json()],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "work_dir" in done.stderr
    assert len(done.stderr.splitlines()) == 1

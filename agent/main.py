"""The agent as a program: settings in, one node served until it is told to stop (AG-50)."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import fcntl
import logging
import os
import secrets
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import IO, assert_never

import msgspec

from agent import files, interfaces, logs, process, protocol
from agent.answers import Answers
from agent.bounds import within_bounds
from agent.config import AgentSettings, ConfigError, load
from agent.discovery.machine import Machine
from agent.errands import Errands
from agent.hardware import Found, Hardware
from agent.host import Host
from agent.installer import Installer
from agent.protocol import (
    Ack,
    Command,
    Disk,
    Fetch,
    Heartbeat,
    InstallEngine,
    Inventory,
    Register,
    SetEngineBuild,
    ShardStatus,
    StartShard,
    StopShard,
)
from agent.session import Session
from agent.supervisor import Supervisor
from agent.weights import Weights

log = logging.getLogger(__name__)
STOP_SESSION_S = 3.0
FIRST_LOOK_S = 3.0
"""How long a register waits for hardware to be read for the first time; heartbeats tell what comes later."""
SHOWN_LOOK_S = 60.0
"""How long a person who asks for the inventory waits for it."""
NOTHING_TOLD = Inventory(hostname="")


class Agent:
    """One node: wires discovery, weights, builds, supervision and the stream together."""

    def __init__(self, settings: AgentSettings, hardware: Hardware | None = None) -> None:
        """`hardware`: another than this machine's."""
        self._settings = settings
        self._instance = secrets.token_hex(8)
        self._machine = Machine(work_dir=settings.work_dir)
        self._hardware = hardware or Hardware.of_this_machine(settings.fabrics)
        self._weights = Weights(settings.work_dir / "models")
        self._installer = _installer(settings)
        host = _host(settings, self._machine)
        self._session = Session(settings, self)
        self._supervisor = Supervisor(
            settings, host, weights=self._weights, installer=self._installer, publish=self._session.publish
        )
        self._errands = Errands(self._weights, self._installer, lambda: self._supervisor.host)
        self._answers = Answers(self._carry_out)
        self._telling: asyncio.Task[None] | None = None

    async def serve(self, stopped: asyncio.Event) -> None:
        """Until `stopped` is set; then within 5 s, engines aside."""
        self._supervisor.adopt()
        watching = asyncio.create_task(self._supervisor.run())
        speaking = asyncio.create_task(self._session.run())
        await stopped.wait()
        if self._settings.stop_engines_on_exit:
            await self._supervisor.close(stop_engines=True)
            await self._session.flush(1.0)
        for task in (watching, speaking):
            task.cancel()
        if self._telling:
            self._telling.cancel()
        await asyncio.wait((watching, speaking), timeout=STOP_SESSION_S)
        await self._errands.close()
        if not self._settings.stop_engines_on_exit:
            await self._supervisor.close(stop_engines=False)

    # --- what the session asks -------------------------------------------------------------------------------------
    async def register(self, address: str) -> Register:
        host = self._supervisor.host
        self._supervisor.host = dataclasses.replace(host, address=address)
        await asyncio.to_thread(self._hardware.wait, FIRST_LOOK_S)
        inventory, _ = await self._look()
        return Register(
            node=self._settings.node,
            agent_version=version(),
            machine_id=self._machine.machine_id(),
            instance=self._instance,
            address=address,
            inventory=inventory,
            labels=self._settings.labels,
            shards=self._supervisor.running(),
        )

    async def heartbeat(self, told: Inventory) -> Heartbeat:
        inventory, found = await self._look()
        load = await asyncio.to_thread(self._machine.load)
        return Heartbeat(
            load=msgspec.structs.replace(load, gpus=found.readings[: protocol.MAX_GPUS], gpus_age_s=found.age_s),
            shards=self._supervisor.states(),
            errands=self._errands.told(),
            inventory=None if _lasting(inventory) == _lasting(told) else inventory,
        )

    async def _look(self) -> tuple[Inventory, Found]:
        """The machine as it is now."""
        given = self._supervisor.cards()
        found = await asyncio.to_thread(self._hardware.look, given=given, ours=self._supervisor.pids)
        self._supervisor.host = host = await asyncio.to_thread(_seen, self._supervisor.host, found)
        inventory = await asyncio.to_thread(_inventory, self._machine, self._weights, self._installer, host, found)
        return inventory, found

    def failures(self) -> tuple[ShardStatus, ...]:
        return self._supervisor.failures()

    def answer(self, command: Command) -> Ack:
        return self._answers.answer(command)

    def _carry_out(self, command: Command) -> str:
        log.debug("Command %d: %s (trace %s)", command.id, type(command.body).__name__, command.traceparent or "-")
        match command.body:
            case StartShard() as start:
                return self._supervisor.start_shard(start)
            case StopShard() as stop:
                return self._supervisor.stop_shard(stop)
            case Fetch() | InstallEngine() as errand:
                return self._errands.begin(command.id, errand)
            case SetEngineBuild() as choice:
                error = self._installer.choose(choice.engine, choice.build, self._supervisor.host)
                if not error:
                    self._telling = asyncio.get_running_loop().create_task(self._tell_anew())
                return error
            case other:
                assert_never(other)

    async def _tell_anew(self) -> None:
        """At once, so that nothing is placed by what this node was a moment ago."""
        try:
            self._session.publish(await self.heartbeat(NOTHING_TOLD))
        except Exception:  # the agent's boundary: the next heartbeat tells it
            log.exception("What this node runs cannot be told at once")


def run(settings: AgentSettings, hardware: Hardware | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Engines go on, unless `stop_engines_on_exit` says otherwise."""
    logs.configure(settings.logging.format, settings.logging.level)
    try:
        settings.work_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock(settings.work_dir / "agent.lock")
    except BlockingIOError:
        log.error("Another agent already uses %s. Stop it, or give this one its own work_dir.", settings.work_dir)
        return 1
    except OSError as error:
        log.error("%s", files.sentence(error, f"work_dir {settings.work_dir} cannot be used"))
        return 1
    with lock:
        log.info("Agent %s of node %s in %s", version(), settings.node, settings.work_dir)
        asyncio.run(_serve(settings, hardware))
    log.info("Agent stopped%s", "" if settings.stop_engines_on_exit else "; its engines go on")
    return 0


def inventory(settings: AgentSettings) -> Inventory:
    """What the scheduler would see of this machine."""
    machine, hardware = Machine(work_dir=settings.work_dir), Hardware.of_this_machine(settings.fabrics)
    hardware.wait(SHOWN_LOOK_S)
    # Whose processes hold memory is not known here: those of a running agent are not ours to tell.
    found = hardware.look(given=frozenset(), ours=process.table)
    host = _seen(_host(settings, machine), found)
    return _inventory(machine, Weights(settings.work_dir / "models"), _installer(settings), host, found)


def inventory_json(found: Inventory) -> str:
    return msgspec.json.format(protocol.encode(found), indent=2).decode()


def inventory_text(found: Inventory) -> str:
    """One line a fact; what is not known is a dash."""
    cpu = found.cpu
    lines = [
        ("host", found.hostname),
        ("system", found.os),
        ("kernel", found.kernel),
        ("cpu", cpu.model),
        ("cores", cpu.cores),
        ("numa nodes", cpu.numa_nodes),
        ("memory", _gib(found.memory_bytes)),
        *(("disk", f"{disk.path}  {_gib(disk.free_bytes)} free of {_gib(disk.total_bytes)}") for disk in found.disks),
        *((("gpus", found.gpus_fault),) if found.gpus_fault else ()),
        *(
            ("gpu", f"{gpu.index} {gpu.name} {gpu.gpu_class}" + (f" - {gpu.fault}" if gpu.fault else ""))
            for gpu in found.gpus
        ),
        *(
            (
                "fabric",
                f"{fabric.name}  {', '.join(fabric.adapters)}" + (f" - {fabric.reason}" if fabric.reason else ""),
            )
            for fabric in found.fabrics
        ),
        *(("adapter", _adapter(adapter)) for adapter in found.adapters),
        *(
            ("build", f"{build.engine}: {build.name} {build.version}" + (f" - {build.reason}" if build.reason else ""))
            for build in found.builds
        ),
        *(("chosen", f"{engine}: {build}") for engine, build in sorted((found.engine_builds or {}).items())),
        *(("file", f"{file.path}  {file.size_bytes / 1e6:.0f} MB") for file in found.files),
        *(("cut", f"the list of {name} is longer than shown") for name in found.cut),
    ]
    return "\n".join(f"{name:<11} {'-' if value is None else value}" for name, value in lines)


def _adapter(adapter: protocol.RdmaAdapter) -> str:
    ports = (
        f"{port.number} {port.link_layer or '-'} {port.state or '-'}"
        + (f" {port.rate_gbit_s:g} Gbit/s" if port.rate_gbit_s is not None else "")
        + (f" - {port.fault}" if port.fault else "")
        for port in adapter.ports
    )
    return f"{adapter.name}  " + ("; ".join(ports) if not adapter.fault else adapter.fault)


def version() -> str:
    try:
        return metadata.version("llmgw")
    except metadata.PackageNotFoundError:
        return "unknown"


def main(argv: list[str] | None = None) -> int:
    """`python -m agent`: the agent without the rest of llmgw's command line."""
    parser = argparse.ArgumentParser(prog="python -m agent", description="Serve this machine as a node of llmgw.")
    parser.add_argument("--config", type=Path, help="agent.yaml")
    parser.add_argument("--inventory", choices=("text", "json"), help="print what the scheduler would see, and end")
    parser.add_argument("--doctor", action="store_true", help="check this machine, say what to fix, and end")
    options = parser.parse_args(argv)
    try:
        settings = load(options.config)
    except ConfigError as error:
        print(f"llmgw agent: {error}", file=sys.stderr)
        return 2
    if options.inventory:
        found = inventory(settings)
        print(inventory_json(found) if options.inventory == "json" else inventory_text(found))
        return 0
    if options.doctor:
        from agent.doctor import check, text

        findings = check(settings)
        print(text(findings))
        return 0 if all(finding.ok for finding in findings) else 1
    return run(settings)


async def _serve(settings: AgentSettings, hardware: Hardware | None) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await Agent(settings, hardware).serve(stopped)


def _lock(path: Path) -> IO[bytes]:
    """Held until closed, or until this process dies. Raises BlockingIOError while another agent holds it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _installer(settings: AgentSettings) -> Installer:
    return Installer(settings.work_dir / "engines", binaries=settings.programs)


def _host(settings: AgentSettings, machine: Machine) -> Host:
    return Host(
        address=settings.address or "127.0.0.1",
        architecture=machine.architecture(),
        cores=machine.cpu().cores,
        memory_bytes=machine.memory_bytes(),
        llamacpp_threads=settings.llamacpp.threads,
    )


def _seen(host: Host, found: Found) -> Host:
    """The host with what was found on it."""
    return dataclasses.replace(
        host,
        gpus=len(found.gpus),
        cards=found.gpus,
        fabrics=found.fabrics,
        adapters=found.adapters,
        interface=interfaces.holding(host.address),
    )


def _inventory(machine: Machine, weights: Weights, installer: Installer, host: Host, found: Found) -> Inventory:
    present, cut = weights.present()
    told = Inventory(
        hostname=machine.hostname(),
        os=machine.os_name(),
        kernel=machine.kernel(),
        cpu=machine.cpu(),
        memory_bytes=machine.memory_bytes(),
        disks=machine.disks(),
        gpus=found.gpus,
        gpus_fault=found.gpus_fault,
        driver=found.driver,
        cuda=found.cuda,
        fabrics=found.fabrics,
        adapters=found.adapters,
        builds=installer.present(host),
        engine_builds=installer.chosen(),
        files=present,
        cut=("files",) if cut else (),
    )
    return within_bounds(told)


def _lasting(told: Inventory) -> Inventory:
    """Without free space, which every heartbeat tells."""
    return msgspec.structs.replace(
        told, disks=tuple(Disk(path=disk.path, total_bytes=disk.total_bytes) for disk in told.disks)
    )


def _gib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"

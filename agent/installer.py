"""Engine builds on this machine: the chosen one, or the first that fits, installs and computes (AG-30 to AG-32)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from functools import partial
from pathlib import Path

from agent import builds, files, uv
from agent.choices import Choices
from agent.engines import ENGINES, base
from agent.host import Host
from agent.protocol import AUTO, NONE, Build
from agent.singleflight import SingleFlight

log = logging.getLogger(__name__)
LAUNCHER = Path(__file__).parent / "engines" / "llama_server.py"
TRIAL_S = 60.0
_TRIAL = "import xllamacpp; xllamacpp.get_system_info(); xllamacpp.get_device_info()"


class InstallError(Exception):
    """`str()` is the whole sentence."""


class Installer:
    """`directory` holds one directory a build; `binaries` are servers that the operator named, never replaced."""

    def __init__(self, directory: Path, *, binaries: dict[str, Path] | None = None) -> None:
        self._directory = directory
        self._binaries = binaries or {}
        self._choices = Choices(directory / "chosen.json")
        self._flights: SingleFlight[base.Build] = SingleFlight()
        self._failures: dict[str, str] = {}

    def held(self, engine: str, host: Host) -> base.Build | None:
        """The build that `ensure` would give, if it is there already; None when it has work to do, or an objection."""
        chosen = self._choices.of(engine)
        if engine in self._binaries:
            usable = self._binaries[engine].is_file() and not builds.passed_over(engine, builds.NAMED, chosen)
            return _named(self._binaries[engine]) if usable else None
        best = next((each for each in builds.for_engine(engine) if not _objection(each, host, chosen)), None)
        home = self._directory / best.directory if best else None
        return _installed(best, home) if best and home and home.is_dir() else None

    async def ensure(self, engine: str, host: Host) -> base.Build:
        """The build of `engine` to run here, installed when it is not there. Raises InstallError."""
        chosen = self._choices.of(engine)
        if chosen == NONE:
            raise InstallError(builds.switched_off(engine))
        if engine in self._binaries:
            if reason := builds.passed_over(engine, builds.NAMED, chosen):
                raise InstallError(reason)
            binary = self._binaries[engine]
            if not binary.is_file():
                raise InstallError(f"{engine}: {binary} is not a file. Correct agent.yaml, or leave it out.")
            return _named(binary)
        reasons = []
        for build in builds.for_engine(engine):
            objection = _objection(build, host, chosen)
            if not objection:
                try:
                    return await self._flights.get(build.directory, partial(self._install, build))
                except (uv.UvError, InstallError) as error:
                    objection = str(error)
                except OSError as error:
                    objection = files.sentence(error, f"{build.name} {build.version} cannot be installed")
                self._failures[build.directory] = objection
                log.warning("Build %s %s passed over: %s", build.name, build.version, objection)
            reasons.append(objection)
        raise InstallError(" ".join(reasons) or builds.unnamed(engine))

    def present(self, host: Host) -> tuple[Build, ...]:
        """Every build this node could run, with why not for those it cannot."""
        found = [
            self._shown(engine, builds.NAMED, "unknown", _missing(path)) for engine, path in self._binaries.items()
        ]
        if host.gpus:
            found += [
                self._shown(engine, builds.NAMED, "-", builds.unnamed(engine))
                for engine in builds.NAMED_ONLY
                if engine not in self._binaries
            ]
        for build in builds.BUILDS:
            if build.engine not in self._binaries:
                reason = builds.objection(build, host) or self._failures.get(build.directory, "")
                found.append(self._shown(build.engine, build.name, build.version, reason))
        return tuple(found)

    def _shown(self, engine: str, name: str, version: str, reason: str) -> Build:
        reason = builds.passed_over(engine, name, self._choices.of(engine)) or reason
        return Build(engine=engine, name=name, version=version, usable=not reason, reason=reason)

    # --- what the control plane chose ------------------------------------------------------------------------------
    def chosen(self) -> dict[str, str]:
        """By engine, where it is not AUTO."""
        return self._choices.told()

    def refusal(self, engine: str) -> str:
        """Why nothing of `engine` is to start here; empty when it may."""
        return builds.switched_off(engine) if self._choices.of(engine) == NONE else ""

    def choose(self, engine: str, build: str, host: Host) -> str:
        """Use this build from the next start on; the answer is empty, or why not."""
        if engine not in ENGINES:
            return f"This agent knows no engine {engine[:40]!r}; it knows {', '.join(sorted(ENGINES))}."
        there = sorted({each.name for each in self.present(host) if each.engine == engine})
        if build not in (AUTO, NONE, *there):
            return f"This node has no build {build[:40]!r} of {engine}; choose {', '.join((AUTO, *there))} or {NONE}."
        try:
            self._choices.keep(engine, build)
        except OSError as error:
            return files.sentence(error, f"the choice of {build} for {engine} cannot be kept")
        log.info("Of %s the control plane chose %s, from the next start on", engine, build)
        return ""

    async def _install(self, build: builds.Wheel) -> base.Build:
        home = self._directory / build.directory
        if not home.is_dir():
            free = files.free_bytes(self._directory)
            if free is not None and free < build.disk_bytes:
                raise InstallError(
                    f"{build.name} needs {build.disk_bytes / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free. "
                    "Free space, or move work_dir to a larger disk."
                )
            scratch = self._directory / f".{build.directory}.installing"
            await asyncio.to_thread(files.remove, scratch)
            try:
                log.info("Installing %s %s", build.name, build.version)
                what = f"{build.name} {build.version} cannot be installed"
                await uv.install_wheel(build.requirement(), scratch, what=what)
                await self._try(build, scratch)
                scratch.replace(home)
            finally:
                await asyncio.to_thread(files.remove, scratch)
        self._failures.pop(build.directory, None)
        return _installed(build, home)

    async def _try(self, build: builds.Wheel, home: Path) -> None:
        """Run a little of the build: a wheel for another CPU installs well and dies of an illegal instruction."""
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-c",
            _TRIAL,
            env={"PYTHONPATH": str(home), "PATH": "/usr/bin:/bin"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(TRIAL_S):
                _, errors = await child.communicate()
        except TimeoutError:
            raise InstallError(f"{build.name} {build.version} does not answer on this machine.") from None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if child.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"status {child.returncode}"]
            raise InstallError(
                f"{build.name} {build.version} is installed and does not run on this machine: {last[0]}."
            )


def _objection(build: builds.Wheel, host: Host, chosen: str) -> str:
    return builds.passed_over(build.engine, build.name, chosen) or builds.objection(build, host) or ""


def _named(binary: Path) -> base.Build:
    return base.Build(name=builds.NAMED, version="unknown", argv=(str(binary),))


def _installed(build: builds.Wheel, home: Path) -> base.Build:
    return base.Build(
        name=build.name,
        version=build.version,
        # -P: the launcher's own directory must hide no module of the build. -u: a killed engine's last line counts.
        argv=(sys.executable, "-P", "-u", str(LAUNCHER)),
        env=(("PYTHONPATH", str(home)),),
    )


def _missing(path: Path) -> str:
    return "" if path.is_file() else f"{path} is not a file."

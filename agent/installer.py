"""Engine builds on this machine: the first pinned one that fits, installs and computes (AG-30, AG-31)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from functools import partial
from pathlib import Path

from agent import builds, files, uv
from agent.engines import base
from agent.host import Host
from agent.protocol import Build
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
        self._flights: SingleFlight[base.Build] = SingleFlight()
        self._failures: dict[str, str] = {}

    def held(self, engine: str, host: Host) -> base.Build | None:
        """The build that `ensure` would give, if it is there already; None when it has work to do, or an objection."""
        if engine in self._binaries:
            return _named(self._binaries[engine]) if self._binaries[engine].is_file() else None
        best = next((each for each in builds.for_engine(engine) if builds.objection(each, host) is None), None)
        home = self._directory / best.directory if best else None
        return _installed(best, home) if best and home and home.is_dir() else None

    async def ensure(self, engine: str, host: Host) -> base.Build:
        """The build of `engine` to run here, installed when it is not there. Raises InstallError."""
        if engine in self._binaries:
            binary = self._binaries[engine]
            if not binary.is_file():
                raise InstallError(f"{engine}: {binary} is not a file. Correct agent.yaml, or leave it out.")
            return _named(binary)
        reasons = []
        for build in builds.for_engine(engine):
            objection = builds.objection(build, host)
            if objection is None:
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
            Build(engine=engine, name="named", version="unknown", usable=path.is_file(), reason=_missing(path))
            for engine, path in self._binaries.items()
        ]
        if host.gpus:
            found += [
                Build(engine=engine, name="named", version="-", usable=False, reason=builds.unnamed(engine))
                for engine in builds.NAMED_ONLY
                if engine not in self._binaries
            ]
        for build in builds.BUILDS:
            if build.engine not in self._binaries:
                reason = builds.objection(build, host) or self._failures.get(build.directory, "")
                found.append(
                    Build(engine=build.engine, name=build.name, version=build.version, usable=not reason, reason=reason)
                )
        return tuple(found)

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


def _named(binary: Path) -> base.Build:
    return base.Build(name="named", version="unknown", argv=(str(binary),))


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

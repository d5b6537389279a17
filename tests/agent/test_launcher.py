"""The launcher in the place of llama-server: same flags, same refusals; and the build behind it (AG-31, AG-35)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agent import builds, files, installer, uv
from agent.engines import llama_server
from agent.engines.base import Build, Launch
from agent.engines.llamacpp import LlamaCpp
from agent.host import Host
from agent.installer import Installer, InstallError
from agent.weights import Weights
from tests.agent.conftest import SMOLLM2, free_port, spec

HERE = Host(address="127.0.0.1", architecture=os.uname().machine, cores=2, memory_bytes=2**33)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return asyncio.run(Installer(tmp_path_factory.mktemp("engines")).ensure("llamacpp", HERE))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(Weights(tmp_path_factory.mktemp("models")).ensure(SMOLLM2, lambda _: None))


def run(build: Build, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **dict(build.env), **variables}
    return subprocess.run(
        [*build.argv, *flags], env=environment, capture_output=True, text=True, timeout=110, check=False
    )


@contextlib.contextmanager
def serving(build: Build, *flags: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    environment = {"PATH": os.environ["PATH"], **dict(build.env), **variables}
    with subprocess.Popen(
        [*build.argv, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def wait_for(child: subprocess.Popen[str], words: str) -> None:
    assert child.stdout is not None
    seen = []
    for line in child.stdout:
        seen.append(line)
        if words in line:
            return
    raise AssertionError("".join(seen))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--no-such-flag",), "error: invalid argument: --no-such-flag"),
        (("--api-key", "k"), "error: invalid argument: --api-key"),
        (("--model",), "error: expected value for argument: --model"),
        (("--port", "many"), "error: invalid value for argument --port: many"),
        (("--pooling", "max"), "error: invalid value for argument --pooling: max"),
        (("--flash-attn", "perhaps"), "error: invalid value for argument --flash-attn: perhaps"),
        (("--fit", "perhaps"), "error: invalid value for argument --fit: perhaps"),
        (("-ngl", "some"), "error: invalid value for argument -ngl: some"),
        (("--lora-scaled", "/nothing:1"), "error: failed to open LoRA adapter '/nothing'"),
        (("--lora-scaled", "/nothing:much"), "error: invalid value for argument --lora-scaled"),
        (("--rope-freq-base", "x"), "error: invalid value for argument --rope-freq-base: x"),
        ((), "error: no model: give one with --model FILE"),
        (("-m", "/nothing.gguf"), "error: failed to open model '/nothing.gguf': No such file or directory"),
        (("-m", __file__), "is not a GGUF file"),
    ],
)
def test_what_llama_server_refuses_ends_the_launcher_with_one_line(
    build: Build, flags: tuple[str, ...], says: str
) -> None:
    done = run(build, *flags)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_sampling_flags_are_what_requests_get_that_name_nothing(build: Build, smollm2: Path) -> None:
    port = free_port()
    flags = ("--temp", "0.25", "--top-p", "0.5", "--top-k", "7", "--min-p", "0.125", "--repeat-penalty", "1.5")
    with serving(build, "-m", str(smollm2), "--port", str(port), "-c", "512", *flags) as child:
        wait_for(child, "listening on")
        settings = httpx.get(f"http://127.0.0.1:{port}/props", trust_env=False, timeout=60).json()[
            "default_generation_settings"
        ]
    found = settings["params"]
    names = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
    assert [round(found[name], 3) for name in names] == [0.25, 0.5, 7, 0.125, 1.5]


def test_a_taken_port_and_a_torn_model_are_said(build: Build, smollm2: Path, tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        done = run(build, "-m", str(smollm2), "--port", str(one.getsockname()[1]))
    assert done.returncode == 1
    assert "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: " in done.stderr
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(smollm2.read_bytes()[:100_000])
    done = run(build, "-m", str(torn), "--port", str(free_port()))
    assert done.returncode == 1
    assert "the server did not start" in done.stderr


def test_every_flag_sets_what_the_wheel_knows(build: Build) -> None:
    values = {"host": "127.0.0.1", "cache-type-k": "q8_0", "cache-type-v": "q8_0", "pooling": "mean", "fit": "off"}
    values |= {"flash-attn": "auto", "rope-scaling": "none", "log-colors": "off", "lora-scaled": "", "model": "/m"}
    flags = [flags[0] for flags, _ in llama_server.SWITCHES]
    for names, _ in llama_server.VALUED:
        long = next(name for name in names if name.startswith("--"))
        value = values.get(long.removeprefix("--"), "1")
        flags += [long, value] if value else []
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import llama_server, xllamacpp\n"
        "params = xllamacpp.CommonParams()\n"
        "for put, flag, value in llama_server.read_flags(sys.argv[2:]): put(params, value)\n"
        "print(params.n_parallel, params.embedding, params.hostnames, params.model_alias, params.endpoint_metrics)"
    )
    folder = str(Path(llama_server.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, folder, *flags],
        env=dict(build.env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "1 True ['127.0.0.1'] {'1'} True"


def test_sigterm_ends_it_at_once_while_loading_and_while_answering(build: Build, smollm2: Path) -> None:
    port = free_port()
    flags = ("-m", str(smollm2), "-a", "m", "--port", str(port), "-c", "2048", "-np", "1", "-t", "1")
    with serving(build, *flags) as child:
        wait_for(child, "loading model")
        child.terminate()
        assert child.wait(60) == -signal.SIGTERM
        assert child.stdout is not None
        assert "serving on" not in child.stdout.read()
    with serving(build, *flags) as child, httpx.Client(trust_env=False, timeout=60) as http:
        wait_for(child, "serving on")
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "stream": True}
        with http.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()
            got = next(pieces)
            child.terminate()
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                got += b"".join(pieces)
        child.wait(60)
    assert b"[DONE]" not in got


def test_the_adapters_command_serves_embeddings_and_every_route_but_health_wants_the_key(
    build: Build, smollm2: Path
) -> None:
    launch = Launch(build, str(smollm2), free_port(), key="k1")
    args = ("--embeddings", "--pooling", "mean", "-c", "1024")
    (command,) = LlamaCpp().commands(spec(smollm2, model="embedder", args=args), HERE, launch)
    extra = dict(command.env) | dict(command.secrets) | {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "1"}
    url = f"http://127.0.0.1:{launch.port}"
    routes = {
        "GET": "/v1/models /models /metrics /props /slots /lora-adapters",
        "POST": "/v1/chat/completions /v1/completions /v1/embeddings /completion /embedding /tokenize /detokenize"
        " /infill /apply-template /v1/responses /v1/messages /v1/rerank /slots/0 /lora-adapters /props",
    }
    with (
        serving(Build("b", "1", command.argv, ()), **extra) as child,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        wait_for(child, "serving on")
        open_to_all = [
            f"{method} {path}"
            for method, paths in routes.items()
            for path in paths.split()
            if http.request(method, url + path, json={} if method == "POST" else None).status_code != 401
        ]
        assert open_to_all == []
        assert http.get(f"{url}/health").status_code == 200
        answer = http.post(f"{url}/v1/embeddings", json={"input": "a"}, headers={"Authorization": "Bearer k1"})
        assert len(answer.json()["data"][0]["embedding"]) == 576


# --- the build -------------------------------------------------------------------------------------------------------
async def test_a_build_that_does_not_compute_is_passed_over_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "_TRIAL", "raise SystemExit('illegal instruction')")
    one = Installer(tmp_path)
    with pytest.raises(InstallError, match="does not run on this machine: illegal instruction"):
        await one.ensure("llamacpp", HERE)
    assert list(tmp_path.iterdir()) == []
    (shown,) = one.present(HERE)
    assert not shown.usable
    assert "illegal instruction" in shown.reason
    monkeypatch.setattr(installer, "_TRIAL", "import xllamacpp")
    assert one.held("llamacpp", HERE) is None
    await asyncio.gather(*(one.ensure("llamacpp", HERE) for _ in range(3)))
    assert one.held("llamacpp", HERE) == await one.ensure("llamacpp", HERE)
    assert one.held("llamacpp", Host("a", "riscv64")) is None
    assert [path.name for path in tmp_path.iterdir()] == [builds.XLLAMACPP.directory]
    assert one.present(HERE)[0].usable


async def test_an_installation_that_fails_leaves_nothing_and_says_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(InstallError, match=r"xllamacpp .* cannot be installed: the package index"):
        await Installer(tmp_path / "engines").ensure("llamacpp", HERE)
    assert list((tmp_path / "engines").iterdir()) == []
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(InstallError, match="Free space"):
        await Installer(tmp_path / "engines").ensure("llamacpp", HERE)
    with pytest.raises(InstallError, match="llmgw installs no vllm yet"):
        await Installer(tmp_path / "engines").ensure("vllm", HERE)
    with pytest.raises(InstallError, match="made for x86_64 and aarch64"):
        await Installer(tmp_path / "engines").ensure("llamacpp", Host("a", "riscv64"))


def test_an_engine_that_nobody_installed_says_so_where_there_are_cards(tmp_path: Path) -> None:
    one = Installer(tmp_path / "engines", binaries={"sglang": Path(sys.executable)})
    found = {build.engine: build for build in one.present(Host("127.0.0.1", "x86_64", gpus=2))}
    assert (found["vllm"].usable, found["sglang"].usable) == (False, True)
    says = "llmgw installs no vllm yet; install it on the node and name it in agent.yaml as vllm.binary."
    assert found["vllm"].reason == says
    assert {build.engine for build in one.present(HERE)} == {"llamacpp", "sglang"}


async def test_a_binary_that_the_operator_named_is_used_as_it_is(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    one = Installer(tmp_path / "engines", binaries={"llamacpp": binary})
    with pytest.raises(InstallError, match="is not a file"):
        await one.ensure("llamacpp", HERE)
    assert not one.present(HERE)[0].usable
    assert one.held("llamacpp", HERE) is None
    binary.touch()
    assert one.held("llamacpp", HERE) == await one.ensure("llamacpp", HERE)
    assert (await one.ensure("llamacpp", HERE)).argv == (str(binary),)
    assert [(shown.name, shown.usable) for shown in one.present(HERE)] == [("named", True)]


async def test_an_installation_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "uv"
    slow.write_text("#!/bin/sh\nsleep 3600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(uv, "_uv", lambda: str(slow))
    with pytest.raises(uv.UvError, match="did not finish within"):
        await uv.install_wheel("x==1", tmp_path / "target", what="x 1 cannot be installed", limit_s=0.3)
    monkeypatch.setattr(uv, "_uv", lambda: str(tmp_path / "nothing"))
    with pytest.raises(uv.UvError, match="uv cannot be started"):
        await uv.install_wheel("x==1", tmp_path / "target", what="x 1 cannot be installed")

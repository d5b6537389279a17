"""Runs llama.cpp's own HTTP server out of the xllamacpp wheel, with llama-server's flag names.

A program of its own, `llama_server.py -m FILE --port N …`: the agent starts it exactly as it would start llama-server,
and either can take the other's place. The key comes from LLAMA_API_KEY alone, so that no process list shows it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

Set = Callable[[Any, str], None]

_ON = ("1", "on", "true", "enabled")
_OFF = ("0", "off", "false", "disabled")


class Invalid(Exception):
    """A value that its flag does not take."""


def _int(field: str) -> Set:
    def put(params: Any, text: str) -> None:
        try:
            _assign(params, field, int(text))
        except ValueError:
            raise Invalid(text) from None

    return put


def _float(field: str) -> Set:
    def put(params: Any, text: str) -> None:
        try:
            _assign(params, field, float(text))
        except ValueError:
            raise Invalid(text) from None

    return put


def _text(field: str) -> Set:
    return lambda params, text: _assign(params, field, text)


def _words(field: str, kind: type) -> Set:
    return lambda params, text: _assign(params, field, kind(word for word in text.split(",") if word))


def _const(field: str, value: Any) -> Set:
    return lambda params, _: _assign(params, field, value)


def _member(field: str, kind: str, prefix: str) -> Set:
    """A member of the wheel's enumeration `kind`, called by what follows `prefix` in its name."""

    def put(params: Any, text: str) -> None:
        import xllamacpp

        name = prefix + text.upper()
        members = getattr(xllamacpp, kind).__members__
        if name not in members:
            raise Invalid(text)
        _assign(params, field, members[name])

    return put


def _assign(params: Any, field: str, value: Any) -> None:
    *parents, last = field.split(".")
    for parent in parents:
        params = getattr(params, parent)
    setattr(params, last, value)


def _layers(params: Any, text: str) -> None:
    counts = {"auto": -1, "all": -2}
    if text in counts:
        params.n_gpu_layers = counts[text]
    else:
        _int("n_gpu_layers")(params, text)


def _flash_attention(params: Any, text: str) -> None:
    word = "ENABLED" if text in _ON else "DISABLED" if text in _OFF else text
    _member("flash_attn_type", "llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_")(params, word)


def _switch(field: str) -> Set:
    def put(params: Any, text: str) -> None:
        if text not in (*_ON, *_OFF):
            raise Invalid(text)
        _assign(params, field, text in _ON)

    return put


def _lora(params: Any, text: str) -> None:
    import xllamacpp

    adapters = list(params.lora_adapters)
    for item in text.split(","):
        path, _, scale = item.rpartition(":")
        adapter = xllamacpp.CommonAdapterLoraInfo()
        try:
            adapter.path, adapter.scale = path, float(scale)
        except ValueError:
            raise Invalid(item) from None
        if not os.path.isfile(path):
            _die(f"error: failed to open LoRA adapter '{path}'")
        adapters.append(adapter)
    params.lora_adapters = adapters


def _reranking(params: Any, _: str) -> None:
    params.embedding = True
    _member("pooling_type", "llama_pooling_type", "LLAMA_POOLING_TYPE_")(params, "rank")


def _verbosity(params: Any, text: str) -> None:
    _int("verbosity")(params, text)


def _nothing(params: Any, text: str) -> None:
    """Asks for what this build does anyway."""


VALUED: tuple[tuple[tuple[str, ...], Set], ...] = (
    (("-m", "--model"), _text("model.path")),
    (("-a", "--alias"), _words("model_alias", set)),
    (("--tags",), _words("model_tags", set)),
    (("--host",), _words("hostnames", list)),
    (("--port",), _int("port")),
    (("-np", "--parallel"), _int("n_parallel")),
    (("-c", "--ctx-size"), _int("n_ctx")),
    (("-n", "--predict", "--n-predict"), _int("n_predict")),
    (("-t", "--threads"), _int("cpuparams.n_threads")),
    (("-tb", "--threads-batch"), _int("cpuparams_batch.n_threads")),
    (("--threads-http",), _int("n_threads_http")),
    (("-b", "--batch-size"), _int("n_batch")),
    (("-ub", "--ubatch-size"), _int("n_ubatch")),
    (("--keep",), _int("n_keep")),
    (("-ngl", "--gpu-layers", "--n-gpu-layers"), _layers),
    (("-mg", "--main-gpu"), _int("main_gpu")),
    (("-fa", "--flash-attn"), _flash_attention),
    (("-fit", "--fit"), _switch("fit_params")),
    (("-ctk", "--cache-type-k"), _member("cache_type_k", "ggml_type", "GGML_TYPE_")),
    (("-ctv", "--cache-type-v"), _member("cache_type_v", "ggml_type", "GGML_TYPE_")),
    (("-cram", "--cache-ram"), _int("cache_ram_mib")),
    (("--cache-reuse",), _int("n_cache_reuse")),
    (("-sps", "--slot-prompt-similarity"), _float("slot_prompt_similarity")),
    (("--temp", "--temperature"), _float("sampling.temp")),
    (("--top-k",), _int("sampling.top_k")),
    (("--top-p",), _float("sampling.top_p")),
    (("--min-p",), _float("sampling.min_p")),
    (("--repeat-penalty",), _float("sampling.penalty_repeat")),
    (("--pooling",), _member("pooling_type", "llama_pooling_type", "LLAMA_POOLING_TYPE_")),
    (("--lora-scaled",), _lora),
    (("-mm", "--mmproj"), _text("mmproj.path")),
    (("--chat-template",), _text("chat_template")),
    (("--rope-freq-base",), _float("rope_freq_base")),
    (("--rope-freq-scale",), _float("rope_freq_scale")),
    (("--rope-scaling",), _member("rope_scaling_type", "llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_")),
    (("--sleep-idle-seconds",), _int("sleep_idle_seconds")),
    (("--sse-ping-interval",), _int("sse_ping_interval")),
    (("-to", "--timeout"), _int("timeout_read")),
    (("-lv", "--verbosity", "--log-verbosity"), _verbosity),
    (("--log-colors",), _nothing),
)
SWITCHES: tuple[tuple[tuple[str, ...], Set], ...] = (
    (("--metrics",), _const("endpoint_metrics", True)),
    (("--slots",), _const("endpoint_slots", True)),
    (("--no-slots",), _const("endpoint_slots", False)),
    (("--props",), _const("endpoint_props", True)),
    (("--embedding", "--embeddings"), _const("embedding", True)),
    (("--rerank", "--reranking"), _reranking),
    (("--ui", "--webui"), _const("ui", True)),
    (("--no-ui", "--no-webui"), _const("ui", False)),
    (("--offline",), _const("offline", True)),
    (("--jinja",), _const("use_jinja", True)),
    (("--no-jinja",), _const("use_jinja", False)),
    (("-kvu", "--kv-unified"), _const("kv_unified", True)),
    (("-no-kvu", "--no-kv-unified"), _const("kv_unified", False)),
    (("--context-shift",), _const("ctx_shift", True)),
    (("--no-context-shift",), _const("ctx_shift", False)),
    (("--no-warmup",), _const("warmup", False)),
    (("--no-cont-batching", "-nocb"), _const("cont_batching", False)),
    (("--cont-batching", "-cb"), _const("cont_batching", True)),
    (("--swa-full",), _const("swa_full", True)),
    (("--log-jsonl",), _const("log_json", True)),
    (("--log-timestamps", "--log-prefix"), _nothing),
)


def read_flags(argv: list[str]) -> list[tuple[Set, str, str]]:
    """What to set, in order; ends the program on a flag or value that llama-server would refuse."""
    valued = {flag: put for flags, put in VALUED for flag in flags}
    switches = {flag: put for flags, put in SWITCHES for flag in flags}
    found = []
    rest = iter(argv)
    for arg in rest:
        if arg in switches:
            found.append((switches[arg], arg, ""))
        elif arg in valued:
            value = next(rest, None)
            if value is None:
                _die(f"error: expected value for argument: {arg}")
            found.append((valued[arg], arg, value))
        else:
            _die(f"error: invalid argument: {arg}")
    return found


def _die(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    sys.exit(1)


def _check_model(path: str) -> None:
    if not path:
        _die("error: no model: give one with --model FILE")
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        _die(f"error: failed to open model '{path}': {error.strerror}")
    if magic != b"GGUF":
        _die(f"error: '{path}' is not a GGUF file")


def _check_port(hosts: list[str], port: int) -> None:
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                _die(f"error: couldn't bind HTTP server socket, hostname: {host}, port: {port}: {error.strerror}")


def main(argv: list[str]) -> NoReturn:
    # Loading runs in native code that never comes back to Python: only the default action ends it at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    flags = read_flags(argv)
    for name in [name for name in os.environ if name.startswith("AIP_")]:
        del os.environ[name]  # they would move the port
    keys = [key for key in os.environ.pop("LLAMA_API_KEY", "").split(",") if key]

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.port = 8080
    for put, flag, value in flags:
        try:
            put(params, value)
        except Invalid:
            _die(f"error: invalid value for argument {flag}: {value}")
    params.api_keys = keys
    _check_model(params.model.path)
    _check_port(list(params.hostnames), params.port)
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        _die(f"error: the server did not start: {error} The lines above say why.")
    print(f"serving on {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Adapters as the catalog takes them: their files are read first, and what is none for the model never gets in."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from catalog import actions, adapter_files, spec
from catalog.actions import CatalogRefused
from catalog.engine_args import lora_rank
from catalog.models import CatalogVersion, Model
from catalog.spec import Adapter, Profile
from tenants.audit import Actor
from tenants.models import AuditEntry
from tests.catalog import adapters
from tests.stubs import tiny_gguf

pytestmark = pytest.mark.django_db

ALICE = Actor(name="alice", via="cli")
LAMA = Profile(name="cpu", engine="llamacpp")
VLLM = Profile(name="gpu", engine="vllm", gpu_class="h100-80g")


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    """A model in the catalog whose file this machine has."""
    source = str(tiny_gguf.write_model(tmp_path / "tiny.gguf"))
    actions.put_model(model=spec.Model(name="m", aliases=("chat",), source=source, profiles=(LAMA,)), actor=ALICE)
    return source


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    source = adapters.write_model(tmp_path / "hf")
    actions.put_model(model=spec.Model(name="m", source=str(source), profiles=(VLLM,)), actor=ALICE)
    return source


def add(name: str, source: object, model: str = "m") -> list[str]:
    """What was remarked on when it was added."""
    done = actions.add_adapter(model=model, adapter=Adapter(name, str(source)), actor=ALICE)
    return [notice.text for notice in done.notices]


def refused(name: str, source: object, model: str = "m") -> str:
    with pytest.raises(CatalogRefused) as said:
        add(name, source, model)
    return str(said.value)


def held() -> dict[str, str]:
    return {each.name: each.source for model in Model.objects.snapshot() for each in model.adapters}


# --- GGUF ------------------------------------------------------------------------------------------------------------
def test_an_adapter_of_the_model_is_added_with_a_version_and_an_audit_row(gguf: str, tmp_path: Path) -> None:
    path = tiny_gguf.write_adapter(tmp_path / "red.gguf")
    assert add("red", path) == []
    assert held() == {"red": str(path)}
    version = CatalogVersion.objects.first()
    assert version is not None
    assert (version.made_by, version.note) == ("alice", "add adapter red to m")
    assert AuditEntry.objects.filter(target=f"version {version.number}: m").exists()
    actions.remove_adapter(model="m", name="red", actor=ALICE)
    assert held() == {}


def test_what_is_no_adapter_for_the_model_is_refused_by_name(gguf: str, tmp_path: Path) -> None:
    other = tiny_gguf.write_adapter(tmp_path / "other.gguf", architecture="qwen2")
    wide = tiny_gguf.write_adapter(tmp_path / "wide.gguf", width=128)
    (tmp_path / "text.gguf").write_text("no adapter")
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(other.read_bytes()[:100])
    assert refused("red", other).startswith("model m: adapters: Adapter red: It was made for qwen2, and the model is")
    assert "fits 128 x" in refused("red", wide)
    assert "general.type is model" in refused("red", gguf)
    assert "text.gguf does not begin with GGUF" in refused("red", tmp_path / "text.gguf")
    assert "torn.gguf ends within its head" in refused("red", torn)
    assert held() == {}
    assert CatalogVersion.objects.count() == 1


def test_every_way_into_the_catalog_reads_the_file(gguf: str, tmp_path: Path) -> None:
    bad = Adapter("red", str(tiny_gguf.write_adapter(tmp_path / "other.gguf", architecture="qwen2")))
    (model,) = Model.objects.snapshot()
    wrong = replace(model, adapters=(bad,))
    CatalogVersion.objects.filter(number=1).update(
        text=f"models: [{{name: m, source: {gguf}, adapters: [{{name: red, source: {bad.source}}}],"
        " profiles: [{name: cpu, engine: llamacpp}]}]"
    )
    for change in (
        lambda: actions.check_catalog(models=[wrong]),
        lambda: actions.apply_catalog(models=[wrong], actor=ALICE),
        lambda: actions.put_model(model=wrong, actor=ALICE),
        lambda: actions.roll_back(version=1, actor=ALICE),
    ):
        with pytest.raises(CatalogRefused, match="made for qwen2"):
            change()
    assert held() == {}


def test_a_file_that_is_only_on_nodes_is_taken_and_said(gguf: str, tmp_path: Path) -> None:
    (said,) = add("red", "/only/on/nodes.gguf")
    assert said == (
        "Adapter red: /only/on/nodes.gguf was not read from here (no such file or directory); "
        "each node looks at it before it starts an engine."
    )
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "it is no file" in add("blue", pipe)[0]
    wheel = "pypi://pkg==1.0/a.gguf?wheel_sha256=" + "a" * 64 + "&sha256=" + "a" * 64
    assert "inside a wheel" in add("green", wheel)[0]
    assert "in each node's own folder of models" in add("grey", "./grey.gguf")[0]
    assert list(held()) == ["red", "blue", "green", "grey"]


def test_an_adapter_is_not_compared_with_a_model_that_is_elsewhere(tmp_path: Path) -> None:
    actions.put_model(model=spec.Model(name="m", source="/only/on/nodes.gguf", profiles=(LAMA,)), actor=ALICE)
    (said,) = add("red", tiny_gguf.write_adapter(tmp_path / "red.gguf"))
    assert said.startswith("Adapter red: It was made for llama. /only/on/nodes.gguf was not read from here")


def test_a_model_that_is_no_gguf_is_remarked_on(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("weights?")
    actions.put_model(model=spec.Model(name="m", source=str(tmp_path / "m.gguf"), profiles=(LAMA,)), actor=ALICE)
    (said,) = add("red", tiny_gguf.write_adapter(tmp_path / "red.gguf"))
    assert "m.gguf does not begin with GGUF" in said


def test_what_was_taken_before_is_not_read_again(gguf: str, tmp_path: Path) -> None:
    path = tiny_gguf.write_adapter(tmp_path / "red.gguf")
    add("red", path)
    path.write_text("broken since")
    (model,) = Model.objects.snapshot()
    done = actions.put_model(model=replace(model, scaling=spec.scaling(1)), actor=ALICE)
    assert (done.changed, done.notices) == (("m",), ())
    with pytest.raises(CatalogRefused, match="does not begin with GGUF"):  # other weights: it may not fit any more
        actions.put_model(model=replace(model, source=f"{gguf}2"), actor=ALICE)


# --- PEFT ------------------------------------------------------------------------------------------------------------
def test_a_peft_adapter_of_the_model_is_added(peft: Path, tmp_path: Path) -> None:
    assert add("red", adapters.write_peft(tmp_path / "red")) == []


def test_a_peft_directory_that_does_not_fit_is_refused(peft: Path, tmp_path: Path) -> None:
    narrow = adapters.write_peft(tmp_path / "narrow", width=64)
    assert f"Its {adapters.UP} fits 256 x 64, and the model's is 256 x 128" in refused("red", narrow)
    tuned = adapters.write_peft(tmp_path / "tuned", kind="IA3")
    assert "peft_type in its adapter_config.json is IA3, not LORA" in refused("red", tuned)
    assert "holds no adapter_config.json" in refused("red", peft)
    gguf_file = tiny_gguf.write_adapter(tmp_path / "a.gguf")
    assert "is no directory of an adapter" in refused("red", gguf_file)


def test_a_rank_above_what_the_engine_allows_is_refused_with_the_flag(peft: Path, tmp_path: Path) -> None:
    high = adapters.write_peft(tmp_path / "high", rank=32)
    assert "Its rank is 32, and profile gpu allows 16; write --max-lora-rank 32 among its args." in refused("red", high)
    (model,) = Model.objects.snapshot()
    allowing = replace(VLLM, args=("--max-lora-rank", "32"))
    actions.put_model(model=replace(model, profiles=(allowing,)), actor=ALICE)
    assert add("red", high) == []


@pytest.mark.parametrize(
    ("engine", "args", "rank"),
    [
        ("vllm", (), 16),
        ("vllm", ("--max-lora-rank=64",), 64),
        ("vllm", ("--max-lora-rank", "8", "--x", "--max-lora-rank", "32"), 32),
        ("vllm", ("--max-lora-rank",), 16),
        ("vllm", ("--max-lora-rank", "auto"), 16),
        ("sglang", (), None),
        ("sglang", ("--max-lora-rank", "8"), 8),
        ("llamacpp", ("--max-lora-rank", "8"), None),
    ],
)
def test_the_largest_rank_is_read_off_a_profiles_arguments(
    engine: str, args: tuple[str, ...], rank: int | None
) -> None:
    assert lora_rank(replace(VLLM, engine=engine, args=args)) == rank


def test_a_hub_model_is_left_to_the_engine_and_said(tmp_path: Path) -> None:
    actions.put_model(model=spec.Model(name="m", source="org/tiny", profiles=(VLLM,)), actor=ALICE)
    (said,) = add("red", adapters.write_peft(tmp_path / "red"))
    assert said.startswith("Adapter red: It was made for org/tiny. org/tiny was not read from here")
    assert "found by the engine itself" in add("blue", "org/blue")[0]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors.index.json").write_text("{}")
    actions.put_model(model=spec.Model(name="n", source=str(bare), profiles=(VLLM,)), actor=ALICE)
    assert "it holds no safetensors" in add("green", tmp_path / "red", "n")[0]


def test_one_adapter_cannot_serve_engines_that_want_different_files(tmp_path: Path) -> None:
    model = spec.Model(name="m", source="/m/a.gguf", profiles=(LAMA, VLLM))
    actions.put_model(model=model, actor=ALICE)
    assert "is no directory of an adapter" in refused("red", tiny_gguf.write_adapter(tmp_path / "red.gguf"))


# --- engines and names -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("profile", "source", "says"),
    [
        (VLLM, "https://h/a.gguf", "vllm takes a PEFT directory, and nodes fetch single files"),
        (replace(VLLM, engine="sglang"), "https://h/a.safetensors", "sglang takes a PEFT directory"),
        (LAMA, "org/adapter", "llama.cpp takes a file"),
        (LAMA, "", "It has no source."),
        (LAMA, "a b", "neither a path"),
    ],
)
def test_a_source_that_the_engine_could_not_be_given_is_refused(profile: Profile, source: str, says: str) -> None:
    actions.put_model(model=spec.Model(name="m", source="/m/m", profiles=(profile,)), actor=ALICE)
    assert says in refused("red", source)


def test_an_external_model_has_no_adapters() -> None:
    outside = spec.External("https://provider.example/v1", "gpt")
    actions.put_model(model=spec.Model(name="m", external=outside), actor=ALICE)
    assert "An external model has none here" in refused("red", "/a/red.gguf")


@pytest.mark.parametrize(
    "name", ["m", "M", "chat", "Chat", "\uff4d", "other", "red", "RED", "m ", "a\nb", "a/../b", ""]
)
def test_an_adapter_never_takes_a_name_that_is_held_or_cannot_be_told_apart(gguf: str, name: str) -> None:
    add("red", "/a/red.gguf")
    actions.put_model(model=spec.Model(name="other", source="/m/o", profiles=(LAMA,), fallbacks=("m",)), actor=ALICE)
    assert refused(name, "/a/blue.gguf")
    assert list(held()) == ["red"]


def test_no_alias_or_model_takes_an_adapters_name_later(gguf: str) -> None:
    add("red", "/a/red.gguf")
    (model,) = Model.objects.snapshot()
    with pytest.raises(CatalogRefused, match="red is already an alias of m"):
        actions.put_model(model=replace(model, aliases=("red",)), actor=ALICE)
    with pytest.raises(CatalogRefused, match="already an adapter of m"):
        actions.put_model(model=spec.Model(name="Red", source="/m/o", profiles=(LAMA,)), actor=ALICE)


def test_one_file_under_two_names_is_remarked_on(gguf: str) -> None:
    add("red", "/a/red.gguf")
    assert "rot is the same file as red" in add("rot", "/a/red.gguf")[0]


def test_what_is_not_there_is_named_with_what_is_close(gguf: str) -> None:
    add("red", "/a/red.gguf")
    with pytest.raises(CatalogRefused, match=r"There is no adapter 'rad'. Did you mean red\?"):
        actions.remove_adapter(model="m", name="rad", actor=ALICE)
    assert "There is no model of that name. Did you mean m?" in refused("blue", "/a/blue.gguf", "mm")


# --- over the network ------------------------------------------------------------------------------------------------
@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "web").mkdir()
    handler = partial(_Files, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class _Files(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data/a.gguf")
            self.end_headers()
            return
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_an_adapter_on_a_web_server_is_read_as_far_as_its_head(gguf: str, site: str, tmp_path: Path) -> None:
    tiny_gguf.write_adapter(tmp_path / "web" / "red.gguf")
    tiny_gguf.write_adapter(tmp_path / "web" / "other.gguf", architecture="qwen2")
    assert add("red", f"{site}/red.gguf") == []
    assert "made for qwen2" in refused("blue", f"{site}/other.gguf")
    assert "answered 404" in add("green", f"{site}/none.gguf")[0]


def test_what_cannot_be_reached_or_must_not_be_asked_is_said(gguf: str, site: str) -> None:
    assert "169.254.169.254 is a metadata address" in add("red", f"{site}/away.gguf")[0]
    assert "could not be reached" in add("blue", "http://127.0.0.1:1/a.gguf")[0]
    assert "nowhere.invalid has no address" in add("green", "http://nowhere.invalid/a.gguf")[0]


def test_a_disk_or_server_that_hangs_delays_a_change_and_no_more(tmp_path: Path) -> None:
    hangs, asked = threading.Event(), threading.Event()

    class Hanging(_Files):
        def do_GET(self) -> None:
            asked.set()
            hangs.wait(60)

    model = spec.Model(name="m", source="/m/a.gguf", profiles=(LAMA,))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hanging) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        wished = replace(model, adapters=(Adapter("red", f"{url}/red.gguf"), Adapter("blue", "/a/blue.gguf")))
        looked = adapter_files.look((wished,), (model,), limit_s=0.2)
        assert asked.wait(60)
        hangs.set()
        server.shutdown()
    assert looked.problems == []
    assert [notice.text.partition(":")[0] for notice in looked.notices] == ["Adapter red", "Adapter blue"]
    assert all("there was no time within 0.2 s" in notice.text for notice in looked.notices)

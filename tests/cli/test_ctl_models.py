"""`llmgw ctl model` and what `ctl models` prints, against a real server on a real port."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from catalog import actions as catalog_actions
from catalog import spec
from catalog.models import CatalogVersion, Model
from tenants.audit import SYSTEM
from tests.cli.conftest import Ctl
from tests.stubs import tiny_gguf

CPU = spec.Profile(name="cpu", engine="llamacpp")


@pytest.fixture
def model(llmgw: Ctl, tmp_path: Path) -> spec.Model:
    source = str(tiny_gguf.write_model(tmp_path / "tiny.gguf"))
    held = spec.Model(name="org/m", source=source, profiles=(CPU,), scaling=spec.scaling(1, 2, 60))
    catalog_actions.put_model(model=held, actor=SYSTEM)
    return held


def test_models_are_listed_in_their_order_with_a_line_a_profile(llmgw: Ctl) -> None:
    cards = spec.Profile(name="big", gpu_class="h100-80g", tp=8, nodes=2, priority=10)
    outside = spec.External("https://provider.example/v1", "gpt")
    catalog_actions.apply_catalog(
        models=[
            spec.Model(name="z", source="org/z", profiles=(cards, replace(CPU, name="small"))),
            spec.Model(name="a", external=outside),
            spec.Model(name="m", source="/m", profiles=(CPU,), scaling=spec.scaling(0, 2)),
        ],
        actor=SYSTEM,
    )
    assert llmgw("ctl", "models").stdout.splitlines() == [
        "z  min 0  max 0",
        "  big  vllm  h100-80g  tp 8  nodes 2  priority 10",
        "  small  llamacpp  cpu  tp 1  nodes 1  priority 0",
        "a  min 0  max 0",
        "  external  https://provider.example/v1",
        "m  min 0  max 2",
        "  cpu  llamacpp  cpu  tp 1  nodes 1  priority 0",
    ]


def test_an_adapter_is_added_listed_and_removed(llmgw: Ctl, model: spec.Model, tmp_path: Path) -> None:
    path = str(tiny_gguf.write_adapter(tmp_path / "red.gguf"))
    assert "None. Add one: llmgw ctl model adapters add org/m NAME" in llmgw(
        "ctl", "model", "adapters", "list", "org/m"
    ).stdout.replace("\n", " ")
    done = llmgw("ctl", "model", "adapters", "add", "org/m", "red", path)
    assert done.stdout == "red is an adapter of org/m.\nThe catalog is at version 2.\n", done.output
    assert path in llmgw("ctl", "model", "adapters", "list", "org/m").stdout
    told = llmgw("ctl", "model", "adapters", "add", "org/m", "blue", "/only/on/nodes.gguf")
    assert "Note: model org/m: adapters: Adapter blue: /only/on/nodes.gguf was not read from here" in told.stdout
    gone = llmgw("ctl", "model", "adapters", "remove", "org/m", "red")
    assert "red is no adapter of org/m any more." in gone.stdout
    left = json.loads(llmgw("ctl", "model", "adapters", "list", "org/m", "--json").stdout)
    assert left == [{"name": "blue", "source": "/only/on/nodes.gguf"}]
    newest = CatalogVersion.objects.first()
    assert newest is not None
    assert (newest.made_by, newest.note) == ("root", "remove adapter red from org/m")


def test_an_adapter_of_another_model_is_refused_in_a_sentence(llmgw: Ctl, model: spec.Model, tmp_path: Path) -> None:
    path = str(tiny_gguf.write_adapter(tmp_path / "other.gguf", architecture="qwen2"))
    done = llmgw("ctl", "model", "adapters", "add", "org/m", "red", path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "llmgw: model org/m: adapters: Adapter red: It was made for qwen2, and the model is llama. "
        "Name one that was made for it.\n"
    )
    assert "There is no adapter 'red'." in llmgw("ctl", "model", "adapters", "remove", "org/m", "red").stderr
    for words in (("list", "gone"), ("add", "gone", "a", "/a"), ("remove", "gone", "a")):
        assert llmgw("ctl", "model", "adapters", *words).stderr == (
            "llmgw: There is no model gone. See them: llmgw ctl models\n"
        )


def test_a_model_is_scaled_and_the_rest_of_it_stays(llmgw: Ctl, model: spec.Model) -> None:
    assert llmgw("ctl", "model", "scale", "org/m", "0", "3").stdout == (
        "org/m: min 0, max 3.\nThe catalog is at version 2.\n"
    )
    (found,) = Model.objects.snapshot()
    assert found == replace(model, scaling=spec.Scaling(0, 3, 60), profiles=found.profiles)
    assert "min 4, max 4." in llmgw("ctl", "model", "scale", "org/m", "4").stdout
    assert "max 1 is below min 2" in llmgw("ctl", "model", "scale", "org/m", "2", "1").stderr
    assert llmgw("ctl", "model", "scale", "org/m", "--", "-1").exit_code == 2
    assert Model.objects.get().scaling_max == 4

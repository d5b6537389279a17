"""Arguments that llmgw says itself: refused alike by the catalog and by nodes, with the field to write instead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import flags, validate
from agent.engines import ENGINES
from agent.host import Host
from agent.protocol import Adapter
from catalog import spec as catalog_spec
from catalog.spec import Model, Profile, normalise_all
from catalog.validate import validate as validate_catalog
from tests.agent.conftest import spec

HOST = Host(address="10.0.0.7", architecture="x86_64")


def refused_by_node(engine: str, args: tuple[str, ...], *, adapters: bool = False) -> str:
    told = (Adapter(name="a", source="/a.gguf"),) if adapters else ()
    return validate.refusal(spec("/m", engine=engine, args=args, adapters=told), HOST, has_binary=True) or ""


def refused_by_catalog(engine: str, args: tuple[str, ...], *, adapters: bool = False) -> str:
    profile = Profile("p", engine=engine, gpu_class="h100-80g", args=args)
    told = (catalog_spec.Adapter("a", "/a.gguf"),) if adapters else ()
    model = Model("m", source="/m", profiles=(profile,), adapters=told)
    return "; ".join(f"{each.field}: {each.text}" for each in validate_catalog(normalise_all((model,))))


@pytest.mark.parametrize(
    ("engine", "arg", "says"),
    [
        ("vllm", "--tensor-parallel-size", "--tensor-parallel-size is set by llmgw itself; write tp instead."),
        ("vllm", "--tensor_parallel_size=8", "--tensor-parallel-size is set by llmgw itself; write tp instead."),
        ("vllm", "-tp", "-tp is set by llmgw itself; write tp instead."),
        ("vllm", "--nnodes=2", "--nnodes is set by llmgw itself; write nodes instead."),
        ("vllm", "--node-rank", "--node-rank is set by llmgw itself; leave it out."),
        ("vllm", "--headl", "--headl, short for --headless, is set by llmgw itself; leave it out."),
        ("vllm", "--distributed-executor-backend=ray", "--distributed-executor-backend is set by llmgw itself; write"),
        ("sglang", "--tp", "--tp is set by llmgw itself; write tp instead."),
        ("sglang", "--dist-init-addr", "--dist-init-addr is set by llmgw itself; leave it out."),
        ("llamacpp", "-m", "-m is set by llmgw itself; write source instead."),
        ("llamacpp", "--api-key", "--api-key is set by llmgw itself; leave it out."),
        ("llamacpp", "--log-file", "--log-file is set by llmgw itself; leave it out."),
        ("llamacpp", "--ssl-key-file=/k", "--ssl-key-file is set by llmgw itself; leave it out."),
        ("vllm", "--uds", "--uds is set by llmgw itself; leave it out."),
        ("sglang", "--ssl-keyfile", "--ssl-keyfile is set by llmgw itself; leave it out."),
    ],
)
def test_what_llmgw_says_itself_is_refused_when_the_catalog_changes_and_again_by_nodes(
    engine: str, arg: str, says: str
) -> None:
    for refused in (refused_by_catalog(engine, (arg,)), refused_by_node(engine, (arg,))):
        assert refused.startswith(f"args: {says}"), refused


@pytest.mark.parametrize(
    ("engine", "arg"),
    [
        ("vllm", "--max-model-len"),
        ("vllm", "--model-impl"),
        ("vllm", "--data-parallel-address"),
        ("sglang", "--context-length"),
        ("llamacpp", "-n"),
        ("llamacpp", "-tp"),
        ("llamacpp", "--mode"),
        ("vllm", "8"),
        ("vllm", "--"),
        ("unheard-of", "--nnodes"),
    ],
)
def test_everything_else_is_the_profiles_to_say(engine: str, arg: str) -> None:
    assert flags.objection(engine, arg) is None


def test_an_engine_that_nobody_knows_may_not_say_the_address_either() -> None:
    assert flags.objection("unheard-of", "--port=1")


@pytest.mark.parametrize("arg", flags.CACHE_RAM)
def test_a_prompt_cache_beside_adapters_is_refused_by_both(arg: str) -> None:
    for refused in (refused_by_catalog, refused_by_node):
        assert "does not tell adapters apart" in refused("llamacpp", (arg, "100"), adapters=True)
        assert refused("llamacpp", (arg, "100")) == ""
    assert flags.cache_objection("vllm", (arg,)) is None


@given(st.sampled_from(sorted(ENGINES)), st.data())
def test_no_spelling_of_an_own_flag_passes(engine: str, data: st.DataObject) -> None:
    flag = data.draw(st.sampled_from(sorted(flags.OWN[engine])))
    value = data.draw(st.sampled_from(["", "=1"]))
    under = flag[:2] + flag[2:].replace("-", "_") if flag.startswith("--") else flag
    assert flags.objection(engine, flag + value)
    assert flags.objection(engine, under + value)


def test_every_engine_that_catalogs_know_has_its_flags() -> None:
    assert set(flags.OWN) == set(catalog_spec.ENGINES) == set(ENGINES)

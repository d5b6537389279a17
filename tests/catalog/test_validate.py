from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import names, sources, spec, yaml_io
from catalog.notices import notices
from catalog.spec import Model, Problem, Profile, normalise, normalise_all, normalise_profile, scaling
from catalog.validate import MAX_LIST, MAX_MODELS, MAX_PROBLEMS, validate
from tests.catalog.strategies import catalogs

CPU = Profile(name="cpu", engine="llamacpp")
GPU = Profile(name="gpu", gpu_class="h100-80g")
BASE = Model(name="m", source="/m/m.gguf", profiles=(CPU,))


def texts(*models: Model) -> list[str]:
    return [str(problem) for problem in validate(normalise_all(models))]


def on(model: Model = BASE, **changes: Any) -> list[str]:
    return texts(replace(model, **changes))


def profile(base: Profile = GPU, **changes: Any) -> list[str]:
    return on(profiles=(replace(base, **changes),))


def test_a_plain_model_is_valid() -> None:
    assert texts(BASE, replace(BASE, name="n", profiles=(GPU,))) == []


# --- what reads as left out ------------------------------------------------------------------------------------------
@given(catalogs())
def test_normalising_twice_is_as_once(models: tuple[Model, ...]) -> None:
    assert normalise_all(models) == models


def test_zero_and_negative_read_as_left_out() -> None:
    found = normalise_profile(replace(GPU, tp=0, nodes=-1, weight=0, startup_timeout_s=-3, pp=-2))
    assert found == replace(GPU, tp=1, nodes=1, pp=1, weight=1, startup_timeout_s=1200, gpus_per_node=1)
    assert normalise(replace(BASE, scaling=spec.Scaling(min=-4, max=2))).scaling.min == 0


@pytest.mark.parametrize(("tp", "nodes", "cards"), [(8, 2, 4), (9, 2, 4), (1, 4, 1), (8, 1, 8)])
def test_cards_per_node_default_to_tp_over_nodes_in_whole_numbers(tp: int, nodes: int, cards: int) -> None:
    assert normalise_profile(replace(GPU, tp=tp, nodes=nodes)).gpus_per_node == cards


def test_a_cpu_profile_has_no_cards_whatever_is_written() -> None:
    assert normalise_profile(replace(CPU, gpus_per_node=4, tp=1)).gpus_per_node == 0
    assert profile(CPU, gpus_per_node=4) == []


def test_scaling_fills_in_a_max_only_above_zero() -> None:
    assert (scaling().max, scaling(2).max, scaling(-1).max, scaling(0, 3).max, scaling(2, 0).max) == (0, 2, 0, 3, 0)


# --- names -----------------------------------------------------------------------------------------------------------
@given(catalogs(), st.data())
def test_no_name_can_be_taken_twice_whatever_its_case_or_form(models: tuple[Model, ...], data: st.DataObject) -> None:
    held = [name for model in models for name in model.names()]
    if not held:
        assert validate(models) == ()
        return
    taken = data.draw(st.sampled_from(held))
    written = data.draw(st.sampled_from((taken, taken.upper(), taken.casefold())))
    if names.fold(written) != names.fold(taken):  # upper() is not always undone by folding
        written = taken
    assert validate((*models, replace(BASE, name="x" * 50, aliases=(written,))))


def test_a_collision_names_who_holds_the_name() -> None:
    adapter = spec.Adapter("tune", "/m/t.gguf")
    first = replace(BASE, aliases=("chat",), adapters=(adapter,))
    assert texts(first, replace(BASE, name="CHAT")) == [
        "model CHAT: name: CHAT is already an alias of m (written chat); choose another."
    ]
    assert texts(first, replace(BASE, name="n", aliases=("tune",))) == [
        "model n: aliases: tune is already an adapter of m; choose another."
    ]
    assert texts(first, replace(BASE, name="n", adapters=(replace(adapter, name="m"),))) == [
        "model n: adapters: m is already a model's name; choose another."
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "The model is empty"),
        ("m ", "blank"),
        ("a\nb", "U+000A"),
        ("a\rb", "U+000D"),
        ("a\u200bb", "U+200B"),
        ("a\u2028b", "U+2028"),
        ("a\ud800", "U+D800"),
        ("x" * 201, "200 is the most"),
        ("..", "which addresses lose"),
        ("a//b", "which addresses lose"),
        ("/a", "which addresses lose"),
        ("a/adapters", "the address of another model's adapters"),
    ],
)
def test_a_name_that_cannot_be_told_apart_is_refused(name: str, words: str) -> None:
    assert words in on(name=name)[0]


# --- fallbacks -------------------------------------------------------------------------------------------------------
def test_fallbacks_resolve_by_model_or_alias() -> None:
    other = replace(BASE, name="smollm2", aliases=("tiny",))
    assert texts(replace(BASE, fallbacks=("Tiny", "smollm2")), other) == []
    assert texts(replace(BASE, fallbacks=("smolm2",)), other) == [
        "model m: fallbacks: No model or alias is named 'smolm2'. Did you mean smollm2?"
    ]


def test_circles_and_selves_are_harmless_but_named() -> None:
    a = replace(BASE, name="a", fallbacks=("a", "b", "b"))
    b = replace(BASE, name="b", fallbacks=("c",))
    c = replace(BASE, name="c", fallbacks=("a", "gone"))
    assert texts(a, b, replace(c, fallbacks=("a",))) == []
    assert [str(notice) for notice in notices((a, b, c))] == [
        "model a: fallbacks: It falls back on itself, which changes nothing.",
        "model a: fallbacks: b is named more than once; once is enough.",
        "model a: fallbacks: The circle a -> b -> c -> a is tried once around.",
    ]


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdef"), max_size=4)))
def test_a_circle_is_noticed_exactly_when_there_is_one(edges: dict[str, list[str]]) -> None:
    models = [replace(BASE, name=name, fallbacks=tuple(steps)) for name, steps in edges.items()]

    def reach(name: str) -> set[str]:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            for step in edges.get(waiting.pop(), []):
                if step in edges and step not in seen:
                    seen.add(step)
                    waiting.append(step)
        return seen

    circle = any(one != two and two in reach(one) and one in reach(two) for one in edges for two in edges)
    assert any("circle" in notice.text for notice in notices(models)) == circle


# --- sources ---------------------------------------------------------------------------------------------------------
HASH = "a" * 64


@pytest.mark.parametrize(
    "source",
    [
        "/m/a.gguf",
        "./a.gguf",
        "./m/a",
        "./m//./a",
        "org/name",
        "gpt2",
        "Qwen/Qwen2.5-0.5B",
        "https://host/a.gguf",
        "HTTP://host:80/a",
        f"pypi://pkg==1.0/pkg/a.gguf?wheel_sha256={HASH}&sha256={HASH}",
        f"https://h/a.gguf#sha256={HASH}",
    ],
)
def test_sources_that_can_be_meant_pass(source: str) -> None:
    assert sources.objection(source) is None
    assert on(source=source) == []


def test_a_relative_adapter_is_refused_where_engines_read_it_by_themselves() -> None:
    adapter = spec.Adapter("tune", "./tune")
    profiles = (replace(GPU, max_loaded_adapters=4),)
    assert on(adapters=(adapter,), profiles=(GPU,)) == []
    assert on(adapters=(adapter,), profiles=profiles) == [
        "model m: adapters: Adapter 'tune': With max_loaded_adapters engines read it by themselves; write its absolute"
        " path on nodes."
    ]


@pytest.mark.parametrize(
    "source",
    [
        "/",
        "./",
        "../",
        "../m/a",
        "./a/../../b",
        "./.",
        "~/a",
        "a/b/c",
        "-a",
        "a b",
        " /a",
        "/a\n",
        "s3://b/a",
        "file:///a",
        "https://",
        "https://u:p@h/a",
        "https://h/a b",
        "https://h/",
        "https://[/a",
        "pypi://pkg/a",
        "pypi://pkg==1/a",
        "pypi://pkg==1/../a",
        "x" * 1001,
    ],
)
def test_sources_that_cannot_be_meant_are_refused(source: str) -> None:
    objection = sources.objection(source)
    assert objection
    assert objection[0].isupper()
    assert objection.endswith(".")
    assert on(source=source) == [f"model m: source: {objection}"]


# --- profiles --------------------------------------------------------------------------------------------------------
def test_the_equation_counts_cards() -> None:
    assert profile(tp=8, nodes=2) == []
    assert profile(tp=4, pp=2, nodes=2, gpus_per_node=4) == []
    assert profile(tp=8, pp=2) == [
        "model m, profile gpu: gpus_per_node: nodes x gpus_per_node is 1 x 8 = 8, but tp x pp is 8 x 2 = 16; "
        "make them equal."
    ]
    assert "1 x -1 = -1" in profile(gpus_per_node=-1)[0]


@pytest.mark.parametrize(
    ("base", "changes", "field"),
    [
        (GPU, {"engine": "lama"}, "engine"),
        (GPU, {"gpu_class": None}, "gpu_class"),
        (GPU, {"gpu_class": None, "engine": "sglang"}, "gpu_class"),
        (GPU, {"gpu_class": "H100"}, "gpu_class"),
        (GPU, {"gpu_class": "cpu"}, "gpu_class"),
        (CPU, {"nodes": 2}, "nodes"),
        (GPU, {"engine": "llamacpp", "nodes": 2, "tp": 2}, "nodes"),
        (GPU, {"engine": "llamacpp", "tp": 2}, "tp"),
        (CPU, {"pp": 2}, "pp"),
        (CPU, {"tp": 2}, "tp"),
        (CPU, {"weight": 100_001}, "weight"),
        (CPU, {"priority": -100_001}, "priority"),
        (CPU, {"startup_timeout_s": 31 * 86_400}, "startup_timeout"),
        (CPU, {"reserved_cores": -1}, "reserved_cores"),
        (CPU, {"reserved_cores": float("nan")}, "reserved_cores"),
        (CPU, {"required_memory_gb": 0}, "required_memory_gb"),
        (CPU, {"launch_mode": "mpi"}, "launch_mode"),
        (CPU, {"capacity_class": "spott"}, "capacity_class"),
        (CPU, {"max_loaded_adapters": 1}, "max_loaded_adapters"),
        (GPU, {"max_loaded_adapters": MAX_LIST + 1}, "max_loaded_adapters"),
        (CPU, {"min_disk_gb": 0}, "min_disk_gb"),
        (CPU, {"min_disk_gb": float("inf")}, "min_disk_gb"),
        (CPU, {"labels": (("", "a"),)}, "labels"),
        (CPU, {"labels": (("a b", "a"),)}, "labels"),
        (CPU, {"labels": (("a", "x" * 64),)}, "labels"),
        (CPU, {"labels": (("a", "x\ny"),)}, "labels"),
        (CPU, {"labels": tuple((f"l{i}", "") for i in range(MAX_LIST + 1))}, "labels"),
        (CPU, {"only_nodes": ("a b",)}, "only_nodes"),
        (CPU, {"only_nodes": ("a", "a")}, "only_nodes"),
        (CPU, {"only_nodes": tuple(f"n{i}" for i in range(MAX_LIST + 1))}, "only_nodes"),
        (GPU, {"only_nodes": ("a",), "nodes": 2, "tp": 2}, "only_nodes"),
        (CPU, {"args": ("--api-key=x",)}, "args"),
        (CPU, {"args": ("-m", "/x")}, "args"),
        (GPU, {"args": ("--tensor_parallel_size=8",)}, "args"),
        (GPU, {"args": ("-n", "2")}, "args"),
        (replace(GPU, engine="sglang"), {"args": ("--node-rank", "1")}, "args"),
        (CPU, {"args": ("a\0b",)}, "args"),
        (CPU, {"args": ("a\ud800",)}, "args"),
        (CPU, {"args": ("x",) * (MAX_LIST + 1)}, "args"),
        (CPU, {"env": (("A-B", ""),)}, "env"),
        (CPU, {"env": (("A", "\0"),)}, "env"),
        (CPU, {"env": (("A", ""), ("A", "1"))}, "env"),
        (CPU, {"name": "a\nb"}, "name"),
        (CPU, {"metrics": spec.Metrics(running=("a b",))}, "metrics.running"),
        (CPU, {"metrics": spec.Metrics(running=("a",) * 9)}, "metrics.running"),
        (CPU, {"metrics": spec.Metrics(running=("a",), waiting=("1a",))}, "metrics.waiting"),
        (CPU, {"metrics": spec.Metrics(waiting=("a",))}, "metrics.running"),
        (CPU, {"metrics": spec.Metrics(kv_used=("a",))}, "metrics.running"),
    ],
)
def test_a_breach_names_model_profile_and_field(base: Profile, changes: dict[str, Any], field: str) -> None:
    found = validate(normalise_all((replace(BASE, profiles=(replace(base, **changes),)),)))
    assert field in [problem.field for problem in found]
    assert {(problem.model, problem.profile) for problem in found} == {("m", changes.get("name", base.name))}
    assert all(problem.text.endswith(".") for problem in found)


def test_every_profile_has_a_name_of_its_own() -> None:
    assert on(profiles=(CPU, replace(CPU, name="CPU"))) == [
        "model m, profile CPU: name: Another profile of this model has that name; rename one."
    ]
    assert on(profiles=(CPU, replace(CPU, name=""))) == ["model m: profiles: Profile 2 has no name; give it one."]


def test_where_it_may_run_is_said_by_labels_and_names_of_nodes() -> None:
    homes = {"labels": (("zone", "a"), ("llmgw.io/rack", "")), "only_nodes": ("gpu-1", "gpu_2"), "min_disk_gb": 0.5}
    assert profile(**homes) == []


def test_metrics_of_an_engine_go_by_other_names() -> None:
    assert profile(metrics=spec.Metrics(running=("vllm:running", "old:running"), kv_used=("vllm:kv",))) == []
    read = yaml_io.parse(
        "models: [{name: m, source: /m, profiles: [{name: cpu, engine: llamacpp,"
        " metrics: {running: a, waiting: [b, c]}}]}]"
    )
    assert read.problems == ()
    assert read.models[0].profiles[0].metrics == spec.Metrics(running=("a",), waiting=("b", "c"))
    assert yaml_io.parse(yaml_io.dump(read.models)).models == read.models


# --- models ----------------------------------------------------------------------------------------------------------
EXTERNAL = spec.External("https://provider.example/v1", "gpt-x", "/etc/llmgw/key")


def test_an_external_model_needs_neither_source_nor_profile() -> None:
    assert on(source="", profiles=(), external=EXTERNAL) == []
    assert on(source="", profiles=(), external=replace(EXTERNAL, api_key_file=None)) == []
    assert on(external=EXTERNAL) == [
        "model m: profiles: An external model is not placed; remove its profiles, or external."
    ]


@pytest.mark.parametrize(
    ("url", "remark"),
    [
        ("https://provider.example/v1", None),
        ("https://8.8.8.8/v1", None),
        ("http://provider.example/v1", "The key goes there unencrypted"),
        ("https://provider.example/", "It has no path"),
        ("https://10.0.0.5/v1", "10.0.0.5 is a private address; gateways refuse it, unless gateway.external_private"),
        ("https://[::ffff:127.0.0.1]/v1", "is a loopback address; gateways refuse it, unless"),
        ("https://169.254.169.254/v1", "169.254.169.254 is a metadata address; gateways refuse it."),
    ],
)
def test_an_external_address_that_is_hardly_meant_is_remarked_on(url: str, remark: str | None) -> None:
    model = replace(BASE, source="", profiles=(), external=replace(EXTERNAL, url=url))
    assert texts(model) == []
    found = [notice.text for notice in notices((model,))]
    assert len(found) == (remark is not None)
    assert all(text.startswith(remark) or remark in text for text in found if remark)


def test_an_external_address_that_is_refused_gets_no_remark_besides() -> None:
    model = replace(BASE, source="", profiles=(), external=replace(EXTERNAL, url="ftp://10.0.0.5"))
    assert notices((model,)) == ()
    assert notices((replace(model, external=replace(EXTERNAL, url="http://x/v1", api_key_file=None)),)) == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"source": ""}, "source"),
        ({"profiles": ()}, "profiles"),
        ({"profiles": (CPU,) * (MAX_LIST + 1)}, "profiles"),
        ({"fallbacks": ("m",) * (MAX_LIST + 1)}, "fallbacks"),
        ({"aliases": tuple(f"a{number}" for number in range(MAX_LIST + 1))}, "aliases"),
        ({"scaling": spec.Scaling(2, 1)}, "scaling.max"),
        ({"scaling": spec.Scaling(0, -1)}, "scaling.max"),
        ({"scaling": spec.Scaling(0, 100_001)}, "scaling.max"),
        ({"scaling": spec.Scaling(0, 0, 0)}, "scaling.idle_timeout"),
        ({"routing_profile": "least-load"}, "routing_profile"),
        ({"slo": spec.Slo(0, None)}, "slo.ttft_p99"),
        ({"slo": spec.Slo(None, -1)}, "slo.tpot_p99"),
        ({"band": " x"}, "band"),
        ({"required_memory_gb": -1.0}, "required_memory_gb"),
        ({"team": "the reds"}, "team"),
        ({"adapters": (spec.Adapter("t", ""),)}, "adapters"),
        ({"adapters": (spec.Adapter("t", "~"),)}, "adapters"),
        ({"external": replace(EXTERNAL, url="ftp://x"), "profiles": ()}, "external.url"),
        ({"external": replace(EXTERNAL, url="https://u@x"), "profiles": ()}, "external.url"),
        ({"external": replace(EXTERNAL, url="https://x/?a=b"), "profiles": ()}, "external.url"),
        ({"external": replace(EXTERNAL, url="https://x:99999"), "profiles": ()}, "external.url"),
        ({"external": replace(EXTERNAL, url="https://b\u00fccher.example"), "profiles": ()}, "external.url"),
        ({"external": replace(EXTERNAL, url="https://x\\\\y/v1"), "profiles": ()}, "external.url"),
        ({"external": replace(EXTERNAL, model=""), "profiles": ()}, "external.model"),
        ({"external": replace(EXTERNAL, api_key_file="sk-123"), "profiles": ()}, "external.api_key_file"),
    ],
)
def test_a_breach_names_model_and_field(changes: dict[str, Any], field: str) -> None:
    found = validate(normalise_all((replace(BASE, **changes),)))
    assert [(problem.model, problem.profile, problem.field) for problem in found] == [("m", "", field)]


def test_both_numbers_stand_in_the_refusal_of_a_max_below_min() -> None:
    assert on(scaling=spec.Scaling(3, 1)) == ["model m: scaling.max: max 1 is below min 3; raise max or lower min."]


def test_a_hostile_catalog_gets_a_bounded_answer() -> None:
    assert len(texts(*[replace(BASE, name=f"m{number}", source="") for number in range(500)])) == MAX_PROBLEMS
    assert len(texts(*[BASE] * (MAX_MODELS + 1))) == 1


def test_a_problem_reads_as_a_sentence() -> None:
    assert str(Problem("m", "p", "tp", "Too many.", 3)) == "line 3, model m, profile p: tp: Too many."
    assert str(Problem("", "", "", "Too many.")) == "Too many."

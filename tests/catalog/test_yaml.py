from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog import document, durations, spec, yaml_io
from catalog.defaults import default_catalog
from catalog.names import fold
from catalog.spec import Model, Problem, Profile, normalise_all
from catalog.validate import MAX_MODELS, validate
from tests.catalog.strategies import catalogs, texts


def problems(text: str) -> list[str]:
    return [str(problem) for problem in yaml_io.parse(text).problems]


@settings(max_examples=60, deadline=None)
@given(catalogs())
def test_what_is_exported_reads_back_as_the_same_catalog(models: tuple[Model, ...]) -> None:
    assert validate(models) == ()
    read = yaml_io.parse(yaml_io.dump(models))
    assert read.problems == ()
    assert read.models == models
    assert yaml_io.dump(read.models) == yaml_io.dump(models)


@given(
    st.text(max_size=200)
    | st.recursive(st.none() | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner))
)
def test_no_text_and_no_data_breaks_the_reader(value: object) -> None:
    read = yaml_io.parse(value) if isinstance(value, str) else document.read(value)
    assert all(isinstance(problem, Problem) for problem in read.problems)
    inside = document.read({"models": [value]})
    assert inside.problems or validate(inside.models)


def test_the_default_catalog_is_valid_and_survives_the_round_trip() -> None:
    models = normalise_all(default_catalog())
    assert models == default_catalog()
    assert validate(models) == ()
    assert yaml_io.parse(yaml_io.dump(models)).models == models


@given(st.lists(st.sampled_from("a \n\r\t:#'\"\\\x07\x85\u2028\u2029\ufeff\U0001f600"), max_size=8).map("".join))
def test_any_text_survives_the_round_trip(text: str) -> None:
    profile = Profile(name="cpu", engine="llamacpp", args=(text,), env=(("A", text),))
    models = (Model(name="m", source="/m", profiles=(profile,)),)
    assert yaml_io.parse(yaml_io.dump(models)).models == models


def test_an_unknown_key_is_refused_with_its_line_and_the_likely_one() -> None:
    text = "models:\n  - name: m\n    source: /m\n    profiles:\n      - name: a\n        arsg: []\n    alias: [b]\n"
    assert problems(text) == [
        "line 7, model m: alias: The key alias is unknown. Did you mean aliases?",
        "line 6, model m, profile a: arsg: The key arsg is unknown. Did you mean args?",
    ]
    assert "Known here: models." in problems("zzz: 1\nmodels: []\n")[0]


def test_a_rule_broken_in_a_file_is_told_with_its_line() -> None:
    text = (
        "models:\n- name: m\n  source: /m\n  scaling: {min: 3, max: 1}\n  profiles:\n"
        "  - name: a\n    engine: llamacpp\n  - name: b\n    engine: llamacpp\n    nodes: 2\n- name: M\n"
    )
    assert [(problem.line, problem.model, problem.profile) for problem in yaml_io.parse(text).problems] == [
        (4, "m", ""),
        (10, "m", "b"),
        (11, "M", ""),
        (11, "M", ""),
        (11, "M", ""),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "It must be a mapping with models, not nothing."),
        ("[]", "not a list"),
        ("{}", "write models: [] to remove all"),
        ("models:", "write models: [] to remove all"),
        ("models: 3", "models: It must be a list, not the number 3."),
        ("models: [3]", "It must be a mapping with name"),
        ("models:\n- name: yes", 'name: It must be text, not true. Put it in quotes: "..."'),
        ("models:\n- name: [a]", "name: It must be text, not a list."),
        ("models:\n- name: {a: b}", "name: It must be text, not a mapping."),
        ("models:\n- aliases: [null]", "aliases.0: It must be text, not nothing."),
        ("models:\n- scaling: {min: '1'}", "scaling.min: It must be a whole number, not text."),
        ("models:\n- scaling: {min: 99999999999}", "scaling.min: The number is too large."),
        ("models:\n- scaling: {idle_timeout: soon}", "It must be a time such as 500ms"),
        ("models:\n- required_memory_gb: big", "It must be a number, not text."),
        ("models:\n- required_memory_gb: .inf", "The number is too large."),
        ("models:\n- profiles: [{args: [[]]}]", "args.0: It must be text, not a list."),
        ("models:\n- profiles: [{args: [false]}]", "not false. Put it in quotes"),
        ("models:\n- profiles: [{env: [A]}]", "env: It must be a mapping of variables to text, not a list."),
        ("models:\n- profiles: [{env: {A: []}}]", "env.A: It must be text"),
        ("models:\n- name: a\n  name: b", "line 3: name: It is written twice."),
        ("models:\n- ? [a]\n  : b", "line 2: A key must be a word."),
        ("models: [", "This is not YAML"),
        ("a: \x00", "This is not YAML: it holds characters that YAML does not allow."),
        ("--- a\n--- b", "This is not YAML"),
        ("[" * 1000, "nested too deeply"),
        ("[" * 20 + "]" * 20, "nested too deeply"),
        (
            "a: &a [x,x,x,x,x,x,x,x]\n"
            + "".join(f"{n}: &{n} [{','.join([f'*{p}'] * 9)}]\n" for p, n in zip("abcdefg", "bcdefgh", strict=True)),
            "unfolds into too much",
        ),
        ("x" * (yaml_io.MAX_CHARACTERS + 1), "is the most"),
        ("models: [" + "1," * (document.MAX_LIST + 1) + "]", "entries; 6000 is the most"),
    ],
)
def test_what_is_not_a_catalog_is_refused_in_a_sentence(text: str, words: str) -> None:
    assert any(words in problem for problem in problems(text)), problems(text)[:3]


def test_numbers_among_arguments_and_variables_are_taken_as_text() -> None:
    text = """
models:
- name: m
  source: /m
  profiles:
  - {name: a, engine: llamacpp, args: [--ctx-size, 8192, -x, 0.5], env: {A: 1}, startup_timeout: 1h30m}
  - {name: 2024-01-01, engine: llamacpp, startup_timeout: 90.5}
  external:
"""
    read = yaml_io.parse(text)
    assert read.problems == ()
    first, second = read.models[0].profiles
    assert first.args == ("--ctx-size", "8192", "-x", "0.5")
    assert first.env == (("A", "1"),)
    assert (first.startup_timeout_s, second.startup_timeout_s) == (5400, 91)
    assert second.name == "2024-01-01"


def test_an_empty_list_removes_everything_and_a_mapping_in_a_mapping_is_refused() -> None:
    assert yaml_io.parse("models: []") == document.Read((), ())
    assert document.read_model({"name": "m", "external": {"url": 1}}).problems[0].field == "external.url"


def test_a_number_too_long_to_convert_is_refused_and_no_crash() -> None:
    assert "whole number" in problems(f"models:\n- scaling: {{min: {'9' * 5000}}}")[0]


@given(st.integers(0, 10**12))
def test_a_written_length_of_time_reads_back(value: int) -> None:
    assert durations.read_ms(durations.write_ms(value)) == value


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (True, None), ("", None), ("5", None), ("5x", None), (None, None), (float("nan"), None), (1e300, None),
        ("999999999999999d", None), (0.0001, 1), (-1, -1000), (0, 0), ("1h 30m", 5_400_000), ("0.5s", 500),
        ("20m", 1_200_000),
    ],
)  # fmt: skip
def test_lengths_of_time_are_read_in_full_or_not_at_all(value: object, found: int | None) -> None:
    assert durations.read_ms(value) == found


@given(st.text(max_size=20))
def test_folding_twice_is_as_folding_once(text: str) -> None:
    assert fold(fold(text)) == fold(text)


def test_a_problem_of_the_whole_catalog_stands_at_its_list() -> None:
    entry = "{name: m}"
    text = f"\nmodels: [{', '.join([entry] * (MAX_MODELS + 1))}]"
    assert [problem.line for problem in yaml_io.parse(text).problems] == [2]


@settings(max_examples=20, deadline=None)
@given(catalogs())
def test_one_model_by_itself_reads_back_too(models: tuple[Model, ...]) -> None:
    for model in models:
        assert yaml_io.parse_model(yaml_io.dump_model(model)) == document.Read((model,), ())


def test_a_fault_of_one_model_is_told_with_its_line() -> None:
    assert [str(each) for each in yaml_io.parse_model("name: m\nsorce: /m\n").problems] == [
        "line 2, model m: sorce: The key sorce is unknown. Did you mean source?"
    ]
    assert "This is not YAML" in str(yaml_io.parse_model("{").problems[0])


def test_an_adapter_is_read_with_its_faults_named() -> None:
    assert document.read_adapter({"name": "red", "source": "/a"}, model="m") == (spec.Adapter("red", "/a"), ())
    (problem,) = document.read_adapter({"name": "red", "source": 1}, model="m")[1]
    assert (problem.model, problem.field) == ("m", "adapters.source")

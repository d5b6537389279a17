"""One tree of settings: what is unknown or wrong is refused by name; the reference is current and complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.yaml_settings import ConfigError, load
from llmgw.config import ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]


def settings(tmp_path: Path, text: str, **environ: str) -> Settings:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return load(Settings, path, env_prefix=ENV_PREFIX, environ=environ)


def test_everything_has_a_default() -> None:
    defaults = load(Settings, None, env_prefix=ENV_PREFIX, environ={})
    assert defaults.base_url == "http://127.0.0.1:8080"
    assert defaults.data_dir.is_absolute()


def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    found = settings(tmp_path, "listen: {port: 9000, host: 0.0.0.0}\n", LLMGW_LISTEN__PORT="9001")
    assert (found.listen.host, found.listen.port) == ("0.0.0.0", 9001)
    assert found.base_url == "http://127.0.0.1:9001"


def test_a_public_url_is_what_people_are_shown(tmp_path: Path) -> None:
    found = settings(tmp_path, "listen: {public_url: 'https://llm.example.org/'}\n")
    assert found.base_url == "https://llm.example.org"
    assert found.base_url_here == "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stor: {}\n", ("line 1", "unknown setting stor", "Did you mean store?")),
        ("gateway:\n  attempts: 0\n", ("line 2", "gateway.attempts")),
        ("store: {url: 'mysql://x'}\n", ("store.url", "postgresql://")),
        ("gateway: {bands: {best-effort-background: 0}}\n", ("gateway.bands.best-effort-background", "20 characters")),
        ("redis: {url: 'http://x'}\n", ("redis.url", "redis://")),
        ("listen: {port: 8080}\nlisten: {port: 1}\n", ("line 2", "written twice")),
        ("listen: [\n", ("not YAML",)),
        ("- a\n", ("must be a mapping",)),
        ("logging: {format: xml}\n", ("logging.format",)),
        ("endpoints: [{url: 'http://e', models: [a], wieght: 4}]\n", ("endpoints.0.wieght", "Did you mean weight?")),
        ("endpoints: [{models: [a]}]\n", ("line 1", "endpoints.0.url")),
        ("endpoints:\n- {url: 'ftp://e', models: [a]}\n", ("endpoints.0.url is wrong", "such as https://")),
        ("endpoints: [{url: 'http://me:secret@e', models: [a]}]\n", ("endpoints.0.url is wrong", "password")),
        ("endpoints: [{url: 'http://e', models: []}]\n", ("endpoints.0.models",)),
        ("endpoints: [{url: 'http://e', models: [' a']}]\n", ("endpoints.0.models", "' a' cannot be")),
        ("endpoints: [{url: 'http://e', models: [a, a]}]\n", ("endpoints.0.models", "a stands there twice")),
        ("endpoints: [{url: 'http://e', models: [a], engine: tgi}]\n", ("endpoints.0.engine",)),
        (
            "endpoints: [{url: 'http://e', models: [a]}, {url: 'http://e/x', models: [b]}]\n",
            ("two endpoints are called e:80", "name of its own"),
        ),
        ("gateway: {media_urls: on}\n", ("gateway.media_urls is wrong: write off, any, or a list of hosts",)),
        ("gateway: {media_urls: ['https://x']}\n", ("gateway.media_urls is wrong",)),
        ("gateway: {media_urls: []}\n", ("gateway.media_urls is wrong",)),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, text)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_secret_in_a_refused_address_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, "endpoints: [{url: 'http://me:pw0rd@e', models: [a]}]\n")
    assert "pw0rd" not in str(refused.value)


@pytest.mark.parametrize(
    ("written", "means"),
    [("off", "off"), ("any", "any"), ("[a.example, B.example]", ["a.example", "B.example"])],
)
def test_media_may_be_named_as_it_is_written(tmp_path: Path, written: str, means: object) -> None:
    found = settings(tmp_path, f"gateway: {{media_urls: {written}}}\nendpoints: [{{url: 'http://e', models: [a]}}]\n")
    assert found.gateway.media_urls == means
    assert found.endpoints[0].label == "e:80"


def test_an_unknown_setting_in_a_known_section_of_the_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LLMGW_LISTEN__PROT"):
        settings(tmp_path, "", LLMGW_LISTEN__PROT="1")


def test_the_reference_is_current_and_names_every_setting() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec
    assert spec.loader
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.stale() == []
    page = (ROOT / "docs/reference/settings.md").read_text()
    for name, field in Settings.model_fields.items():
        assert f"`{name}" in page
        assert field.description or hasattr(field.annotation, "model_fields"), f"{name} has no description"


def test_every_setting_says_what_it_means() -> None:
    def undocumented(tree: type, above: str = "") -> list[str]:
        found = []
        for name, field in tree.model_fields.items():  # type: ignore[attr-defined]
            if hasattr(field.annotation, "model_fields"):
                found += undocumented(field.annotation, f"{above}{name}.")
            elif not field.description:
                found.append(above + name)
        return found

    assert undocumented(Settings) == []

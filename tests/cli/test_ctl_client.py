"""Where `ctl` finds its control plane, and what it says when it does not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llmgw.cli import client, ctl, main
from llmgw.cli.client import CtlError, Server, find

TOKEN = "at-" + "x" * 43


def keep(path: Path, **held: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(held))
    return path


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    keep(tmp_path / "secrets" / "ctl.json", url="http://127.0.0.1:9/", token=TOKEN)
    return {"LLMGW_DATA_DIR": str(tmp_path)}


def test_without_options_the_data_directory_says_where(data: dict[str, str]) -> None:
    assert find(None, None, data) == Server("http://127.0.0.1:9", TOKEN)
    assert find("http://127.0.0.1:9", None, data) == Server("http://127.0.0.1:9", TOKEN)


def test_the_configuration_may_name_the_data_directory(data: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from llmgw import config

    known = config.current()
    kept = keep(known.secrets_dir / "ctl.json", url="http://127.0.0.1:8/", token=TOKEN)
    assert find(None, None, {"LLMGW_CONFIG": "server.yaml"}).url == "http://127.0.0.1:8"
    kept.unlink()


def test_options_win_over_the_environment(tmp_path: Path) -> None:
    named = tmp_path / "token"
    named.write_text(f"{TOKEN}\n")
    environment = {"LLMGW_URL": "http://a", "LLMGW_TOKEN_FILE": str(named)}
    assert find(None, None, environment) == Server("http://a", TOKEN)
    assert find("https://b:1/", named, environment) == Server("https://b:1", TOKEN)
    assert find(None, named, {}) == Server(client.DEFAULT_URL, TOKEN)
    assert find(None, keep(tmp_path / "j", url="http://c", token=TOKEN), {}) == Server("http://c", TOKEN)


def test_a_token_is_never_shown_to_another_server(data: dict[str, str]) -> None:
    with pytest.raises(CtlError, match="not of http://elsewhere") as error:
        find("http://elsewhere", None, data)
    assert error.value.code == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"token": 3}', "sk-abc", "at-\u00e9", "at-a\nb", '{"url": "http://x"}']
)
def test_a_file_without_a_token_is_named_and_its_text_is_not(tmp_path: Path, text: str) -> None:
    named = tmp_path / "token"
    named.write_text(text)
    with pytest.raises(CtlError, match=str(named)) as error:
        find(None, named, {})
    assert "abc" not in str(error.value)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CtlError, match="No such file"):
        find(None, tmp_path / "none", {})
    with pytest.raises(CtlError, match="set LLMGW_DATA_DIR"):
        find(None, None, {"LLMGW_DATA_DIR": str(tmp_path)})


@pytest.mark.parametrize(
    "url", ["x", "ftp://a", "http://", "http://u:p@h", "http://h:99999", "http://h/?a=b", "http://[a"]
)
def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    named = tmp_path / "token"
    named.write_text(TOKEN)
    with pytest.raises(CtlError, match="is not an address"):
        find(url, named, {})


# --- what servers answer ---------------------------------------------------------------------------------------------
class Strange(BaseHTTPRequestHandler):
    answers: list[tuple[int, bytes]] = []

    def do_GET(self) -> None:
        status, body = self.answers.pop(0)
        if status == 0:
            self.connection.close()
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def strange(tmp_path: Path) -> Iterator[list[str]]:
    """Options that lead to a server which answers what `Strange.answers` holds."""
    server = HTTPServer(("127.0.0.1", 0), Strange)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    named = keep(tmp_path / "token", url=f"http://127.0.0.1:{server.server_port}", token=TOKEN)
    yield ["--token-file", str(named)]
    server.shutdown()
    server.server_close()
    thread.join()


REFUSAL = json.dumps(
    {
        "error": {
            "code": "x",
            "message": "No.",
            "problems": [
                {"line": 3, "model": "m", "profile": "p", "field": "tp", "text": "Too many."},
                {"line": None, "model": "", "profile": "", "field": "", "text": "Bad."},
            ],
        }
    }
).encode()


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ((200, b"<html>"), 2, "like something else than llmgw"),
        ((500, b"<html>"), 2, "like something else than llmgw (HTTP 500)"),
        ((404, b'{"detail": 1}'), 2, "like something else"),
        ((401, b'{"error": {"message": "Expired."}}'), 2, "Expired. Name a valid one with --token-file."),
        ((403, b'{"error": {"message": "Not you."}}'), 1, "llmgw: Not you."),
        ((400, REFUSAL), 1, "llmgw: No.\n  line 3, model m, profile p: tp: Too many.\n  Bad.\n"),
        (
            (400, b'{"error": {"message": "\\u001b[31mNo\\u001b]0;owned\\u0007 \\u009b2J."}}'),
            1,
            "llmgw:  [31mNo ]0;owned   2J.",
        ),
        ((0, b""), 2, "broke off: Server disconnected without sending a response. Try again."),
    ],
)
def test_every_answer_ends_in_a_sentence_and_an_exit_code(
    strange: list[str], answer: tuple[int, bytes], code: int, words: str
) -> None:
    Strange.answers = [answer]
    done = CliRunner().invoke(ctl.app, [*strange, "status", "--json"])
    assert (done.exit_code, done.stdout) == (code, "")
    assert words in done.stderr
    assert TOKEN not in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    "command",
    ["status", "models export", "models", "model adapters list m", "cordon box", "quota list", "usage", "cert list"],
)
def test_where_to_ask_may_be_said_before_a_command_and_after_it(strange: list[str], command: str) -> None:
    nobody = ["--url", "http://127.0.0.1:9", "--token-file", "/dev/null"]
    said = command.split()
    for words in ([*strange, *said], [*said, *strange], [*nobody[2:], *said, *strange]):
        Strange.answers = [(418, b"")]
        done = CliRunner().invoke(main.app, ["ctl", *words])
        assert "HTTP 418" in done.stderr, (words, done.stderr)
    first, *rest = said
    done = CliRunner().invoke(main.app, ["ctl", first, *strange, *rest, *nobody[:2]])
    assert "http://127.0.0.1:9" in done.stderr, "what is said last counts"


def test_where_nobody_listens_the_next_step_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
    named = keep(tmp_path / "token", url=url, token=TOKEN)
    done = CliRunner().invoke(ctl.app, ["--token-file", str(named), "status"])
    assert (done.exit_code, done.stderr) == (
        2,
        f"llmgw: No llmgw answers at {url}. Start it with: llmgw up; where its parts run one by one: "
        "llmgw server run web\n",
    )


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/api/v1"])
def test_an_address_for_programs_is_answered_with_the_one_that_is_meant(tmp_path: Path, path: str) -> None:
    named = tmp_path / "token"
    named.write_text(TOKEN)
    with pytest.raises(CtlError, match=r"--url or LLMGW_URL: http://a:8080$"):
        find(f"http://a:8080{path}", named, {})


def test_https_where_no_tls_is_spoken_names_the_address_that_is(strange: list[str], tmp_path: Path) -> None:
    plain = json.loads(Path(strange[1]).read_text())["url"]
    secure = plain.replace("http:", "https:")
    named = keep(tmp_path / "secure", url=secure, token=TOKEN)
    done = CliRunner().invoke(ctl.app, ["--token-file", str(named), "status"])
    said = f"llmgw: What listens at {secure} speaks no TLS. Say {plain} in --url or LLMGW_URL.\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_of_another_host_the_address_is_named_and_what_to_look_at_there(tmp_path: Path) -> None:
    url = "http://127.0.0.2:9"
    named = keep(tmp_path / "token", url=url, token=TOKEN)
    done = CliRunner().invoke(ctl.app, ["--token-file", str(named), "status"], env={"NO_PROXY": "*"})
    assert done.exit_code == 2
    assert done.stderr.startswith(f"llmgw: No llmgw answers at {url} ([Errno ")
    assert "Correct --url or LLMGW_URL" in done.stderr
    assert "Start it" not in done.stderr

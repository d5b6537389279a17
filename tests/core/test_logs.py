"""Log lines say which part wrote them, carry ids, and never a secret."""

from __future__ import annotations

import json
import logging

import pytest

from agent import logs
from llmgw.core.logs import configure
from tenants.keys import new_secret


@pytest.mark.parametrize("kind", ["sk", "at", "nt"])
def test_keys_and_tokens_are_cut_to_their_prefix(kind: str) -> None:
    secret = new_secret(kind)
    line = logs.redact(f"refused {secret.text} for Bearer {secret.text}")
    assert secret.text not in line
    assert secret.text[8:] not in line
    assert secret.prefix in line


def test_credentials_in_urls_are_cut() -> None:
    assert logs.redact("no answer from postgresql://llmgw:hunter22@db/x") == "no answer from postgresql://…@db/x"


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("llmgw.x", logging.WARNING, "f", 1, text, None, None)


def test_text_from_outside_moves_no_cursor_and_forges_no_colour() -> None:
    line = logs.ConsoleLine("%(message)s").format(record("node \x1b[2Jevil\x07\x9b31m\rforged"))
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in line)
    assert "evil" in line


def test_a_message_stays_on_one_line_whatever_it_quotes_and_a_traceback_keeps_its_own() -> None:
    try:
        raise OSError("refused\n\tIs the server running?")
    except OSError as error:
        said = record(f"The store does not answer ({error})\n12:00:00 web     forged\n")
        line = logs.ConsoleLine("%(message)s").format(said)
        said.exc_info = type(error), error, error.__traceback__
        with_traceback = logs.ConsoleLine("%(message)s").format(said)
    assert line.endswith("The store does not answer (refused Is the server running?) 12:00:00 web     forged")
    assert "\n" not in line
    assert with_traceback.splitlines()[0] == line
    assert with_traceback.splitlines()[1] == "Traceback (most recent call last):"


def test_json_lines_carry_the_ids_of_the_context() -> None:
    token = logs.context.set({"request": "r1"})
    line = json.loads(logs.JsonLine().format(record("engine failed")))
    logs.context.reset(token)
    assert (line["message"], line["request"], line["level"]) == ("engine failed", "r1", "warning")


def test_console_lines_are_short_and_name_the_level_only_when_it_matters() -> None:
    line = logs.ConsoleLine("%(message)s").format(record("engine failed"))
    assert line.endswith("warning: engine failed")


def test_first_sign_in_links_are_cut_and_refusals_of_strangers_fill_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure({"format": "console", "level": "info"})
        logging.getLogger("django.security.csrf").warning(
            "Forbidden (%s): %s", "no token", "/first-sign-in/_pbhK-x?a=1"
        )
        logging.getLogger("django.request").warning("Not Found: %s", "/wp-login.php")
        logging.getLogger("django.security.DisallowedHost").error("Invalid HTTP_HOST header: %r", "a/../b")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    written = capsys.readouterr().err
    assert "Forbidden (no token): /first-sign-in/…" in written
    assert "pbhK" not in written
    assert "wp-login" not in written
    assert "HTTP_HOST" not in written

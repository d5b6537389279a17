"""The agent's uv reaches the package index as the installation of llmgw itself did."""

from __future__ import annotations

from pathlib import Path

from agent import uv


def test_uv_trusts_what_the_machine_trusts(tmp_path: Path) -> None:
    store = tmp_path / "ca-certificates.crt"
    assert uv.environment({"HOME": "/h"}, (store,)) == {"HOME": "/h"}
    store.touch()
    assert uv.environment({"HOME": "/h"}, (store,)) == {"HOME": "/h", "UV_SYSTEM_CERTS": "true"}


def test_what_the_operator_set_for_uv_stays(tmp_path: Path) -> None:
    assert uv.environment({"UV_SYSTEM_CERTS": "false"}, (tmp_path,)) == {"UV_SYSTEM_CERTS": "false"}


def test_a_certificate_that_is_not_trusted_is_told_apart_from_no_network() -> None:
    words = "error sending request for url (https://pypi/x/)\nclient error (Connect)\ninvalid peer certificate: Unknown"
    said = uv.explain("x 1 cannot be installed", words)
    assert "does not trust" in said
    assert "SSL_CERT_FILE" in said

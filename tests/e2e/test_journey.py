"""A newcomer's first hour: one command, then an SDK, pages and the command line, all on the real thing."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.product import MODEL, Product, product
from tests.services import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def running() -> Iterator[Product]:
    with product() as one:
        yield one


def test_the_bootstrap_file_is_private_and_complete(running: Product) -> None:
    assert stat.S_IMODE(running.bootstrap_file.stat().st_mode) == 0o600
    found = running.bootstrap
    assert set(found) == {"base_url", "admin_username", "admin_password", "project_key", "pids"}
    assert set(found["pids"]) == {"serve", "worker", "agent"}
    assert found["base_url"] == f"http://127.0.0.1:{running.port}"


def test_a_start_ends_in_three_lines_where_how_to_sign_in_and_what_next(running: Product) -> None:
    wait_until("three lines are printed", lambda: running.stdout().count("\n") == 3, 60)
    ready, sign_in, following = running.stdout().splitlines()
    assert ready.startswith("Ready: ")
    assert f"{running.base_url}/v1" in ready
    assert f"{running.base_url}/first-sign-in/" in sign_in
    assert running.key in following


def test_no_secret_is_in_the_log_or_in_any_command_line(running: Product) -> None:
    found = running.bootstrap
    assert found["project_key"] not in running.stderr()
    assert found["admin_password"] not in running.stderr() + running.stdout()


def test_openai_python_gets_real_tokens(running: Product) -> None:
    with running.openai() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
    assert answer.model == MODEL
    # What so small a model says is anybody's guess; that it says something in words is not.
    assert len((answer.choices[0].message.content or "").split()) > 2
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 16


def test_openai_python_streams_and_sees_usage_only_when_it_asks(running: Product) -> None:
    with running.openai() as client:
        plain = list(
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Count to five."}], max_tokens=12, stream=True
            )
        )
        asked = list(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Count to five."}],
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert all(chunk.choices for chunk in plain)
    assert len([chunk for chunk in plain if chunk.choices[0].delta.content]) > 3
    assert [chunk.usage is not None for chunk in asked].count(True) == 1
    assert asked[-1].choices == []


def test_completions_and_embeddings_work_on_the_default_model(running: Product) -> None:
    with running.openai() as client:
        text = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=5).choices[0].text
        vector = client.embeddings.create(model=MODEL, input="hello").data[0].embedding
    assert text.strip()
    assert len(vector) == 576


def test_models_lists_what_the_key_may_use(running: Product) -> None:
    with running.openai() as client:
        assert MODEL in [model.id for model in client.models.list()]


def test_mistakes_are_answered_as_openai_errors_that_say_what_to_do(running: Product) -> None:
    with running.openai(key="sk-7Qf2nothing") as client, pytest.raises(openai.AuthenticationError) as unknown_key:
        client.models.list()
    assert unknown_key.value.code == "key_unknown"
    with running.openai() as client, pytest.raises(openai.NotFoundError) as unknown_model:
        client.chat.completions.create(model="smollm3", messages=[{"role": "user", "content": "x"}])
    assert unknown_model.value.code == "model_unknown"
    assert f"Did you mean {MODEL}?" in str(unknown_model.value)
    address = f"{running.base_url}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {running.key}"}
    for body in (b"", b"[]", b"{", b'{"model":"smollm2","model":"other"}'):
        answer = httpx.post(address, content=body, headers=headers, timeout=60)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["message"], body


def test_usage_counts_each_finished_request_with_its_tokens(running: Product) -> None:
    answer = running.chat("Say hi.", max_tokens=5)
    request_id, usage = answer.headers["x-request-id"], answer.json()["usage"]

    def stored() -> dict[str, object]:
        rows = running.api("/api/v1/usage")["results"]
        return next((row for row in rows if row["request_id"] == request_id), {})

    row = wait_until("the request is in the store", stored, 60)
    assert isinstance(row, dict)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert row["estimated"] is False
    assert row["model"] == MODEL


def test_ctl_status_prints_the_numbers_of_the_summary(running: Product) -> None:
    status = running.ctl_json("status")
    summary = running.api("/api/v1/summary")
    for table in ("nodes", "models", "replicas"):
        assert [row["name"] for row in status[table]] == [row["name"] for row in summary[table]]
    assert status["models"][0]["state"] == "ready"
    text = running.ctl("status")
    assert text.returncode == 0
    assert MODEL in text.stdout


def test_the_dashboard_shows_node_model_and_replica_to_the_operator(running: Product) -> None:
    with httpx.Client(base_url=running.base_url, follow_redirects=True, timeout=60) as browser:
        page = browser.get("/sign-in/")
        token = browser.cookies["csrftoken"]
        found = running.bootstrap
        signed_in = browser.post(
            "/sign-in/",
            data={
                "username": found["admin_username"],
                "password": found["admin_password"],
                "csrfmiddlewaretoken": token,
            },
            headers={"Referer": str(page.url)},
        )
        assert signed_in.status_code == 200
        dashboard = browser.get("/dashboard/").text
    for word in ("local", MODEL, "ready"):
        assert word in dashboard


def test_a_second_up_on_the_same_data_is_refused_in_one_sentence(running: Product) -> None:
    import subprocess

    from tests.e2e.product import LLMGW, clean_environment
    from tests.services import free_port

    again = subprocess.run(
        [*LLMGW, "up", "--data", str(running.data), "--port", str(free_port())],
        capture_output=True, text=True, env=clean_environment(), timeout=180,
    )  # fmt: skip
    assert again.returncode == 2
    assert "another llmgw up" in again.stderr
    assert len(again.stderr.strip().splitlines()) <= 5
    assert "Traceback" not in again.stderr


def test_every_secret_file_is_private(running: Product) -> None:
    for path in (running.data / "secrets").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert json.loads((running.data / "secrets" / "ctl.json").read_text())["token"].startswith("at-")

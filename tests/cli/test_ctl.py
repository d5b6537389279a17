"""`llmgw ctl` and `llmgw why` against a real server on a real port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from pytest_django.live_server_helper import LiveServer

from catalog import actions as catalog_actions
from catalog import yaml_io
from catalog.defaults import default_catalog
from catalog.models import Model
from nodes import identity
from nodes.models import Event
from nodes.snapshot import current_summary
from tenants import actions, rollup
from tenants.audit import SYSTEM
from tenants.figures import number
from tenants.keys import digest
from tenants.models import AuditEntry, Key
from tests import factories
from tests.api.cast import make_usage
from tests.cli.conftest import Ctl
from tests.pages import machines, rows
from tests.tenants.test_rollup import Row


def cluster() -> None:
    catalog_actions.apply_catalog(models=default_catalog(), actor=SYSTEM)
    node = factories.make_node("box")
    factories.make_replica("smollm2-1", node=node)
    factories.make_replica("smollm2-2", node=node, state="failed", reason="no room", tail="one\n\ntwo\x1b[31m")
    Event.objects.create(at=timezone.now(), kind="ready", model="smollm2", replica="smollm2-1", text="It became ready")


def test_status_prints_the_summary_that_pages_show(llmgw: Ctl) -> None:
    cluster()
    rollup.add([Row(at=timezone.now().timestamp(), prompt_tokens=1234567)])
    done = llmgw("ctl", "status")
    assert done.exit_code == 0, done.output
    now = current_summary()
    for words in ("smollm2-1", "smollm2-2", "box", "cpu", *(alert.subject for alert in now.alerts)):
        assert words in done.stdout
    assert f"1 requests, 0 failed, {number(now.usage_today.prompt_tokens)} tokens read" in done.stdout
    assert now.usage_today.prompt_tokens == 1234567
    data = json.loads(llmgw("ctl", "status", "--json").stdout)
    assert data["capacity"][0]["total"] == now.capacity[0].total
    assert "\x1b" not in done.stdout


def test_status_says_what_is_free_whole_who_uses_the_cluster_and_what_is_idle(llmgw: Ctl) -> None:
    machines.make_fleet()
    rows.make_idle("quiet")
    key, _ = factories.make_key(project=factories.make_project("evals", team=factories.make_team("Research")))
    rows.make_usage(10, key=key, model="big")
    identity.admit_certificate(
        name="gpu-01", serial="a", expires_at=timezone.now() + timedelta(days=3, hours=1), actor=SYSTEM
    )
    lines = [" ".join(line.split()) for line in llmgw("ctl", "status").stdout.splitlines()]
    for line in (
        "ib0 h100-80g 400 3 3 1 8",
        "Research / evals big 10 64",
        "quiet-1 node",
        "warn gpu-01 The certificate of gpu-01 ends in 3 d; then its agent is refused. Make another: llmgw node add",
    ):
        assert [found for found in lines if found.startswith(line)], (line, lines)


def test_nodes_are_listed_with_their_cards_used_free_and_faulty(llmgw: Ctl) -> None:
    machines.make_fleet()
    cards = {line.split()[0]: line for line in llmgw("ctl", "nodes").stdout.splitlines()}
    assert "8: 8 used, 0 free " in cards["gpu-01"]
    assert "8: 4 used, 2 free, 2 faulty" in cards["gpu-02"]
    assert "used" not in cards["cpu-01"]


def test_an_empty_cluster_says_the_next_step(llmgw: Ctl) -> None:
    done = llmgw("ctl", "status")
    for command in ("node-token NAME", "models apply -f FILE"):
        assert f"llmgw ctl {command}" in done.stdout
    assert "llmgw ctl keys make NAME" in llmgw("ctl", "keys", "list").stdout
    assert "No replicas run." in llmgw("ctl", "replicas").stdout
    assert "Nothing has happened yet." in llmgw("ctl", "events").stdout
    assert "models apply" in llmgw("ctl", "models").stdout
    assert "never changed" in llmgw("ctl", "models", "versions").stdout


def test_lists_print_one_line_a_record_and_the_same_as_json(llmgw: Ctl) -> None:
    cluster()
    assert "box" in llmgw("ctl", "nodes").stdout
    assert [node["name"] for node in json.loads(llmgw("ctl", "nodes", "--json").stdout)] == ["box"]
    assert "no room" in llmgw("ctl", "replicas", "--model", "smollm2").stdout
    assert json.loads(llmgw("ctl", "replicas", "--model", "x", "--json").stdout) == []
    assert "It became ready" in llmgw("ctl", "events", "--replica", "smollm2-1").stdout
    assert json.loads(llmgw("ctl", "events", "--node", "x", "--json").stdout) == []


def test_a_node_is_let_in_cordoned_and_uncordoned(llmgw: Ctl) -> None:
    made = llmgw("ctl", "node-token", "gpu1")
    assert made.stdout.startswith("nt-")
    assert "not shown again" in made.stderr
    assert "llmgw ctl uncordon gpu1" in llmgw("ctl", "cordon", "gpu1").stdout
    assert json.loads(llmgw("ctl", "uncordon", "gpu1", "--json").stdout)["cordoned_at"] is None
    assert AuditEntry.objects.get(action="cordon node").via == "cli"


def test_a_join_token_is_renewed_only_when_asked_to(llmgw: Ctl) -> None:
    old = llmgw("ctl", "node-token", "gpu1").stdout.strip()
    again = llmgw("ctl", "node-token", "gpu1")
    assert (again.exit_code, again.stdout) == (1, "")
    assert "llmgw ctl node-token gpu1 --renew" in again.stderr
    assert identity.node_of_token(old)
    renewed = llmgw("ctl", "node-token", "gpu1", "--renew")
    new = renewed.stdout.strip()
    assert (renewed.exit_code, identity.node_of_token(old)) == (0, None)
    assert identity.node_of_token(new)
    assert "join token of gpu1; it is not shown again" in renewed.stderr
    assert AuditEntry.objects.get(action="renew join token").via == "cli"
    told = json.loads(llmgw("ctl", "node-token", "gpu1", "--renew", "--json").stdout)
    assert identity.node_of_token(told["token"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("cordon", "nope"), "There is no node nope. See them: llmgw ctl nodes"),
        (("uncordon", "nope"), "There is no node nope. See them: llmgw ctl nodes"),
        (("cordon", "gone/../x"), "There is no node gone/../x. See them: llmgw ctl nodes"),
        (("node-token", "nope", "--renew"), "There is no node nope. See them: llmgw ctl nodes"),
        (("models", "rollback", "99"), "There is no catalog version 99. See them: llmgw ctl models versions"),
        (("keys", "revoke", "99"), "There is no key 99. See them: llmgw ctl keys list"),
    ],
)
def test_what_is_not_there_is_named_with_the_command_that_lists_what_is(
    llmgw: Ctl, words: tuple[str, ...], says: str
) -> None:
    done = llmgw("ctl", *words)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"llmgw: {says}\n")


# --- catalog ---------------------------------------------------------------------------------------------------------
def test_the_catalog_is_applied_listed_exported_and_rolled_back(llmgw: Ctl, tmp_path: Path) -> None:
    file, out = tmp_path / "catalog.yaml", tmp_path / "out.yaml"
    file.write_text(yaml_io.dump(default_catalog()))
    assert "is a valid catalog" in llmgw("ctl", "models", "check", "-f", str(file)).stdout
    assert not Model.objects.exists()
    done = llmgw("ctl", "models", "apply", "-f", str(file), "--note", "first")
    assert (done.exit_code, done.stdout) == (0, "added: smollm2\nThe catalog is at version 1.\n")
    assert "Nothing changed." in llmgw("ctl", "models", "apply", "-f", "-", input=file.read_text()).stdout
    listed = llmgw("ctl", "models")
    assert listed.stdout.splitlines() == [
        "smollm2  min 1  max 1",
        "  cpu  llamacpp  cpu  tp 1  nodes 1  priority 0",
    ]
    assert llmgw("ctl", "models", "export").stdout == file.read_text()
    llmgw("ctl", "models", "export", "-o", str(out))
    assert out.read_text() == file.read_text()
    assert json.loads(llmgw("ctl", "models", "export", "--json").stdout)["models"][0]["name"] == "smollm2"
    assert "removed: smollm2" in llmgw("ctl", "models", "apply", "-f", "-", input="models: []").stdout
    assert "first" in llmgw("ctl", "models", "versions").stdout
    back = llmgw("ctl", "models", "rollback", "1")
    assert back.stdout == "added: smollm2\nThe catalog is at version 3.\n"


def test_a_typo_is_told_with_its_line_and_the_old_catalog_stays(llmgw: Ctl, tmp_path: Path) -> None:
    catalog_actions.apply_catalog(models=default_catalog(), actor=SYSTEM)
    file = tmp_path / "catalog.yaml"
    file.write_text("models:\n- name: a\n  sorce: /a\n  alias: x\n")
    done = llmgw("ctl", "models", "apply", "-f", str(file))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "  line 3, model a: sorce: The key sorce is unknown. Did you mean source?\n" in done.stderr
    assert done.stderr.startswith(f"llmgw: {file}: ")
    assert Model.objects.get().name == "smollm2"


@pytest.mark.parametrize("command", ["apply", "check"])
def test_what_is_no_yaml_is_told_with_its_file(llmgw: Ctl, tmp_path: Path, command: str) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text("models:\n- name: [a\n")
    done = llmgw("ctl", "models", command, "-f", str(file))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"llmgw: {file}: ")
    piped = llmgw("ctl", "models", command, "-f", "-", input=file.read_text())
    assert piped.stderr.startswith("llmgw: standard input: ")


@pytest.mark.parametrize("content", [None, b"\xff", b"x" * (2 * 1024 * 1024 + 1)])
def test_a_file_that_cannot_be_sent_is_named(llmgw: Ctl, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "catalog.yaml"
    if content is not None:
        file.write_bytes(content)
    done = llmgw("ctl", "models", "apply", "-f", str(file))
    assert done.exit_code == 2
    assert str(file) in done.stderr


def test_an_export_that_cannot_be_written_says_so(llmgw: Ctl, tmp_path: Path) -> None:
    done = llmgw("ctl", "models", "export", "-o", str(tmp_path / "no" / "out.yaml"))
    assert done.exit_code == 2
    assert "cannot be written: No such file or directory" in done.stderr


# --- keys and usage --------------------------------------------------------------------------------------------------
def test_a_key_is_made_listed_and_revoked_by_prefix(llmgw: Ctl) -> None:
    project = factories.make_project("Apps")
    factories.make_model("smollm2")
    ends = (timezone.now() + timedelta(days=3)).isoformat()
    made = llmgw("ctl", "keys", "make", "ci", "--model", "smollm2", "--expires", ends)
    secret = made.stdout.strip()
    row = Key.objects.get(digest=digest(secret))
    assert (row.project, row.models_allowed, made.stderr) == (
        project,
        ["smollm2"],
        "This is key ci of Apps; it is not shown again.\n",
    )
    assert row.prefix in llmgw("ctl", "keys", "list").stdout
    assert "is revoked" in llmgw("ctl", "keys", "revoke", secret).stdout
    assert "revoked" in llmgw("ctl", "keys", "list").stdout
    gone = llmgw("ctl", "keys", "revoke", secret)
    assert (gone.exit_code, secret in gone.output) == (1, False)


@pytest.mark.parametrize("time", ["tomorrow", "2027-13-01", "31.1.2027"])
def test_an_expiry_that_is_no_time_is_told_with_an_example(llmgw: Ctl, time: str) -> None:
    factories.make_project("Apps")
    done = llmgw("ctl", "keys", "make", "ci", "--expires", time)
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "Invalid value for --expires" in said
    assert f"'{time}' is no time. Write one such as 2027-01-31T00:00:00Z." in said
    assert not Key.objects.exists()


def test_what_could_be_several_is_asked_back(llmgw: Ctl) -> None:
    assert "no project that you can see" in llmgw("ctl", "keys", "make", "n").stderr
    first, second = factories.make_project("Apps"), factories.make_project("Apps")
    done = llmgw("ctl", "keys", "make", "n")
    assert done.exit_code == 2
    assert f"Apps ({first.pk})" in done.stderr
    assert "give its number" in llmgw("ctl", "keys", "make", "n", "--project", "Apps").stderr
    assert "no project X" in llmgw("ctl", "keys", "make", "n", "--project", "X").stderr
    assert llmgw("ctl", "keys", "make", "n", "--project", str(second.pk)).exit_code == 0
    factories.make_key(project=first)
    Key.objects.update(prefix="sk-same")
    done = llmgw("ctl", "keys", "revoke", "sk-same")
    assert (done.exit_code, "give its number" in done.stderr) == (2, True)
    assert "is revoked" in llmgw("ctl", "keys", "revoke", str(Key.objects.latest("pk").pk)).stdout
    wrong = llmgw("ctl", "keys", "make", "n", "--project", str(first.pk), "--expires", "2020-01-01")
    assert (wrong.exit_code, "expires_at: It lies in the past" in wrong.stderr) == (1, True)


def test_usage_is_summed_and_listed(llmgw: Ctl) -> None:
    project = factories.make_project("Apps")
    make_usage(project, request_id="r1", at=timezone.now(), prompt_tokens=None)
    done = llmgw("ctl", "usage", "--project", "Apps", "--model", "smollm2")
    assert "1 requests, 0 failed, 0 tokens read, 4 written" in done.stdout
    assert "r1" in done.stdout
    assert json.loads(llmgw("ctl", "usage", "--json").stdout)["totals"]["requests"] == 1


def test_requests_are_found_by_what_is_known_of_them(llmgw: Ctl) -> None:
    project = factories.make_project("Apps")
    key, secret = factories.make_key(project=project)
    make_usage(project, key, request_id="r1")
    make_usage(project, request_id="r2", status=429, error_code="rate_limited", model="big")
    assert [line.split()[1] for line in llmgw("ctl", "requests").stdout.splitlines()] == ["request", "r2", "r1"]
    for found, words in (
        ("r1", ("--key", secret, "--project", "Apps")),
        ("r1", ("--key", str(key.pk))),
        ("r1", ("--result", "ok", "--model", "smollm2")),
        ("r2", ("--code", "rate_limited")),
        ("r2", ("--since", "2026-11-29", "--until", "2026-11-30", "--limit", "1")),
    ):
        assert [row["request_id"] for row in json.loads(llmgw("ctl", "requests", *words, "--json").stdout)] == [found]
    assert llmgw("ctl", "requests", "--model", "none").stdout == "No requests.\n"
    wrong = llmgw("ctl", "requests", "--result", "odd")
    assert (wrong.exit_code, "result: odd is no result." in wrong.stderr) == (1, True)


# --- why -------------------------------------------------------------------------------------------------------------
def test_why_explains_whatever_has_a_name(llmgw: Ctl) -> None:
    cluster()
    project = factories.make_project("Apps")
    make_usage(project, request_id="req-1", replica="smollm2-1", node="box", first_token_ms=285, streamed=True)
    make_usage(project, request_id="req-2", status=503, error_code="no_endpoint", prompt_tokens=None, estimated=True)
    assert "Replica smollm2-1 of smollm2 (cpu, llamacpp): ready." in llmgw("why", "smollm2-1").stdout
    failed = llmgw("why", "smollm2-2").stdout
    assert ": failed." in failed
    assert "The engine's last lines:\n  one\n  two [31m\n" in failed
    assert "Model smollm2: " in llmgw("why", "default").stdout
    assert "It became ready" in llmgw("why", "smollm2").stdout
    llmgw("ctl", "cordon", "box")
    assert "It is cordoned" in llmgw("why", "box").stdout
    answered = llmgw("why", "req-1").stdout
    assert "Request req-1 to /v1/chat/completions, which ended at 2026-11-29T12:00:00 UTC:\n  for Apps\n" in answered
    assert "It was answered by smollm2-1 on box in 12 ms, the first token after 285 ms (HTTP 200)." in answered
    assert "not kept" in answered
    refused = llmgw("why", "req-2").stdout
    assert "it failed: no replica served the model and none was on its way (HTTP 503, no_endpoint)." in refused
    assert "  It wrote 4 tokens; how many it read is not known.\n  These counts are estimates" in refused
    make_usage(project, request_id="req-3", status=400, error_code="body_invalid", model="", replica="")
    assert "not kept" not in llmgw("why", "req-3").stdout
    assert json.loads(llmgw("why", "req-1", "--json").stdout)["kind"] == "request"
    nothing = llmgw("why", "nothing")
    assert (nothing.exit_code, "llmgw ctl status" in nothing.stderr) == (1, True)


def test_people_who_do_not_operate_still_learn_about_their_requests(
    llmgw: Ctl, live_server: LiveServer, tmp_path: Path
) -> None:
    alice = factories.make_user("alice")
    make_usage(factories.make_project("Apps", team=factories.make_team(owner=alice)), request_id="hers")
    _, secret = actions.make_api_token(user=alice, name="ctl", scopes=["read"], actor=SYSTEM)
    mine = tmp_path / "mine"
    mine.write_text(secret)
    options = ("--url", live_server.url, "--token-file", str(mine))
    assert "Request hers to /v1/chat/completions" in llmgw("why", "hers", *options).stdout
    assert "hers" in llmgw("ctl", *options, "requests").stdout
    hidden = llmgw("ctl", *options, "status")
    assert hidden.exit_code == 1
    assert "llmgw: There is nothing here that you can see.\n" in hidden.stderr


# --- as a program ----------------------------------------------------------------------------------------------------
def test_the_command_itself_imports_no_django_and_prints_in_any_locale(token_file: Path) -> None:
    cluster()
    code = (
        "import sys; sys.argv = ['llmgw', 'ctl', 'status']\n"
        "from llmgw.cli.main import main\n"
        "try: main()\n"
        "finally: print('django' in sys.modules, file=sys.stderr)"
    )
    environment = {"PATH": os.environ["PATH"], "LLMGW_TOKEN_FILE": str(token_file), "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=110, check=False)
    assert (done.returncode, done.stderr.decode().splitlines()[-1]) == (0, "False"), done.stderr
    assert b"smollm2-1" in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['llmgw', 'ctl', 'models', '--help']\n"
        "from llmgw.cli.ctl import app\n"
        "print(sorted({'httpx', 'rich.table', 'django', 'llmgw.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout == "[]\n", done.stderr

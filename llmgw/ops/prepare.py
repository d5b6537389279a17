"""Bring a store up to date and, on an empty one, make the first things: administrator, project, key, catalog, node."""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from llmgw.core import secret_file

ADMIN = "admin"
PASSWORD_FILE = "admin-password"  # noqa: S105
CTL_FILE = "ctl.json"
BOOTSTRAP_KEY_FILE = "bootstrap-key"
FIRST_KEY_FILE = "first-key"
"""The first project key until somebody has seen it: a start that is broken off must not lose it."""


@dataclass(frozen=True, slots=True)
class First:
    """What `prepare` found or made. Secrets are None where they were made earlier and are not known any more."""

    admin: str
    password: str | None
    project_key: str | None
    sign_in_path: str | None


def django_setup() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "llmgw.settings"
    import django

    django.setup(set_prefix=False)


def prepare(*, kept_key: str | None = None, wants_key: bool = False) -> First:
    """Migrate, then make what is missing. `kept_key` is a project key known from before: it is handed back while it
    still works; `wants_key` asks for a new one when it does not. Raises ConfigError when the store cannot be used."""
    django_setup()
    from django.core.management import call_command
    from django.db import Error, connection

    from catalog.actions import apply_catalog
    from catalog.defaults import default_catalog
    from catalog.models import CatalogVersion
    from llmgw.config import ConfigError, current
    from tenants import actions
    from tenants.audit import SYSTEM
    from tenants.keys import digest
    from tenants.models import Key, Project, User

    try:
        call_command("migrate", interactive=False, verbosity=0)
    except Error as error:
        place = current().store.url or str(connection.settings_dict["NAME"])
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(f"the store at {_without_password(place)} cannot be used: {first_line}.") from None

    fresh = not User.objects.filter(is_superuser=True).exists()
    if fresh:
        password = secrets.token_urlsafe(12)
        secret_file.write(current().secrets_dir / PASSWORD_FILE, password + "\n")
        actions.make_operator(username=ADMIN, password=password, actor=SYSTEM)
    admin = User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
    if admin is None:
        raise ConfigError("no administrator is active. Make one: manage.py createsuperuser")
    project = Project.objects.order_by("pk").first() or actions.make_default_tree(owner=admin, actor=SYSTEM)
    key_text = kept_key
    if key_text is None or not Key.objects.live().filter(digest=digest(key_text)).exists():
        key_text = None
        if wants_key or not Key.objects.exists():
            _, key_text = actions.make_key(project=project, name="first key", actor=SYSTEM)
    if not CatalogVersion.objects.exists():
        apply_catalog(models=default_catalog(), actor=SYSTEM, note="first start")
    connection.close()
    return First(
        admin=admin.username,
        password=_password(admin),
        project_key=key_text,
        sign_in_path=_first_link(admin),
    )


def everything(node: str, *, scripted: bool) -> First:
    """What `llmgw up` needs before its parts start: a prepared store, ctl's token, the local node's join token.

    `scripted`: a script asks for a project key at each start; it gets the same one as long as that works.
    """
    from llmgw.config import current

    settings = current()
    kept = settings.secrets_dir / (BOOTSTRAP_KEY_FILE if scripted else FIRST_KEY_FILE)
    first = prepare(kept_key=kept.read_text().strip() if kept.exists() else None, wants_key=scripted)
    if first.project_key:
        secret_file.write(kept, f"{first.project_key}\n")
    write_ctl_file(settings.base_url)
    node_token(node)
    return first


def _password(admin: object) -> str | None:
    """The generated password while it still works."""
    from llmgw.config import current

    path = current().secrets_dir / PASSWORD_FILE
    if not path.exists():
        return None
    text = path.read_text().strip()
    return text if admin.check_password(text) else None  # type: ignore[attr-defined]


def _first_link(admin: object) -> str | None:
    """A link with a one-hour code while nobody has signed in yet."""
    from tenants.sign_in import make_first_link

    return make_first_link(admin) if admin.last_login is None else None  # type: ignore[attr-defined,arg-type]


def write_ctl_file(base_url: str) -> None:
    """Give `llmgw ctl` on this machine an operator's token, in a 0600 file; an existing working one is kept."""
    import json

    from django.db import connection

    from llmgw.config import current
    from tenants import actions
    from tenants.audit import SYSTEM
    from tenants.keys import digest
    from tenants.models import ApiToken, User

    path = current().secrets_dir / CTL_FILE
    token = None
    if path.exists():
        token = json.loads(path.read_text()).get("token")
    if not token or not ApiToken.objects.filter(digest=digest(token), revoked_at=None).exists():
        admin = User.objects.filter(is_superuser=True, is_active=True).order_by("pk")[0]
        _, token = actions.make_api_token(user=admin, name="llmgw ctl", scopes=actions.SCOPES, actor=SYSTEM)
    secret_file.write(path, json.dumps({"url": base_url, "token": token}) + "\n")
    connection.close()


def node_token(name: str) -> None:
    """Have a node called `name` and its join token in `secrets/node-NAME` (0600). Raises ConfigError when another
    machine speaks for it: two that took each other's token would take turns for ever."""
    from django.db import connection
    from django.utils import timezone

    from llmgw.config import ConfigError, current
    from nodes.actions import make_node, renew_join_token
    from nodes.models import Node
    from tenants.audit import SYSTEM
    from tenants.keys import digest

    path = current().secrets_dir / f"node-{name}"
    known = path.exists() and Node.objects.filter(name=name, token_digest=digest(path.read_text().strip())).exists()
    if not known:
        node = Node.objects.filter(name=name).first()
        quiet = timedelta(seconds=current().nodes.unreachable_after_s)
        if node and node.last_seen_at and timezone.now() - node.last_seen_at < quiet:
            raise ConfigError(
                f"another machine is node {name} of this store (its `llmgw up` runs). Here run the parts one by one: "
                "`llmgw server run web`, `worker`, `beat` and `gateway`, and `llmgw agent` with a node of its own."
            )
        token = renew_join_token(node=node, actor=SYSTEM) if node else make_node(name=name, actor=SYSTEM)[1]
        secret_file.write(path, token + "\n")
    connection.close()


def migrate(config: Path | None) -> int:
    """`llmgw server migrate`."""
    if config:
        os.environ["LLMGW_CONFIG"] = str(config)
    from llmgw.config import current

    settings = current()
    check_data_dir(settings.data_dir)
    first = prepare()
    write_ctl_file(settings.base_url)
    print(f"The store is up to date. Administrator: {first.admin}.")
    if first.sign_in_path:
        password = f", or with the password in {settings.secrets_dir / PASSWORD_FILE}" if first.password else ""
        print(f"Sign in first: {settings.base_url}{first.sign_in_path} (one hour){password}")
    if first.project_key:
        print(f"First project key, shown once: {first.project_key}")
    return 0


def check_data_dir(path: Path) -> None:
    """Make the data directory (0700) and prove that it can be written; raises ConfigError with what to do."""
    from llmgw.config import ConfigError

    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = path / f".writable.{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        step = "Free some space, or name another" if error.errno == errno.ENOSPC else "Name another"
        raise ConfigError(
            f"the data directory {path} cannot be written: {error.strerror}. {step}: --data DIR"
        ) from None


def _without_password(url: str) -> str:
    from llmgw.core.logs import redact

    return redact(url)

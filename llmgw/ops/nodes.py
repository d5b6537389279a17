"""What `llmgw server ca` and `llmgw node add` do on the machine that holds the authority."""

from __future__ import annotations

import getpass
from pathlib import Path

from llmgw.config import ConfigError, current
from llmgw.ops import pki, prepare

MAX_COMMON_NAME = 64


def ca(names: tuple[str, ...]) -> list[str]:
    """Make the authority and the listener's certificate where they lack; what was done and comes next, in lines."""
    settings = current()
    authority, made = pki.open_or_make(settings.authority_dir)
    wanted = (*pki.names_here(settings.agents.host), *settings.agents.names, *names)
    held, issued = pki.serve_names(authority, wanted)
    lines = [
        f"Authority {'made' if made else 'found'} in {authority.directory}. Whoever has its ca.key can be any node.",
        f"The listener's certificate {'now holds' if issued else 'holds'}: {', '.join(held)}.",
    ]
    if issued and not made:
        lines.append("A listener that runs here shows it within a minute. Copy server.crt and server.key to others.")
    if settings.agents.port is None:
        lines.append("Next: set agents.port (for example 8444), and start: llmgw server run agents")
    else:
        lines.append("Next: llmgw node add NAME")
    return lines


def add(name: str, out: Path | None, *, renew: bool) -> list[str]:
    """Make a node and its certificate; where the files are and what comes next, in lines. Raises ConfigError."""
    settings = current()
    if len(name) > MAX_COMMON_NAME:
        raise ConfigError(f"a certificate holds names of at most {MAX_COMMON_NAME} characters; choose a shorter one.")
    authority = pki.open_existing(settings.authority_dir)
    directory = (out or Path(f"node-{name}")).absolute()
    if (directory / "node.key").exists() and not renew:
        raise ConfigError(f"{directory} holds a certificate already. Renew it with --renew, or name another: --out DIR")
    prepare.django_setup()
    from nodes import identity
    from nodes.models import Node
    from nodes.names import NODE_NAME
    from tenants.audit import Actor

    if not NODE_NAME.match(name):
        raise ConfigError(f"{name!r} cannot be a node's name: write letters, digits, - . and _ only.")
    if not renew and Node.objects.filter(name=name, certificates__isnull=False).exists():
        raise ConfigError(f"node {name} has a certificate already. Replace it with --renew, and the old one is void.")
    issued = authority.issue_node(name)
    try:
        pki.write_node_files(directory, issued, authority.root)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}. Name another: --out DIR") from None
    actor = Actor(name=getpass.getuser(), via="cli")
    node = identity.admit_certificate(name=name, serial=issued.serial, expires_at=issued.expires_at, actor=actor)
    if renew:
        identity.revoke_certificates(node=node, actor=actor, keep=issued.serial)
    control_plane = f"https://{next(iter(settings.agents.names), 'THIS-MACHINE')}:{settings.agents.port or 8444}"
    return [
        f"Copy {directory} to the machine, readable by its agent's user only, and write into its agent.yaml:",
        f"  node: {name}",
        f'  control_plane: ["{control_plane}"]',
        "  certificate_file: node.crt",
        "  key_file: node.key",
        "  ca_file: ca.crt",
        f"The certificate holds until {issued.expires_at:%Y-%m-%d}.",
    ]

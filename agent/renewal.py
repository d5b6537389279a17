"""Renews the agent's certificate: a new key that never leaves this machine, a request that goes up the stream (ND-4).

What the operator put there stays as it is. The renewed certificate and its key are one file of the agent's own that is
replaced whole, so that there is a pair that works at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from agent.config import AgentSettings
from agent.files import write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

log = logging.getLogger(__name__)

FILE = "certificate.pem"


class NotKept(Exception):
    """A new certificate that this agent has no use for. `str()` is the whole sentence but for its full stop."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a certificate and its key are, perhaps in one file."""

    certificate_file: Path
    key_file: Path


class Renewal:
    """Of the certificate that settings name. `now`: the machine's clock."""

    def __init__(self, settings: AgentSettings, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        assert settings.certificate_file is not None
        assert settings.key_file is not None
        self._node = settings.node
        self._now = now
        self._given = Pair(settings.certificate_file, settings.key_file)
        path = settings.work_dir / FILE
        self._own = Pair(path, path)
        self._key: ec.EllipticCurvePrivateKey | None = None
        """Of the request that waits for its answer."""

    def pairs(self) -> tuple[Pair, ...]:
        """What there is to show, what was issued last first: an operator's new files count from when they are there."""
        if not self._own.certificate_file.exists():
            return (self._given,)
        own = self._read(self._own)
        if own is None:
            return (self._given,)
        given = self._read(self._given)
        if given is not None and given.not_valid_before_utc >= own.not_valid_before_utc:
            return self._given, self._own
        return self._own, self._given

    def request(self) -> str | None:
        """A request for another certificate, as PEM, once two thirds of this one's life are over."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        shown = self._read(self.pairs()[0])
        if shown is None or self._now() < _due_at(shown):
            return None
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._node)])
        asked = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
        self._key = key
        return asked.public_bytes(serialization.Encoding.PEM).decode()

    def keep(self, certificate: str) -> datetime:
        """The answer: written down with its key. Until when it holds. Raises NotKept and OSError."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        key, self._key = self._key, None
        try:
            made = x509.load_pem_x509_certificate(certificate.encode())
        except ValueError:
            raise NotKept("what came as a new certificate is none") from None
        if key is None or made.public_key() != key.public_key():
            raise NotKept("a certificate came for a key that this agent does not have")
        if _name(made) != self._node or made.not_valid_after_utc <= self._now():
            raise NotKept(f"a certificate came that does not prove {self._node} now")
        written = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_private(self._own.certificate_file, made.public_bytes(serialization.Encoding.PEM) + written)
        return made.not_valid_after_utc

    def _read(self, pair: Pair) -> x509.Certificate | None:
        """The certificate of a pair; of ours, only if it is this node's."""
        from cryptography import x509

        try:
            found = x509.load_pem_x509_certificate(pair.certificate_file.read_bytes())
        except (OSError, ValueError):
            if pair is self._own:
                log.warning("%s holds no certificate and is not used; remove it", pair.certificate_file)
            return None
        return found if pair is self._given or _name(found) == self._node else None


def _due_at(shown: x509.Certificate) -> datetime:
    begins, ends = shown.not_valid_before_utc, shown.not_valid_after_utc
    return begins + (ends - begins) * 2 / 3


def _name(certificate: x509.Certificate) -> str:
    from cryptography.x509.oid import NameOID

    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else ""

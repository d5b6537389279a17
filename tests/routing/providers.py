"""A provider on loopback: an engine behind TLS whose certificate an authority made here has signed, which keeps every
byte that it was sent."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.stubs.mock_engine import EngineConnection, MockEngine

NAMES = ("localhost", "provider.example")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@cache
def authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name("llmgw test authority"))
        .issuer_name(_name("llmgw test authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    ), key


@cache
def files() -> tuple[Path, Path]:
    """The authority's certificate, and a server's key with its certificate, as PEM."""
    ca, ca_key = authority()
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    names = [x509.DNSName(name) for name in NAMES]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name("a provider"))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([*names, x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    place = Path(mkdtemp(prefix="llmgw-provider-"))
    ca_file, server_file = place / "ca.pem", place / "server.pem"
    ca_file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    server_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return ca_file, server_file


class ProviderConnection(EngineConnection):
    engine: Provider

    def data_received(self, data: bytes) -> None:
        self.engine.raw += data
        super().data_received(data)


class Provider(MockEngine):
    """`raw`: all that came, decrypted. `server_names`: what clients asked for before TLS stood."""

    def __init__(self, *, key: str = "", tls: bool = True) -> None:
        super().__init__(key=key)
        self.raw = b""
        self.server_names: list[str | None] = []
        self._context: ssl.SSLContext | None = None
        if tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(files()[1])
            self._context.sni_callback = lambda _, name, __: self.server_names.append(name)

    async def start(self, port: int = 0) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ProviderConnection(self), "127.0.0.1", port, backlog=1024, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def url(self, host: str = "localhost", path: str = "/v1") -> str:
        return f"{'https' if self._context else 'http'}://{host}:{self.port}{path}"

"""A small authority: its key in a 0600 file on one machine, certificates for agents and for the listener they dial.

Public authorities issue no certificates for clients any more. Looks before it acts: what is there is never replaced
but by what says more names.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agent.files import write_private
from llmgw.config import ConfigError
from nodes.signing import NotSigned, Sign, Signed

AUTHORITY_DAYS = 3650
LEAF_DAYS = 730
RENEW_WITHIN = timedelta(days=30)
"""How long before its end a listener makes itself another certificate."""
EARLIER = timedelta(minutes=10)
"""Certificates hold from a little before now: machines' clocks differ."""
CA_KEY, CA_CERT, SERVER_KEY, SERVER_CERT = "ca.key", "ca.crt", "server.key", "server.crt"


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its key, both as PEM."""

    certificate: bytes
    key: bytes
    serial: str
    expires_at: datetime


class Authority:
    """Signs. Made by `open_or_make` where there is none yet, by `open_existing` where there must be one."""

    def __init__(self, directory: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.directory = directory
        self._key = key
        self._certificate = certificate

    @property
    def root(self) -> bytes:
        """Its own certificate, which agents trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def ends_at(self) -> datetime:
        """Nothing that it signs holds for longer."""
        return self._certificate.not_valid_after_utc

    def issue_node(self, node: str) -> Issued:
        """A client certificate whose common name is the node id."""
        return self._issue(node, (x509.DNSName(node),), ExtendedKeyUsageOID.CLIENT_AUTH)

    def issue_server(self, names: Iterable[str]) -> Issued:
        """A server certificate for every name and address in `names`."""
        found = tuple(_general(name) for name in names)
        return self._issue("llmgw agents", found, ExtendedKeyUsageOID.SERVER_AUTH)

    def sign_request(self, node: str, request: str, current: str) -> Signed | NotSigned:
        """Another certificate for an agent that keeps its key, if it asks in the name that `current` proves."""
        try:
            asked, shown = x509.load_pem_x509_csr(request.encode()), x509.load_pem_x509_certificate(current.encode())
            shown.verify_directly_issued_by(self._certificate)
            key, is_whole, names = asked.public_key(), asked.is_signature_valid, list(asked.subject)
        except InvalidSignature:
            return NotSigned(f"another authority issued the certificate of {node}; {_anew(node)}")
        except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
            return NotSigned("the request is none that can be read; upgrade the agent")
        if not is_whole or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            return NotSigned(
                "the request is not signed with a key of the kind that is taken (P-256); upgrade the agent"
            )
        if [(each.oid, each.value) for each in names] != [(NameOID.COMMON_NAME, node)]:
            whose = ", ".join(str(each.value) for each in names)[:100] or "nobody"
            return NotSigned(f"the request is for {whose}, and the stream is node {node}'s")
        certificate, expires_at = self._certify(key, node, (x509.DNSName(node),), ExtendedKeyUsageOID.CLIENT_AUTH)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return Signed(pem.decode(), format(certificate.serial_number, "x"), expires_at)

    def _issue(self, name: str, names: tuple[x509.GeneralName, ...], usage: x509.ObjectIdentifier) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        signed, expires_at = self._certify(key.public_key(), name, names, usage)
        pem = signed.public_bytes(serialization.Encoding.PEM)
        return Issued(pem, _key_pem(key), format(signed.serial_number, "x"), expires_at)

    def _certify(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        names: tuple[x509.GeneralName, ...],
        usage: x509.ObjectIdentifier,
    ) -> tuple[x509.Certificate, datetime]:
        """A certificate, and when it ends."""
        now = datetime.now(UTC)
        expires_at = min(now + timedelta(days=LEAF_DAYS), self.ends_at)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signed = (
            _builder(subject, self._certificate.subject, key, self._key.public_key(), now, expires_at)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return signed, expires_at


def signer(directory: Path) -> Sign:
    """Signs what agents ask for where the authority's key is. It is read each time, which is seldom."""

    def sign(node: str, request: str, current: str) -> Signed | NotSigned:
        if not holds_key(directory):
            return NotSigned(
                f"this control plane does not hold the authority's key ({CA_KEY}), so that it renews no certificates; "
                f"put the one that does into the agent's control_plane, or there {_anew(node)}"
            )
        try:
            return open_existing(directory).sign_request(node, request, current)
        except ConfigError as error:
            return NotSigned(f"the control plane's authority cannot sign: {error}")

    return sign


def holds_key(directory: Path) -> bool:
    return os.access(directory / CA_KEY, os.R_OK)


def _anew(node: str) -> str:
    return f"make another: llmgw node add {node} --renew"


def open_or_make(directory: Path) -> tuple[Authority, bool]:
    """The authority in `directory`, and whether it was made just now. Raises ConfigError."""
    if (directory / CA_KEY).exists() or (directory / CA_CERT).exists():
        return open_existing(directory), False
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"llmgw authority of {socket.gethostname()}"[:64])])
    certificate = (
        _builder(name, name, key.public_key(), key.public_key(), now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    try:
        write_private(directory / CA_CERT, certificate.public_bytes(serialization.Encoding.PEM))
        write_private(directory / CA_KEY, _key_pem(key))
    except OSError as error:
        raise ConfigError(f"the authority cannot be kept in {directory}: {error.strerror}.") from None
    return Authority(directory, key, certificate), True


def open_existing(directory: Path) -> Authority:
    """Raises ConfigError when there is none, or when it cannot be read."""
    try:
        key = serialization.load_pem_private_key((directory / CA_KEY).read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate((directory / CA_CERT).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} is not there. Make the authority: llmgw server ca") from None
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError):
        raise ConfigError(
            f"{directory} holds no authority that llmgw made; name another agents.authority_dir."
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{CA_KEY} and {CA_CERT} in {directory} do not belong together; restore both from a backup.")
    return Authority(directory, key, certificate)


def serve_names(authority: Authority, names: Iterable[str]) -> tuple[tuple[str, ...], bool]:
    """See to it that the server's certificate holds `names`, keeping those that it has.

    Returns all of them, and whether it was issued just now. A certificate near its end is issued anew.
    """
    path = authority.directory / SERVER_CERT
    if not path.exists():
        wanted = tuple(dict.fromkeys(names))
    else:
        held, expires_at = _held(path)
        wanted = tuple(dict.fromkeys((*held, *names)))
        lasts = expires_at - datetime.now(UTC) > timedelta(days=LEAF_DAYS / 4)
        if set(wanted) == set(held) and lasts and _is_pair(authority.directory):
            return held, False
    _serve(authority, wanted)
    return wanted, True


def _serve(authority: Authority, names: tuple[str, ...]) -> None:
    issued = authority.issue_server(names)
    write_private(authority.directory / SERVER_KEY, issued.key)
    write_private(authority.directory / SERVER_CERT, issued.certificate)


def check_server_files(directory: Path) -> None:
    """Raises ConfigError when what the listener shows and trusts is not there, or is not what it should be."""
    for name in (CA_CERT, SERVER_CERT, SERVER_KEY):
        if not os.access(directory / name, os.R_OK):
            raise ConfigError(f"{directory / name} is not there, or cannot be read. Make it: llmgw server ca")
    _certificate(directory / CA_CERT)
    _held(directory / SERVER_CERT)
    if not _is_pair(directory):
        raise ConfigError(
            f"{directory / SERVER_KEY} is not the key of {SERVER_CERT} there. Make both anew, with the same names, on "
            f"the machine with {CA_KEY}: llmgw server ca"
        )


def renew_server(directory: Path) -> bool:
    """Make the listener another certificate with the same names when its own ends soon, or its key is another's.
    False when it need not be, or cannot be, as the authority's key is elsewhere. Raises ConfigError, OSError."""
    if not holds_key(directory) or not (directory / SERVER_CERT).exists():
        return False
    names, expires_at = _held(directory / SERVER_CERT)
    is_pair = _is_pair(directory)
    if expires_at - datetime.now(UTC) > RENEW_WITHIN and is_pair:
        return False
    authority = open_existing(directory)
    if is_pair and expires_at >= authority.ends_at:  # another would end no later, and be due again at once
        return False
    _serve(authority, names)
    return True


def make_server_ready(directory: Path) -> bool:
    """Before a listener starts: renew its certificate where that is due; whether it was. Raises ConfigError."""
    try:
        renewed = renew_server(directory)
    except OSError as error:
        raise ConfigError(f"the listener's certificate cannot be renewed in {directory}: {error.strerror}.") from None
    check_server_files(directory)
    return renewed


def server_ends_at(directory: Path) -> datetime:
    """When the listener's certificate ends. Raises ConfigError."""
    return _held(directory / SERVER_CERT)[1]


def names_here(host: str) -> tuple[str, ...]:
    """What this machine is called and reached by, as far as it knows without asking anybody."""
    named = () if host in ("", "0.0.0.0", "::") else (host,)  # noqa: S104
    routed = _routed_address()
    return tuple(
        dict.fromkeys(("localhost", "127.0.0.1", socket.gethostname(), *named, *((routed,) if routed else ())))
    )


def write_node_files(directory: Path, issued: Issued, root: bytes) -> None:
    """What an agent needs, readable by its owner only. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in (("node.key", issued.key), ("node.crt", issued.certificate), ("ca.crt", root)):
        write_private(directory / name, content)


def _held(path: Path) -> tuple[tuple[str, ...], datetime]:
    """The names in a certificate of the listener, and when it ends. Raises ConfigError."""
    certificate = _certificate(path)
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        raise _damaged(path) from None
    return tuple(str(each.value) for each in found), certificate.not_valid_after_utc


def _certificate(path: Path) -> x509.Certificate:
    """Raises ConfigError."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise _damaged(path) from None


def _damaged(path: Path) -> ConfigError:
    if path.name == CA_CERT:
        return ConfigError(f"{path} holds no certificate; restore it from a backup, or copy it from the first host.")
    return ConfigError(
        f"{path} holds no certificate of a listener, so that its names are not known. Move it away, and make another "
        "with every name that agents dial: llmgw server ca --name NAME --name ..."
    )


def _is_pair(directory: Path) -> bool:
    """Whether the listener's key and certificate belong together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            directory / SERVER_CERT, directory / SERVER_KEY, password=""
        )
    except OSError:  # of TLS too
        return False
    return True


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    now: datetime,
    expires_at: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(expires_at)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise ConfigError(f"{name!r} is no host name that a certificate can hold; correct agents.names.") from None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _routed_address() -> str:
    """The address that faces the default route; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])

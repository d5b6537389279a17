"""TLS to the control plane: whom the agent trusts, and the certificate that it proves itself with (ND-4).

Files are read at each connection, so that a renewed certificate needs no restart.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

from agent.config import AgentSettings
from agent.renewal import Pair

REFUSED = (
    "the control plane ended the connection before it answered, as it does when it gets no certificate or does not "
    "take it; make one there with `llmgw node add NAME`, and name it as certificate_file and key_file"
)


class TlsError(Exception):
    """`str()` is the whole sentence but for its full stop."""


def context(settings: AgentSettings, pair: Pair | None) -> tuple[ssl.SSLContext, str]:
    """For one connection that shows `pair`, and a warning when others can read its key, else "". Raises TlsError."""
    made = _trusting(settings.ca_file)
    warning = ""
    if pair is not None:
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            mode = stat.S_IMODE(os.stat(pair.key_file).st_mode)
            made.load_cert_chain(pair.certificate_file, pair.key_file, password=_no_password)
        except ssl.SSLError:
            raise TlsError(
                f"certificate_file {pair.certificate_file} and key_file {pair.key_file} hold no certificate "
                f"with its key. Make both anew on the control plane: llmgw node add {settings.node}"
            ) from None
        except OSError as error:
            missing = error.filename or pair.certificate_file
            raise TlsError(
                f"{missing} cannot be read: {error.strerror}. "
                f"Make certificate and key on the control plane: llmgw node add {settings.node}"
            ) from None
        if mode & 0o077:
            warning = f"{pair.key_file} can be read by others. Run: chmod 600 {pair.key_file}"
    return made, warning


def why(error: ssl.SSLError) -> str:
    """What went wrong with TLS, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the control plane's certificate is not trusted ({error.verify_message}); name its authority's as "
            "ca_file, or give the control plane a certificate with this address: llmgw server ca --name ADDRESS"
        )
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "certificate" in reason or "unknown ca" in reason:
        return REFUSED
    if "wrong version number" in reason or "record layer failure" in reason:
        return "the control plane speaks no TLS there; write http:// or correct the port"
    return f"TLS failed ({reason})"


def _trusting(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise TlsError(f"ca_file {ca_file} holds no certificate. Copy ca.crt from the control plane anew") from None
    except OSError as error:
        raise TlsError(
            f"ca_file {ca_file} cannot be read: {error.strerror}. Copy ca.crt from the control plane"
        ) from None


def _no_password() -> str:
    """A key that is encrypted is no key for a program that starts by itself; OpenSSL must not ask a terminal."""
    return ""

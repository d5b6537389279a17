"""What the agent shows to a control plane and whom it trusts, read anew at each connection; its warnings come once."""

from __future__ import annotations

import logging
import ssl

from agent import join_token, tls
from agent.config import AgentSettings
from agent.renewal import NotKept, Renewal

log = logging.getLogger(__name__)


class Unusable(Exception):
    """A file does not hold what it should. `str()` is the whole sentence but for its full stop."""


class Credentials:
    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._warned: dict[str, str] = {}
        self._renewal = Renewal(settings) if settings.certificate_file is not None else None
        self._turned_away = 0

    @property
    def address(self) -> str | None:
        """Where the node says that it is reached, if its settings name one."""
        return self._settings.address

    def headers(self) -> dict[str, str]:
        """Raises Unusable."""
        path = self._settings.token_file
        if path is None:
            return {}
        try:
            token, warning = join_token.read(path, node=self._settings.node)
        except join_token.TokenError as error:
            raise Unusable(str(error)) from None
        self._warn("token_file", warning)
        return {"Authorization": f"Bearer {token}"}

    def tls(self) -> ssl.SSLContext:
        """Raises Unusable."""
        pairs = self._renewal.pairs() if self._renewal else (None,)
        try:
            context, warning = tls.context(self._settings, pairs[self._turned_away % len(pairs)])
        except tls.TlsError as error:
            raise Unusable(str(error)) from None
        self._warn("key_file", warning)
        return context

    def turned_away(self) -> None:
        """The control plane did not take what it was shown: where there is another certificate, that comes next."""
        self._turned_away += 1

    def certificate_request(self) -> str | None:
        """For another certificate, if it is time; as PEM."""
        return self._renewal.request() if self._renewal else None

    def keep_certificate(self, certificate: str) -> bool:
        """Whether the answer to that is what comes next; if not, the log says why."""
        if self._renewal is None:
            log.error("The control plane sent a certificate, which this agent never asked for: it has a token")
            return False
        try:
            until = self._renewal.keep(certificate)
        except (NotKept, OSError) as error:
            log.error("The certificate was not renewed: %s", error)
            return False
        log.info("The certificate was renewed; the new one holds until %s", f"{until:%Y-%m-%d}")
        self._turned_away = 0
        return True

    def _warn(self, setting: str, text: str) -> None:
        """Once, until it is over."""
        if text and text != self._warned.get(setting):
            log.warning("%s %s", setting, text)
        self._warned[setting] = text

"""What the agent shows to a control plane and whom it trusts, read anew at each connection; its warnings come once."""

from __future__ import annotations

import logging
import ssl

from agent import join_token, tls
from agent.config import AgentSettings

log = logging.getLogger(__name__)


class Unusable(Exception):
    """A file does not hold what it should. `str()` is the whole sentence but for its full stop."""


class Credentials:
    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._warned: dict[str, str] = {}

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
        try:
            context, warning = tls.context(self._settings)
        except tls.TlsError as error:
            raise Unusable(str(error)) from None
        self._warn("key_file", warning)
        return context

    def _warn(self, setting: str, text: str) -> None:
        """Once, until it is over."""
        if text and text != self._warned.get(setting):
            log.warning("%s %s", setting, text)
        self._warned[setting] = text

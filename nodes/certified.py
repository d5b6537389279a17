"""Uvicorn's websocket that tells the application whose client certificate the connection came with (ASGI's TLS
extension). Serve with `ws="nodes.certified:CertifiedStream"` and TLS that demands certificates.
"""

from __future__ import annotations

import ssl

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol


class CertifiedStream(WebSocketsSansIOProtocol):
    async def run_asgi(self) -> None:
        tls = self.transport.get_extra_info("ssl_object")
        encoded = tls.getpeercert(binary_form=True) if tls is not None else None
        if encoded is not None:  # and so it was verified: TLS asks for none that it does not verify
            extensions = {**self.scope.get("extensions", {}), "tls": {"client_cert_chain": [_pem(encoded)]}}
            self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        await super().run_asgi()


def _pem(encoded: bytes) -> str:
    return ssl.DER_cert_to_PEM_cert(encoded)

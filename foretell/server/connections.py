"""Connections that say nothing: each is closed after a while, so that idle ones cannot take all the room."""

from __future__ import annotations

from asyncio import Transport
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def impatient(seconds: float) -> type[Any]:
    """A protocol that closes a connection on which no request comes for so long, or twice that at most."""

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: Transport) -> None:
            super().connection_made(transport)
            self.loop.call_later(seconds, self._look, self)

        def _look(self, before: object) -> None:
            """`before` is the request that was last seen at the look before."""
            resting = self.cycle is None or self.cycle.response_complete
            if self.transport.is_closing():
                return
            if resting and before in (self.cycle, self):
                self.transport.close()
            else:
                self.loop.call_later(seconds, self._look, self.cycle)

    return Impatient

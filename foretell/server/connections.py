"""Connections on which nothing happens: each is closed after a while, so that they cannot take all the room."""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def impatient(seconds: float, longest: float) -> type[Any]:
    """A protocol that closes a connection on which no request comes for so long, or twice that at most; on which an
    answer is not read for so long; or on which one takes `longest` from its request to its last byte."""

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: Transport) -> None:
            super().connection_made(transport)
            self._seen, self._since = None, self.loop.time()  # the request that was seen last, and when first
            self._looking = self.loop.call_later(seconds, self._look)
            self._unread: TimerHandle | None = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._looking.cancel()
            self.resume_writing()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            """More is written than the other side takes."""
            super().pause_writing()
            self._unread = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def _look(self) -> None:
            """One that is being closed is still there where its last words are not read."""
            resting = self.cycle is None or self.cycle.response_complete
            if self.cycle is not self._seen:
                self._seen, self._since = self.cycle, self.loop.time()
            elif self.transport.is_closing() or (not resting and self.loop.time() - self._since > longest):
                self.transport.abort()
                return
            elif resting:
                self.transport.close()
            self._looking = self.loop.call_later(seconds, self._look)

    return Impatient

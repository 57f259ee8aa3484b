"""Connections on which nothing happens: each is closed after a while, so that they cannot take all the room."""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

CONNECTION = "foretell_connection"  # among a request's state


def connection_of(scope: Scope) -> Any | None:
    """The connection a request came by, where parts of its answer can be written to it directly: it is one of ours, and
    they go in chunks."""
    return scope.get("state", {}).get(CONNECTION) if scope["http_version"] == "1.1" else None


def impatient(seconds: float, longest: float) -> type[Any]:
    """A protocol that closes a connection on which no request comes for so long, or twice that at most; on which an
    answer is not read for so long; or on which one takes `longest` from its request to its last byte."""

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.app_state = {**self.app_state, CONNECTION: self}

        def connection_made(self, transport: Transport) -> None:
            super().connection_made(transport)
            self._seen, self._since = None, self.loop.time()  # the request that was seen last, and when first
            self._looking = self.loop.call_later(seconds, self._look)
            self._unread: TimerHandle | None = None  # set while it is not read as fast as it is written

        def connection_lost(self, exc: Exception | None) -> None:
            self._looking.cancel()
            self.app_state = {}
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
                self._unread = None

        def has_room(self) -> bool:
            """Whether more of an answer can be written without waiting."""
            return self._unread is None and not self.transport.is_closing()

        def write(self, part: bytes) -> None:
            """A part of the answer that is on its way, past all that stands between; it is a tenth of the work."""
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

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

"""Connections on which nothing happens: each is closed after a while, so that they cannot take all the room."""

from __future__ import annotations

from asyncio import Transport
from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTION = "foretell_connection"  # among a request's state


class DirectConnection(Protocol):
    """A connection to which parts of the answer that is on its way can be written, past all that stands between."""

    def has_room(self) -> bool:
        """Whether it need not be waited for."""

    def write(self, part: bytes) -> None:
        """Send a part."""


def direct(scope: Scope) -> DirectConnection | None:
    """The connection a request came by, where it is one of ours and answers go in chunks."""
    return scope.get("state", {}).get(CONNECTION) if scope["http_version"] == "1.1" else None


def impatient(seconds: float, longest: float) -> type[Any]:
    """Return a protocol that closes a connection on which no request arrives for `seconds`, or twice that at most; of
    whose answer the client has read nothing for as long; or on which one takes `longest` from its request to its last
    byte."""

    class Impatient(H11Protocol):  # the same parser whether or not httptools is installed
        def __init__(self, app_state: dict[str, Any], **settings: Any) -> None:
            super().__init__(app_state={**app_state, CONNECTION: self}, **settings)

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's own
            super().connection_made(transport)
            self._seen: RequestResponseCycle | None = None  # the last request
            self._since = self.loop.time()  # when it was first seen
            self._looking = self.loop.call_later(seconds, self._look)
            self._paused = False  # while the write buffer is full
            self._unsent: int | None = None  # bytes in the write buffer at the last poll, where nothing adds to it

        def connection_lost(self, exc: Exception | None) -> None:
            self._looking.cancel()
            self.app_state: dict[str, Any] = {}  # or it would hold itself
            self.resume_writing()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._paused = True

        def resume_writing(self) -> None:
            super().resume_writing()
            self._paused, self._unsent = False, None

        def has_room(self) -> bool:
            """Whether what was written before is on its way."""
            return not self._paused and not self.transport.is_closing()

        def write(self, part: bytes) -> None:
            """As a chunk, which is all that the others would make of it."""
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

        def _look(self) -> None:
            """Poll the connection, and close or abort it where nothing moves."""
            complete = self.cycle is None or self.cycle.response_complete
            unsent = self.transport.get_write_buffer_size()
            idle = complete and not unsent
            if self.cycle is not self._seen:
                self._seen, self._since, self._unsent = self.cycle, self.loop.time(), None
            elif self._stalled(unsent) or (not idle and self.loop.time() - self._since > longest):
                self.transport.abort()
                return
            elif idle:
                self.transport.close()
            only_falls = complete or self._paused or self.transport.is_closing()
            self._unsent = unsent if only_falls else None
            self._looking = self.loop.call_later(seconds, self._look)

        def _stalled(self, unsent: int) -> bool:
            return self._unsent is not None and unsent >= self._unsent and (unsent > 0 or self.transport.is_closing())

    return Impatient

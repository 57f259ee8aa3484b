"""Connections on which nothing happens: each is closed after a while, so that they cannot take all the room."""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

CONNECTION = "foretell_connection"  # among a request's state


class Direct(Protocol):
    """A connection to which parts of the answer that is on its way can be written, past all that stands between."""

    def has_room(self) -> bool:
        """Whether it need not be waited for."""

    def write(self, part: bytes) -> None:
        """Send a part."""


def direct(scope: Scope) -> Direct | None:
    """The connection a request came by, where it is one of ours and answers go in chunks."""
    return scope.get("state", {}).get(CONNECTION) if scope["http_version"] == "1.1" else None


def impatient(seconds: float, longest: float) -> type[Any]:
    """A protocol that closes a connection on which no request comes for so long, or twice that at most; on which an
    answer is not read for so long; or on which one takes `longest` from its request to its last byte."""

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        def __init__(self, app_state: dict[str, Any], **settings: Any) -> None:
            super().__init__(app_state={**app_state, CONNECTION: self}, **settings)

        def connection_made(self, transport: Transport) -> None:
            super().connection_made(transport)
            self._seen, self._since = None, self.loop.time()  # the request that was seen last, and when first
            self._looking = self.loop.call_later(seconds, self._look)
            self._unread: TimerHandle | None = None  # set while it is not read as fast as it is written

        def connection_lost(self, exc: Exception | None) -> None:
            self._looking.cancel()
            self.app_state: dict[str, Any] = {}  # or it would hold itself
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
            """Whether what was written before is on its way."""
            return self._unread is None and not self.transport.is_closing()

        def write(self, part: bytes) -> None:
            """As a chunk, which is all that the others would make of it."""
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

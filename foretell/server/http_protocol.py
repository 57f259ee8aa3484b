"""An HTTP/1.1 protocol for uvicorn that closes idle and stalled connections, and lets events be written directly."""

from __future__ import annotations

from asyncio import Transport
from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTION_KEY = "foretell_connection"  # key of the connection in the request's state


class DirectConnection(Protocol):
    """A connection that accepts parts of the current response without going through the ASGI application."""

    def can_write(self) -> bool:
        """Return whether the write buffer has space."""

    def write(self, part: bytes) -> None:
        """Send a part of the response body."""


def direct_connection(scope: Scope) -> DirectConnection | None:
    """Return the connection of a request if it is a `timeout_protocol` one with chunked transfer encoding."""
    return scope.get("state", {}).get(CONNECTION_KEY) if scope["http_version"] == "1.1" else None


def timeout_protocol(idle_timeout: float, max_seconds: float) -> type[Any]:
    """Return a protocol class that closes connections without progress.

    A connection is closed if no request arrives within `idle_timeout` seconds (twice that at most), if the client has
    read nothing of its response for as long, or if a request takes more than `max_seconds` up to its last byte.
    """

    class TimeoutProtocol(H11Protocol):  # h11 whether or not httptools is installed
        def __init__(self, app_state: dict[str, Any], **settings: Any) -> None:
            super().__init__(app_state={**app_state, CONNECTION_KEY: self}, **settings)

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's own
            super().connection_made(transport)
            self._last_cycle: RequestResponseCycle | None = None
            self._cycle_seen = self.loop.time()  # time of the first poll that saw `_last_cycle`
            self._poll_timer = self.loop.call_later(idle_timeout, self._poll)
            self._paused = False  # whether the write buffer is full
            self._unsent: int | None = None  # bytes in the write buffer at the last poll; None if more may be added

        def connection_lost(self, exc: Exception | None) -> None:
            self._poll_timer.cancel()
            self.app_state: dict[str, Any] = {}  # breaks the reference cycle with itself
            self.resume_writing()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._paused = True

        def resume_writing(self) -> None:
            super().resume_writing()
            self._paused, self._unsent = False, None

        def can_write(self) -> bool:
            """Return whether the write buffer has space and the connection is open."""
            return not self._paused and not self.transport.is_closing()

        def write(self, part: bytes) -> None:
            """Write one HTTP chunk, byte for byte as uvicorn would."""
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

        def _poll(self) -> None:
            """Close the connection if it is idle; abort it if it is stalled or has run too long."""
            complete = self.cycle is None or self.cycle.response_complete
            unsent = self.transport.get_write_buffer_size()
            idle = complete and not unsent
            if self.cycle is not self._last_cycle:
                self._last_cycle, self._cycle_seen, self._unsent = self.cycle, self.loop.time(), None
            elif self._stalled(unsent) or (not idle and self.loop.time() - self._cycle_seen > max_seconds):
                self.transport.abort()
                return
            elif idle:
                self.transport.close()
            only_shrinks = complete or self._paused or self.transport.is_closing()
            self._unsent = unsent if only_shrinks else None
            self._poll_timer = self.loop.call_later(idle_timeout, self._poll)

        def _stalled(self, unsent: int) -> bool:
            return self._unsent is not None and unsent >= self._unsent and (unsent > 0 or self.transport.is_closing())

    return TimeoutProtocol

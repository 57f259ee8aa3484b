"""What goes to a replica and what comes back from it: an HTTP request and the beginning of its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Call:
    """One HTTP request, whole. `marks` are the hashes of its prompt's prefixes, `avoid` the replicas to try last;
    `target`: the replica that should answer, while it runs."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    client: tuple[str, int] | None = None
    marks: tuple[bytes, ...] = ()
    avoid: tuple[str, ...] = ()
    target: str | None = None

    def avoiding(self, replica: str) -> Call:
        """The same, for another replica if there is one."""
        return self if replica in self.avoid else replace(self, avoid=(*self.avoid, replica))


@dataclass(frozen=True)
class ResponseHead:
    """The beginning of an answer: who answers, the status, and the first of the body. `more`: bytes follow."""

    replica: str
    status: int
    headers: Headers
    body: bytes
    more: bool

"""The stored responses of /v1/responses: in memory, bounded in bytes, separate for each API key."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from foretell.errors import RequestError
from foretell.server.errors import ApiError
from foretell.server.openai_responses.input_items import Message

ENTRY_BYTES = 512  # of a stored response besides its JSON


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to and including it, each as JSON."""

    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages) + ENTRY_BYTES


class ResponseStore:
    """Keeps the responses that were used last, up to a number of bytes.

    A conversation beyond `max_conversation_bytes` is not kept: each request that continues it parses all of it, and
    items that the chat template leaves out would let it grow without reaching the context's end.
    """

    def __init__(self, max_bytes: int, max_conversation_bytes: int) -> None:
        self.max_bytes, self.max_conversation_bytes, self.num_bytes = max_bytes, max_conversation_bytes, 0
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def enabled(self) -> bool:
        return self.max_bytes > 0

    def put(self, owner: str, response: dict[str, Any], messages: list[Message]) -> None:
        """Store a response of `owner` and its conversation; drop the least recently used ones beyond the limit."""
        if not self.enabled:
            return
        entry = StoredResponse(json.dumps(response).encode(), json.dumps(messages).encode())
        if len(entry.messages) > self.max_conversation_bytes:
            return
        self._stored[owner, response["id"]] = entry
        self.num_bytes += entry.size
        while self.num_bytes > self.max_bytes:
            _, dropped = self._stored.popitem(last=False)
            self.num_bytes -= dropped.size

    def response(self, owner: str, response_id: str) -> dict[str, Any]:
        """Return the body of a response that this owner stored."""
        found: dict[str, Any] = json.loads(self._get(owner, response_id).response)
        return found

    def messages(self, owner: str, response_id: str | None) -> list[Message]:
        """Return the conversation up to a stored response; empty for None."""
        if response_id is None:
            return []
        if not self.enabled:
            raise RequestError("previous_response_id", "this server stores no responses; send the whole input")
        found: list[Message] = json.loads(self._get(owner, response_id, "previous_response_id").messages)
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Remove a response that this owner stored, and count its bytes as free."""
        self.num_bytes -= self._get(owner, response_id).size
        del self._stored[owner, response_id]

    def _get(self, owner: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """Return an entry and mark it as used; those of other owners do not exist."""
        entry = self._stored.get((owner, response_id))
        if entry is None:
            message = f"{param}: there is no such stored response; it may have been dropped, send the whole input"
            raise ApiError(404, message, param=param, code="previous_response_not_found")
        self._stored.move_to_end((owner, response_id))
        return entry

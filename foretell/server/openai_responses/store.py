"""The stored responses of /v1/responses: in memory, bounded in bytes, separate for each API key."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from foretell.errors import RequestError
from foretell.server.errors import ApiError
from foretell.server.json_body import parsed_bytes
from foretell.server.openai_responses.input_items import Message

LOG = logging.getLogger("foretell")
ENTRY_BYTES = 512  # of a stored response besides its JSON

Key = tuple[str, str]  # owner and id of a response


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to and including it, each as JSON."""

    response: bytes
    conversation: bytes  # a list of chat messages
    parsed_bytes: int  # upper bound on the memory of the parsed conversation

    @classmethod
    def encode(
        cls, response: dict[str, Any], earlier: StoredResponse | None, messages: list[Message]
    ) -> StoredResponse:
        """Return an entry whose conversation is the `earlier` one, which is not parsed for it, and these messages."""
        conversation = json.dumps(messages).encode()
        if earlier is not None:
            conversation = b", ".join(filter(None, (earlier.conversation[1:-1], conversation[1:-1])))
            conversation = b"[%b]" % conversation
        return cls(json.dumps(response).encode(), conversation, parsed_bytes(conversation))

    def messages(self) -> list[Message]:
        """Parse the conversation."""
        found: list[Message] = json.loads(self.conversation)
        return found

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation) + ENTRY_BYTES

    @property
    def held_bytes(self) -> int:
        """Return the memory of a request that continues the conversation: it holds it as JSON and parsed."""
        return len(self.conversation) + self.parsed_bytes


class ResponseStore:
    """Keeps the responses that were used last, up to a number of bytes.

    A conversation beyond `max_conversation_bytes` is not kept: each request that continues it parses all of it, and
    items that the chat template leaves out would let it grow without reaching the context's end.
    """

    def __init__(self, max_bytes: int, max_conversation_bytes: int) -> None:
        self.max_bytes, self.max_conversation_bytes, self.num_bytes = max_bytes, max_conversation_bytes, 0
        self._stored: OrderedDict[Key, StoredResponse] = OrderedDict()
        self._pending: dict[Key, asyncio.Task[None]] = {}  # responses that are being encoded

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def enabled(self) -> bool:
        return self.max_bytes > 0

    def put(self, owner: str, response_id: str, entry: StoredResponse) -> None:
        """Store a response of `owner`; drop the least recently used ones beyond the limit."""
        if not self.enabled or len(entry.conversation) > self.max_conversation_bytes:
            return
        self._stored[owner, response_id] = entry
        self.num_bytes += entry.size
        while self.num_bytes > self.max_bytes:
            _, dropped = self._stored.popitem(last=False)
            self.num_bytes -= dropped.size

    def put_later(
        self, owner: str, response_id: str, encode: Callable[[], Awaitable[StoredResponse]]
    ) -> asyncio.Task[None]:
        """Store what `encode` returns. A request for the response waits until then."""
        key = owner, response_id

        async def store() -> None:
            try:
                self.put(*key, await encode())
            except Exception:  # the response itself is complete
                LOG.exception("a response could not be stored")
            finally:
                del self._pending[key]

        task = self._pending[key] = asyncio.ensure_future(store())
        return task

    async def get(self, owner: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """Return an entry and mark it as used; those of other owners do not exist."""
        if (owner, response_id) in self._pending:
            await asyncio.wait({self._pending[owner, response_id]})
        return self._get(owner, response_id, param)

    async def conversation(self, owner: str, response_id: str | None) -> StoredResponse | None:
        """Return the entry that a request continues; None if it continues none."""
        if response_id is None:
            return None
        if not self.enabled:
            raise RequestError("previous_response_id", "this server stores no responses; send the whole input")
        return await self.get(owner, response_id, "previous_response_id")

    async def delete(self, owner: str, response_id: str) -> None:
        """Remove a stored response."""
        self.num_bytes -= (await self.get(owner, response_id)).size
        del self._stored[owner, response_id]

    def _get(self, owner: str, response_id: str, param: str) -> StoredResponse:
        entry = self._stored.get((owner, response_id))
        if entry is None:
            message = f"{param}: there is no such stored response; it may have been dropped, send the whole input"
            raise ApiError(404, message, param=param, code="previous_response_not_found")
        self._stored.move_to_end((owner, response_id))
        return entry

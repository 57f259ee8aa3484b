"""Prefix-aware routing: hashes of a prompt's prefixes, and which replica has them in its prefix cache."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_HASHES = 100_000  # prefixes remembered, about 25 MB; the least recently used are dropped
MAX_HOLDERS = 3  # replicas remembered per prefix; a system prompt is cached by many
HASH_STEP = 64  # characters between two hashed prefixes, about one KV page; the distance grows along the prompt
HASH_GROWTH = 16  # the next prefix is at least 1/16 longer, so that a long prompt has 100 to 200 hashes
HASH_BYTES = 12
GENERATION_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/api/chat",
    "/api/generate",
    "/completion",
    "/infill",
)
# Varies between requests; the replica leaves it out of the prompt, too.
BILLING_LINE = re.compile(r'x-anthropic-billing-header:[^"\\]*')
FIRST_FIELDS = ("tools", "chat_template_kwargs", "system", "instructions")  # what chat templates write first


def prefix_hashes(path: str, api_key: str, body: bytes) -> tuple[bytes, ...]:
    """Return the hashes of a request's prompt prefixes, shortest first; empty if it generates nothing or is invalid.

    API key and cache salt are part of the hash: requests that differ in them share no prefix cache.
    """
    if path not in GENERATION_PATHS:
        return ()
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return ()
        text = _infill_text(request) if path == "/infill" else _prompt_text(request)
        return tuple(_hash_prefixes(f"{api_key}\0{request.get('cache_salt') or ''}", text))
    except (ValueError, RecursionError):
        return ()  # the replica reports what is wrong with it


def _hash_prefixes(tenant: str, text: str) -> Iterator[bytes]:
    digest = hashlib.sha256(tenant.encode(errors="surrogatepass"))
    start, end = 0, HASH_STEP
    while end <= len(text):
        digest.update(text[start:end].encode(errors="surrogatepass"))
        yield digest.digest()[:HASH_BYTES]
        start, end = end, end + max(HASH_STEP, end // HASH_GROWTH)


def _prompt_text(request: dict[str, Any]) -> str:
    """Return the parts of the prompt in the order in which chat templates write them."""
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, str):
        messages = [messages]
    if not isinstance(messages, list):
        return _first_prompt(request.get("prompt"))
    first = [request.get(name) for name in FIRST_FIELDS if request.get(name)]
    return BILLING_LINE.sub("", "".join(json.dumps(part, sort_keys=True) for part in [*first, *messages]))


def _infill_text(request: dict[str, Any]) -> str:
    """Return the other files and the text before the gap, in the order of most models' prompts."""
    files, before = request.get("input_extra"), (request.get("input_prefix"), request.get("prompt"))
    parts = json.dumps(files, sort_keys=True) if isinstance(files, list) and files else ""
    return parts + "".join(text for text in before if isinstance(text, str))


def _first_prompt(prompt: Any) -> str:
    """Return the first of several prompts as text; the parts of one, token ids and strings, are joined."""
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) and not _has_numbers(prompt):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    return " ".join(str(part) for part in prompt) if isinstance(prompt, list) else ""


def _has_numbers(prompt: list[Any]) -> bool:
    return any(isinstance(part, int) for part in prompt)


class PrefixAffinity:
    """Remembers which replicas have prefilled which prefixes. A replica that has evicted one prefills it again."""

    def __init__(self, routing: str = "prefix", slack: int = 4, max_hashes: int = MAX_HASHES, seed: int = 0) -> None:
        """`slack`: how many more requests than the least loaded a replica may have and still be preferred."""
        self.routing, self.slack, self.max_hashes = routing, slack, max_hashes
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._last_used: dict[str, int] = {}  # per replica, the number of its last request: round-robin among equals
        self._num_requests = 0
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._holders)

    def rank(self, hashes: Sequence[bytes], loads: Mapping[str, int], avoid: Sequence[str] = ()) -> list[str]:
        """Return the replicas of `loads`, the best one for these prefixes first; those to `avoid` last."""
        names = sorted(loads, key=lambda name: (name in avoid, loads[name], self._last_used.get(name, 0)))
        if self.routing == "random":
            self._random.shuffle(names)
            names.sort(key=lambda name: name in avoid)
        if self.routing == "prefix":
            holder = self._holder(hashes, loads, avoid)
            names.sort(key=lambda name: name != holder)
        return names

    def _holder(self, hashes: Sequence[bytes], loads: Mapping[str, int], avoid: Sequence[str]) -> str | None:
        """Return the replica with the longest cached prefix whose load is within the slack."""
        limit = min(loads.values(), default=0) + self.slack
        for prefix_hash in reversed(hashes):
            holders = self._holders.get(prefix_hash, ())
            available = [name for name in holders if loads.get(name, limit + 1) <= limit and name not in avoid]
            if available:
                return min(available, key=lambda name: loads[name])
        return None

    def remember(self, hashes: Sequence[bytes], name: str) -> None:
        """Record that a request with these prefixes was routed to replica `name`."""
        self._num_requests += 1
        self._last_used[name] = self._num_requests
        if self.routing != "prefix":
            return
        for prefix_hash in hashes:
            others = [holder for holder in self._holders.pop(prefix_hash, ()) if holder != name]
            self._holders[prefix_hash] = (name, *others)[:MAX_HOLDERS]
        while len(self._holders) > self.max_hashes:
            self._holders.popitem(last=False)

    def keep_only(self, names: Sequence[str]) -> None:
        """Forget the use of other replicas. Their prefixes are dropped as they become least recently used."""
        self._last_used = {name: number for name, number in self._last_used.items() if name in names}

"""Which replica has read how a prompt begins, and whether it is worth going there."""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_HASHES = 100_000  # about 25 MB; the ones unused for longest are forgotten
MAX_HOLDERS = 3  # replicas kept for one beginning, such as an instruction that all conversations share


class PrefixAffinity:
    """Remembers where beginnings were read. It may be wrong: a replica that has forgotten reads again."""

    def __init__(self, routing: str = "prefix", slack: int = 4, most: int = MAX_HASHES, seed: int = 0) -> None:
        """`slack`: requests by which a replica may be busier than the least loaded and still be gone to."""
        self.routing, self.slack, self.most = routing, slack, most
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._turns: dict[str, int] = {}  # when each was last gone to, so that equals take turns
        self._turn = 0
        self._dice = random.Random(seed)

    def __len__(self) -> int:
        return len(self._holders)

    def rank(self, marks: Sequence[bytes], loads: Mapping[str, int], avoid: Sequence[str] = ()) -> list[str]:
        """The replicas of `loads`, the one to go to first; those to `avoid` come last."""
        names = sorted(loads, key=lambda name: (name in avoid, loads[name], self._turns.get(name, 0)))
        if self.routing == "random":
            self._dice.shuffle(names)
            names.sort(key=lambda name: name in avoid)
        if self.routing == "prefix":
            reader = self._reader(marks, loads, avoid)
            names.sort(key=lambda name: name != reader)
        return names

    def _reader(self, marks: Sequence[bytes], loads: Mapping[str, int], avoid: Sequence[str]) -> str | None:
        """Who has read most of the prompt and is not much busier than the others."""
        limit = min(loads.values(), default=0) + self.slack
        for mark in reversed(marks):
            able = [n for n in self._holders.get(mark, ()) if loads.get(n, limit + 1) <= limit and n not in avoid]
            if able:
                return min(able, key=lambda name: loads[name])
        return None

    def remember(self, marks: Sequence[bytes], name: str) -> None:
        """A request with these marks went to `name`."""
        self._turn += 1
        self._turns[name] = self._turn
        if self.routing != "prefix":
            return
        for mark in marks:
            others = [each for each in self._holders.pop(mark, ()) if each != name]
            self._holders[mark] = (name, *others)[:MAX_HOLDERS]
        while len(self._holders) > self.most:
            self._holders.popitem(last=False)

    def keep_only(self, names: Sequence[str]) -> None:
        """Others have gone; what is known of their marks fades by itself."""
        self._turns = {name: turn for name, turn in self._turns.items() if name in names}


STEP = 64  # characters between two marks, about a page of the cache; further in they lie further apart
GROWTH = 16  # the next mark is at least a sixteenth of the way further, so that a long prompt has a hundred or two
SIZE = 12  # bytes of a mark
WRITING = ("/v1/chat/completions", "/v1/completions")


def prefix_hashes(path: str, key: str, body: bytes) -> tuple[bytes, ...]:
    """The marks of a request, the shortest beginning first; none where it writes nothing or cannot be read.

    Callers with another key or salt share no cache, and so no marks.
    """
    if path not in WRITING:
        return ()
    try:
        asked = json.loads(body)
        if not isinstance(asked, dict):
            return ()
        return tuple(_marks(f"{key}\0{asked.get('cache_salt') or ''}", _text(asked)))
    except (ValueError, RecursionError):
        return ()  # the replica reports what is wrong with it


def _marks(tenant: str, text: str) -> Iterator[bytes]:
    digest = hashlib.sha256(tenant.encode(errors="surrogatepass"))
    begin, end = 0, STEP
    while end <= len(text):
        digest.update(text[begin:end].encode(errors="surrogatepass"))
        yield digest.digest()[:SIZE]
        begin, end = end, end + max(STEP, end // GROWTH)


def _text(asked: dict[str, Any]) -> str:
    """What the prompt is made of, in the order in which templates write it."""
    messages = asked.get("messages")
    if not isinstance(messages, list):
        return _prompt(asked.get("prompt"))
    before = [asked.get(name) for name in ("tools", "chat_template_kwargs") if asked.get(name)]
    return "".join(json.dumps(part, sort_keys=True) for part in [*before, *messages])


def _prompt(prompt: Any) -> str:
    """Of several prompts the first decides."""
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    return " ".join(str(token) for token in prompt) if isinstance(prompt, list) else ""

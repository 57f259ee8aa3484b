"""Others who write the same prompts: any server with OpenAI's API, by its address."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from foretell.errors import RequestError

from .clients import FAILURES, GARBLED, SILENT, Address, Answer, ask, look
from .prompt import BenchPrompt

SAMPLE = re.compile(r"^([a-z_]+:)?(?P<name>[a-z0-9_]+)(\{[^}]*\})? (?P<value>\S+)$", re.M)
SALTED: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
    # Without it a second round finds its prompts in a cache; each server has a field of its own for that.
    "foretell": lambda salt: {"cache_salt": salt},
    "vllm": lambda salt: {"cache_salt": salt},
    "sglang": lambda salt: {"cache_salt": salt},
    "llamacpp": lambda salt: {"cache_prompt": False},
}

SHORTEST = 8  # tokens
TELLS = ("foretell", "llamacpp")  # their answers tell of guesses


@dataclass(frozen=True)
class Reply:
    """What a peer wrote. `steps` are forwards of its target, where it tells; times are seconds since it was asked."""

    text: str
    tokens: int
    first: float | None
    last: float
    steps: float | None = None
    error: str | None = None

    @property
    def a_token(self) -> float | None:
        """Seconds for a token behind the first words; a text of a few tokens tells nothing of speed."""
        if self.error is not None or self.first is None or self.tokens < SHORTEST or self.last <= self.first:
            return None
        return (self.last - self.first) / (self.tokens - 1)


@dataclass(frozen=True)
class Asked:
    """How an item is asked: the most tokens, and how they are drawn."""

    max_tokens: int
    temperature: float


class Peer(Protocol):
    """Someone who writes."""

    name: str

    def write(self, item: BenchPrompt, asked: Asked) -> Reply:
        """A text and when its words came; whatever goes wrong is a reply too."""

    def describe(self) -> dict[str, Any]:
        """Who that is, for whoever measures it again."""


@dataclass
class Endpoint:
    """A server with OpenAI's API. `extra` goes into every request; `kind` is who it says has made it."""

    name: str
    address: Address
    extra: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    kind: str = ""
    counts: bool = False  # whether its metrics tell of guesses, and its answers do not

    @classmethod
    def named(cls, text: str, key: str | None = None) -> Endpoint:
        """Of [NAME=]URL; what stands behind a ? are fields of the request: ours=http://host:8000?speculative=false."""
        name, equals, url = text.partition("=")
        if not equals or re.search("[/?]", name):  # that one belongs to the address
            name, url = "", text
        url, _, query = url.partition("?")
        address = Address.parse(url, key)
        return cls(name or f"{address.host}:{address.port}", address, _fields(query))

    def meet(self) -> None:
        """Learn its model and kind; one who is not there is told before anything is measured."""
        where = f"{self.address.host}:{self.address.port}"
        try:
            status, body = asyncio.run(look(self.address, "/v1/models"))
        except SILENT:
            raise RequestError("peers", f"nobody answers at {where}; start the server, or mend the address") from None
        except GARBLED:
            raise RequestError("peers", f"{where} does not speak HTTP; name a server with OpenAI's API") from None
        if status in (401, 403):
            raise RequestError("peers", f"{where} answers {status}; --api-key gives the key it wants")
        try:
            card = json.loads(body)["data"][0] if status == 200 else {}
            self.model = str(card["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            words = f"{where} has no /v1/models (it answers {status}); name a server with OpenAI's API that is ready"
            raise RequestError("peers", words) from None
        self.kind = str(card.get("owned_by", ""))
        self.counts = self.kind not in TELLS and self._accepted() is not None

    def write(self, item: BenchPrompt, asked: Asked) -> Reply:
        before = self._accepted() if self.counts else None
        answer = asyncio.run(ask(self.address, self.body(item, asked)))
        steps = steps_told(answer) if answer.error is None else None
        if steps is None and before is not None and (after := self._accepted()) is not None:
            steps = answer.tokens - (after - before)
        return Reply(answer.text, answer.tokens, answer.first, answer.last, steps, answer.error or _fault(answer))

    def describe(self) -> dict[str, Any]:
        where = f"{self.address.host}:{self.address.port}"
        return {"address": where, "kind": self.kind, "model": Path(self.model).name, **self.extra}

    def body(self, item: BenchPrompt, asked: Asked) -> dict[str, Any]:
        """The request; its cache is nobody else's."""
        salted = SALTED.get(self.kind)
        return {
            "seed": zlib.crc32(item.id.encode()),
            **item.request,
            "model": self.model,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(salted(secrets.token_hex(8)) if salted else {}),
            **self.extra,
        }

    def _accepted(self) -> float | None:
        """Guesses that stood since the server started, where its metrics tell."""
        try:
            status, body = asyncio.run(look(self.address, "/metrics"))
        except FAILURES:
            return None
        return accepted_guesses(body.decode("utf-8", "replace")) if status == 200 else None


def _fields(query: str) -> dict[str, Any]:
    """Fields of a request: JSON where it is, else text."""
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _fault(answer: Answer) -> str | None:
    """A text without a count of tokens cannot be timed."""
    return "it does not tell how many tokens it wrote" if answer.text and not answer.tokens else None


def steps_told(answer: Answer) -> float | None:
    """Forwards of the target, from what an answer tells of guesses: each gives a token of its own beside them."""
    timings = answer.told.get("timings") or {}
    if "draft_n_accepted" in timings:
        return float(timings["predicted_n"] - timings["draft_n_accepted"])
    if "predicted_n" in timings:  # llama.cpp tells of guesses only where there were some
        return float(timings["predicted_n"])
    return None


def accepted_guesses(metrics: str) -> float | None:
    """vLLM's counter by whatever prefix it has; None where there is no such counter."""
    found = [
        float(each["value"])
        for each in SAMPLE.finditer(metrics)
        if each["name"] == "spec_decode_num_accepted_tokens_total"
    ]
    return sum(found) if found else None


def check_names(peers: list[Peer]) -> None:
    """Results are kept by name."""
    for one, other in itertools.combinations(peers, 2):
        if one.name == other.name:
            raise RequestError("peers", f"two are called {one.name}; write NAME=URL")

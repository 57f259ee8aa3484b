"""Others who write the same prompts: any server with OpenAI's API, by its address."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import parse_qsl

from foretell.bench.http_client import FAILURES, GARBLED, SILENT, Address, Answer, ask, look
from foretell.bench.prompt import BenchPrompt
from foretell.errors import ForetellError, RequestError

if TYPE_CHECKING:
    from foretell.build.model_source import ModelSource

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


PLAIN, LOOKUP = TRANSFORMERS = ("transformers", "transformers:lookup")
ABLE = ("temperature", "seed", "prediction")  # fields of a request that it is asked with, or whose loss changes no text
LOOKED_UP = 10  # tokens guessed each step from the prompt, as transformers' own guide has it


class Clock:
    """Hears of each token as transformers writes it."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first: float | None = None
        self.last = 0.0
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """First comes the prompt, then what is written."""
        if self._prompt_seen:
            self.last = time.perf_counter() - self.began
            self.first = self.last if self.first is None else self.first
        self._prompt_seen = True

    def end(self) -> None:
        """All was put already."""


class TransformersPeer:
    """The same weights in floats, greedy or sampled, asked with our own tokens: what others make of the tokenizer in a
    GGUF file is not always that tokenizer."""

    def __init__(self, target: ModelSource, names: Sequence[str]) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise ForetellError("transformers is not installed; install it, or leave that peer out") from None
        path = target.checkpoint.path
        where: dict[str, Any] = {"gguf_file": path.name} if target.checkpoint.kind == "gguf" else {}
        folder = path.parent if where else path
        dtype = torch.float32 if target.device.type == "cpu" else target.dtype
        self.torch, self.tokenizer, self.ends = torch, target.tokenizer, sorted(target.tokenizer.end_ids)
        self.model = cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where))
        self.model.to(target.device).eval()
        self.steps = 0
        self.model.register_forward_hook(self._count)
        self.peers = [_Way(self, name, name == LOOKUP) for name in names]

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def describe(self) -> dict[str, Any]:
        import transformers

        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"kind": f"transformers {transformers.__version__}", "dtype": dtype}

    def encode(self, item: BenchPrompt) -> list[int]:
        if item.text is not None:
            return self.tokenizer.encode(item.text)
        return self.tokenizer.encode_chat(item.messages)

    def write(self, item: BenchPrompt, asked: Asked, lookup: bool) -> Reply:
        """One text; transformers' own warnings and faults are a reply too."""
        if unable := [name for name in item.fields if name not in ABLE]:
            return Reply("", 0, None, 0.0, error=f"transformers is not asked with {', '.join(unable)} here")
        ids = self.torch.tensor([self.encode(item)], device=self.model.device)
        settings: dict[str, Any] = {"do_sample": asked.temperature > 0}
        if asked.temperature > 0:
            settings["temperature"] = asked.temperature
        if lookup:
            settings["prompt_lookup_num_tokens"] = LOOKED_UP
        clock = Clock()
        self.steps = 0
        try:
            with self.torch.inference_mode():
                found = self.model.generate(
                    ids,
                    attention_mask=self.torch.ones_like(ids),
                    max_new_tokens=asked.max_tokens,
                    eos_token_id=self.ends,
                    pad_token_id=self.ends[0],
                    streamer=clock,
                    **settings,
                )
        except Exception as error:
            return Reply("", 0, None, 0.0, error=" ".join(str(error).split())[:200] or type(error).__name__)
        new = found[0, ids.shape[1] :].tolist()
        return Reply(self.tokenizer.decode(new), len(new), clock.first, clock.last, float(self.steps))


class _Way:
    """One way to let it write: plain, or with guesses looked up in the prompt."""

    def __init__(self, model: TransformersPeer, name: str, lookup: bool) -> None:
        self.model, self.name, self.lookup = model, name, lookup

    def write(self, item: BenchPrompt, asked: Asked) -> Reply:
        return self.model.write(item, asked, self.lookup)

    def describe(self) -> dict[str, Any]:
        return self.model.describe()

"""Peers of `bench compare`: any server with the OpenAI API, and transformers in this process."""

from __future__ import annotations

import asyncio
import importlib.util
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

from foretell.errors import ForetellError, RequestError

from .http_client import FAILURES, NOT_HTTP, UNREACHABLE, Address, StreamResult, get_page, stream_request
from .prompt import BenchPrompt, RequestParams

if TYPE_CHECKING:
    from foretell.build.model_source import ModelSource

METRIC_LINE = re.compile(r"^([a-z_]+:)?(?P<name>[a-z0-9_]+)(\{[^}]*\})? (?P<value>\S+)$", re.M)
CACHE_SALTS: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
    # Fields that keep a second round from hitting the prefix cache, by server.
    "foretell": lambda salt: {"cache_salt": salt},
    "vllm": lambda salt: {"cache_salt": salt},
    "sglang": lambda salt: {"cache_salt": salt},
    "llamacpp": lambda salt: {"cache_prompt": False},
}

MIN_TOKENS = 8  # output tokens below which a reply is not timed
REPORTS_STEPS = ("foretell", "llamacpp")  # servers whose responses report accepted draft tokens


@dataclass(frozen=True)
class PeerReply:
    """A reply of a peer. `steps` are target forwards, if it reports them; times are seconds since the request."""

    text: str
    tokens: int
    first: float | None
    last: float
    steps: float | None = None
    error: str | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Return the time per token after the first; None for a failed or too short reply."""
        if self.error is not None or self.first is None or self.tokens < MIN_TOKENS or self.last <= self.first:
            return None
        return (self.last - self.first) / (self.tokens - 1)


class Peer(Protocol):
    """A system that generates outputs."""

    name: str

    def generate(self, item: BenchPrompt, params: RequestParams) -> PeerReply:
        """Return the output and its times; a failure is a reply with an error."""

    def describe(self) -> dict[str, Any]:
        """Return name and version of the peer for the record."""


@dataclass
class Endpoint:
    """A server with the OpenAI API. `extra` goes into every request; `kind` is the `owned_by` of its model."""

    name: str
    address: Address
    extra: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    kind: str = ""
    reads_metrics: bool = False  # accepted draft tokens are in its metrics only

    @classmethod
    def parse(cls, text: str, key: str | None = None) -> Endpoint:
        """Parse [NAME=]URL[?FIELD=VALUE&...]; fields go into the request: ours=http://host:8000?speculative=false."""
        name, equals, url = text.partition("=")
        if not equals or re.search("[/?]", name):  # the = belongs to the query
            name, url = "", text
        url, _, query = url.partition("?")
        address = Address.parse(url, key)
        return cls(name or f"{address.host}:{address.port}", address, _fields(query))

    def connect(self) -> None:
        """Read the model and kind of the server; raise before anything is measured if it is not reachable."""
        where = f"{self.address.host}:{self.address.port}"
        try:
            status, body = asyncio.run(get_page(self.address, "/v1/models"))
        except UNREACHABLE:
            raise RequestError("peers", f"no server at {where}; start it, or correct the address") from None
        except NOT_HTTP:
            raise RequestError("peers", f"{where} is not an HTTP server; name a server with the OpenAI API") from None
        if status in (401, 403):
            raise RequestError("peers", f"{where} returns {status}; give its key with --api-key")
        try:
            card = json.loads(body)["data"][0] if status == 200 else {}
            self.model = str(card["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            message = f"{where} has no /v1/models (it returns {status}); name a ready server with the OpenAI API"
            raise RequestError("peers", message) from None
        self.kind = str(card.get("owned_by", ""))
        self.reads_metrics = self.kind not in REPORTS_STEPS and self._accepted() is not None

    def generate(self, item: BenchPrompt, params: RequestParams) -> PeerReply:
        before = self._accepted() if self.reads_metrics else None
        result = asyncio.run(stream_request(self.address, self.body(item, params)))
        steps = target_steps(result) if result.error is None else None
        if steps is None and before is not None and (after := self._accepted()) is not None:
            steps = result.tokens - (after - before)
        return PeerReply(result.text, result.tokens, result.first, result.last, steps, result.error or _fault(result))

    def describe(self) -> dict[str, Any]:
        where = f"{self.address.host}:{self.address.port}"
        return {"address": where, "kind": self.kind, "model": Path(self.model).name, **self.extra}

    def body(self, item: BenchPrompt, params: RequestParams) -> dict[str, Any]:
        """Return the body of the request, with a cache salt of its own."""
        salted = CACHE_SALTS.get(self.kind)
        return {
            "seed": zlib.crc32(item.id.encode()),
            **item.request,
            "model": self.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(salted(secrets.token_hex(8)) if salted else {}),
            **self.extra,
        }

    def _accepted(self) -> float | None:
        """Return the draft tokens accepted since the server started; None without such a metric."""
        try:
            status, body = asyncio.run(get_page(self.address, "/metrics"))
        except FAILURES:
            return None
        return accepted_draft_tokens(body.decode("utf-8", "replace")) if status == 200 else None


def _fields(query: str) -> dict[str, Any]:
    """Parse fields of a request; values are JSON if valid, else strings."""
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _fault(result: StreamResult) -> str | None:
    """Return the error of a reply that cannot be timed because it has no token count."""
    return "it does not report its number of tokens" if result.text and not result.tokens else None


def target_steps(result: StreamResult) -> float | None:
    """Return the target steps of a response that reports accepted draft tokens; each step adds one of its own."""
    timings = result.extra.get("timings") or {}
    if "draft_n_accepted" in timings:
        return float(timings["predicted_n"] - timings["draft_n_accepted"])
    if "predicted_n" in timings:  # llama.cpp reports draft tokens only if there were any
        return float(timings["predicted_n"])
    return None


def accepted_draft_tokens(metrics: str) -> float | None:
    """Return vLLM's counter of accepted draft tokens, with any prefix; None if there is none."""
    found = [
        float(each["value"])
        for each in METRIC_LINE.finditer(metrics)
        if each["name"] == "spec_decode_num_accepted_tokens_total"
    ]
    return sum(found) if found else None


def check_names(peers: list[Peer]) -> None:
    """Raise if two peers have the same name, because results are stored by name."""
    for one, other in itertools.combinations(peers, 2):
        if one.name == other.name:
            raise RequestError("peers", f"two have the name {one.name}; write NAME=URL")


PLAIN, LOOKUP = TRANSFORMERS = ("transformers", "transformers:lookup")
SUPPORTED_FIELDS = (
    "temperature",
    "seed",
    "prediction",
)  # fields of a request that are applied, or do not change the output
LOOKUP_TOKENS = 10  # draft tokens per step, as in the guide of transformers


class TokenTimer:
    """A transformers streamer that records when tokens come."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first: float | None = None
        self.last = 0.0
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """Record the time of new tokens; the first call has the prompt."""
        if self._prompt_seen:
            self.last = time.perf_counter() - self.began
            self.first = self.last if self.first is None else self.first
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: all tokens were put."""


def check_packages(*names: str) -> None:
    """Raise if a package that the transformers peer needs is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            why = "" if name == "transformers" else ", which transformers needs to read a GGUF file,"
            raise ForetellError(f"the package {name}{why} is not installed: pip install {name}, or leave that peer out")


class TransformersPeer:
    """A peer that runs the same weights in transformers, unquantized.

    Prompts are encoded with our tokenizer, because other readers of a GGUF file do not always build the same one.
    """

    def __init__(self, target: ModelSource, names: Sequence[str]) -> None:
        path, is_gguf = target.checkpoint.path, target.checkpoint.kind == "gguf"
        check_packages("transformers", *(["accelerate"] if is_gguf else []))
        import torch
        from transformers import AutoModelForCausalLM

        where: dict[str, Any] = {"gguf_file": path.name} if is_gguf else {}
        folder = path.parent if where else path
        dtype = torch.float32 if target.device.type == "cpu" else target.dtype
        self.torch, self.tokenizer, self.ends = torch, target.tokenizer, sorted(target.tokenizer.end_ids)
        self.model = cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where))
        self.model.to(target.device).eval()
        self.steps = 0
        self.model.register_forward_hook(self._count)
        self.peers = [_TransformersVariant(self, name, name == LOOKUP) for name in names]

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

    def generate(self, item: BenchPrompt, params: RequestParams, lookup: bool) -> PeerReply:
        """Generate one output; an exception of transformers is a reply with an error."""
        if unsupported := [name for name in item.fields if name not in SUPPORTED_FIELDS]:
            return PeerReply("", 0, None, 0.0, error=f"transformers does not support {', '.join(unsupported)} here")
        ids = self.torch.tensor([self.encode(item)], device=self.model.device)
        settings: dict[str, Any] = {"do_sample": params.temperature > 0}
        if params.temperature > 0:
            settings["temperature"] = params.temperature
        if lookup:
            settings["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        clock = TokenTimer()
        self.steps = 0
        try:
            with self.torch.inference_mode():
                found = self.model.generate(
                    ids,
                    attention_mask=self.torch.ones_like(ids),
                    max_new_tokens=params.max_tokens,
                    eos_token_id=self.ends,
                    pad_token_id=self.ends[0],
                    streamer=clock,
                    **settings,
                )
        except Exception as error:
            return PeerReply("", 0, None, 0.0, error=" ".join(str(error).split())[:200] or type(error).__name__)
        new = found[0, ids.shape[1] :].tolist()
        return PeerReply(self.tokenizer.decode(new), len(new), clock.first, clock.last, float(self.steps))


class _TransformersVariant:
    """A peer that runs transformers plain or with prompt lookup decoding."""

    def __init__(self, model: TransformersPeer, name: str, lookup: bool) -> None:
        self.model, self.name, self.lookup = model, name, lookup

    def generate(self, item: BenchPrompt, params: RequestParams) -> PeerReply:
        return self.model.generate(item, params, self.lookup)

    def describe(self) -> dict[str, Any]:
        return self.model.describe()

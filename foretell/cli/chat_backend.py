"""Backends of a chat: a model in this process, or a server with OpenAI's API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from foretell.errors import ForetellError, RequestError

from .stream_output import cut_note, print_stream, printable

if TYPE_CHECKING:
    import httpx

    from foretell.llm import LLM

Messages = list[dict[str, str]]
CONNECT_SECONDS = 10.0
LIST_SECONDS = 10.0  # for the next bytes of the list of models; an answer may take as long as it needs
MIN_CHUNKS = 4  # with fewer of them, or in less time, the speed of a stream is not measured
MIN_SECONDS = 0.1
HTTP_PORT = 80
LOOPBACK = ("127.0.0.1", "::1", "localhost")
UNAUTHORIZED = 401
SSE_DATA = "data:"
SSE_DONE = "[DONE]"


class ChatBackend(Protocol):
    """Answers the messages of a chat."""

    @property
    def model(self) -> str:
        """Return the name of the model that answers."""

    def banner(self, sampling: Mapping[str, Any]) -> str:
        """Return one line about the model and how it samples."""

    def answer(self, messages: Messages, sampling: Mapping[str, Any]) -> str:
        """Print an answer as it is generated and return it; Ctrl-C ends it and keeps what there is."""


class LocalBackend:
    """A model in this process."""

    def __init__(self, llm: LLM, *, show: bool) -> None:
        if not llm.tokenizer.chat_template:
            raise RequestError("model", "has no chat template; use 'foretell generate --raw' with it")
        self.llm, self.show, self.model = llm, show, llm.config.model

    def banner(self, sampling: Mapping[str, Any]) -> str:
        drafters = ", ".join(self.llm.engine.drafter.default_drafters)
        params = self.llm.default_params(**sampling)
        changed = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        described = describe_sampling(changed) if params.temperature else "greedy"
        return f"{self.model}, drafters: {drafters or 'none'}, sampling: {described}"

    def answer(self, messages: Messages, sampling: Mapping[str, Any]) -> str:
        prompt = self.llm.tokenizer.encode_chat(messages)
        return print_stream(self.llm, prompt, self.llm.default_params(**sampling), show=self.show).text


def describe_sampling(values: Mapping[str, Any]) -> str:
    """Return sampling parameters in words, without those that change nothing."""
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if value != neutral.get(name))


@dataclass
class ServerAnswer:
    """A streamed answer of a server."""

    began: float = field(default_factory=perf_counter)
    first: float | None = None
    last: float = 0.0
    text: str = ""
    finish: str | None = None
    tokens: int = 0
    chunks: int = 0  # with text
    server_speed: float = 0.0  # tokens per second as the server reports them
    drafted: int = 0
    accepted: int = 0

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Add one chunk of the stream and return the text to print."""
        usage, timings = chunk.get("usage") or {}, chunk.get("timings") or {}
        self.tokens = usage.get("completion_tokens", self.tokens)
        self.drafted = timings.get("draft_n") or self.drafted
        self.accepted = timings.get("draft_n_accepted") or self.accepted
        if isinstance(speed := timings.get("predicted_per_second"), int | float):
            self.server_speed = speed
        choices = chunk.get("choices") or []
        if not choices:
            return ""
        delta = choices[0].get("delta") or {}
        self.finish = choices[0].get("finish_reason") or self.finish
        content = delta.get("content") or ""
        self.text += content
        shown = f"{delta.get('reasoning_content') or ''}{content}"  # the reasoning is no part of the conversation
        if shown:
            self.chunks += 1
            self.last = perf_counter()
            self.first = self.first or self.last
        return shown

    def summary(self) -> str:
        """Return one line with tokens, acceptance and, where it is known, speed."""
        first = self.first or self.began
        accepted = f" ({self.accepted} of {self.drafted} draft tokens accepted)" if self.drafted else ""
        speed = 0.0 if self.tokens == 1 else self.server_speed or self._measured_speed()
        shown = f", {speed:.1f} tokens/s" if speed else ""
        return f"{self.tokens or 'unknown'} tokens{accepted}{shown}, first token after {first - self.began:.2f} s"

    def _measured_speed(self) -> float:
        """Return the tokens per second after the first chunk, taking chunks as equally long; 0 if there are too few."""
        seconds = self.last - (self.first or self.last)
        if self.chunks < MIN_CHUNKS or seconds < MIN_SECONDS:
            return 0.0
        return self.tokens * (1 - 1 / self.chunks) / seconds


class ServerBackend:
    """A running server with OpenAI's API: foretell serve or another."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        """Without `model`, use the first one that the server lists."""
        check_url(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("api_key", "has characters that an HTTP header cannot have")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.model = model or self._first_model()

    def banner(self, sampling: Mapping[str, Any]) -> str:
        numbers = {name: value for name, value in sampling.items() if isinstance(value, int | float)}
        return f"{self.model} at {self.url}, sampling: {describe_sampling(numbers) or 'as the server is set'}"

    def answer(self, messages: Messages, sampling: Mapping[str, Any]) -> str:
        body = {"model": self.model, "messages": messages, "stream": True, **sampling}
        answer = ServerAnswer()
        try:
            for chunk in self._events(body | {"stream_options": {"include_usage": True}}):
                text = answer.add(chunk)
                print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
        except KeyboardInterrupt:  # leaving the stream has closed the connection, which ends the request
            answer.finish = "abort"
        except ForetellError:
            print(end="\n" if answer.first else "", flush=True)
            raise
        print(flush=True)
        note = cut_note(answer.finish, answer.tokens, sampling.get("max_tokens", 0))
        for line in (note, answer.summary() if answer.finish != "abort" else ""):
            if line:
                print(line, file=sys.stderr)
        return answer.text

    def _first_model(self) -> str:
        with self._open("GET", "/models", read_seconds=LIST_SECONDS) as response:
            content = response.read()
        try:
            return str(json.loads(content)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ForetellError(f"{self.url}/v1/models lists no model; name one: --model NAME") from None

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open("POST", "/chat/completions", body) as response:
            for line in response.iter_lines():
                data = line.removeprefix(SSE_DATA).strip()
                if data == SSE_DONE:
                    return
                if not line.startswith(SSE_DATA):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ForetellError(_message(event) or "the server reports an error without a message")
                yield event

    @contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, read_seconds: float | None = None
    ) -> Iterator[httpx.Response]:
        """Open a successful response, or raise the server's message."""
        import httpx

        try:
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS, read=read_seconds)
            address = f"{self.url}/v1{path}"
            with httpx.stream(method, address, json=body, headers=self._headers, timeout=timeout) as response:
                if not response.is_success:
                    raise self._refusal(response)
                yield response
        except httpx.ConnectError as error:
            raise ForetellError(f"no server answers at {self.url}{self._hint(str(error))}") from None
        except httpx.ReadTimeout:
            reason = f"the server at {self.url} accepts connections but sent nothing within {read_seconds:g} s"
            raise ForetellError(f"{reason}; is it a server with OpenAI's API?") from None
        except httpx.HTTPError as error:
            raise ForetellError(f"the server at {self.url} failed: {type(error).__name__} {error}") from None
        except ValueError:
            raise ForetellError(f"the server at {self.url} sent a stream that is not JSON") from None

    def _hint(self, cause: str) -> str:
        """Return the cause of a failed connection, or how a server of ours would be started there."""
        parts = urlsplit(self.url)
        if parts.scheme == "http" and parts.hostname in LOOPBACK:
            return f"; start one with 'foretell serve --port {parts.port or HTTP_PORT}'"
        return f": {cause}"

    def _refusal(self, response: httpx.Response) -> ForetellError:
        try:
            message = _message(json.loads(response.read()))
        except ValueError:
            message = ""
        hint = "; give its key with --api-key" if response.status_code == UNAUTHORIZED else ""
        return ForetellError(f"{message or f'HTTP {response.status_code} from {response.url}'}{hint}")


def check_url(url: str) -> None:
    """Raise for an address that cannot be one of a server."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, or too large
        is_valid = False
    if not is_valid:
        raise RequestError("url", f"{url!r} is not an address such as http://127.0.0.1:8000")


def _message(body: Any) -> str:
    """Return the message of an error in OpenAI's shape; empty if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")

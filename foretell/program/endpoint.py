"""A server elsewhere: the same programs over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from foretell.errors import ForetellError, RequestError
from foretell.structured_output import GrammarSpec
from foretell.types import SpeculationChoice

from .backend import Backend, Tell, Written
from .prompt_state import Script
from .settings import DEFAULT_MAX_TOKENS, Settings

if TYPE_CHECKING:
    import httpx


def completion_body(prompt: str | list[int], settings: Settings) -> dict[str, Any]:
    """For POST /v1/completions."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": DEFAULT_MAX_TOKENS, **settings.sampling}
    if settings.grammar is not None:
        body["structured_outputs"] = _grammar_body(settings.grammar)
    return body if settings.speculation is None else body | _speculation_body(settings.speculation)


def scoring_body(prompt: list[int], token: int) -> dict[str, Any]:
    """How likely one token is behind a prompt, which the server may have in its cache."""
    return {
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0.0,
        "allowed_token_ids": [token],
        "logprobs": 0,
        "ignore_eos": True,
        "speculative": False,
    }


def meta_of(reply: Mapping[str, Any], finish: str) -> dict[str, Any]:
    """What a reply, or the last chunk of one, tells of its text."""
    usage, timings = reply["usage"], reply.get("timings", {})
    return {
        "finish_reason": finish,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "seed": reply["speculation"]["seeds"][0],
        "drafted": timings.get("draft_n", 0),
        "accepted": timings.get("draft_n_accepted", 0),
    }


def _grammar_body(spec: GrammarSpec) -> dict[str, Any]:
    found: dict[str, Any] = {} if spec.any_whitespace else {"disable_any_whitespace": True}
    match spec.kind:
        case "json_schema":
            return found | {"json": json.loads(spec.text)}
        case "json_object":
            return found | {"json_object": True}
        case "regex":
            return {"regex": spec.text}
        case "choice":
            return {"choice": list(spec.choices)}
        case "lark":
            return {"grammar": spec.text}


def _speculation_body(choice: SpeculationChoice) -> dict[str, Any]:
    said = {name: value for name, value in asdict(choice).items() if value is not None}
    prediction, thresholds = said.pop("prediction", None), said.pop("acceptance_threshold", None)
    details = {"return_token_details": True} if said.pop("details") else {}
    if thresholds is not None:
        said |= {"acceptance_threshold": thresholds[0], "acceptance_threshold_lower": thresholds[1]}
    body: dict[str, Any] = {"speculative": said, **details}
    return body if prediction is None else body | {"prediction": {"type": "content", "content": prediction}}


AT_ONCE = 128  # requests on the way; more wait here
TRIES = 30  # times that a server is asked again which says that too many wait
IDLE = 2.0  # seconds a connection is kept; the server closes its own after 5, and must not do so under a request
TOO_MANY = 429
DATA, DONE = "data:", "[DONE]"
COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/completions", "/tokenize", "/detokenize"


class RuntimeEndpoint(Backend):
    """A server that `foretell serve` started."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url` is such as http://127.0.0.1:8000; nothing is asked of it yet."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError("base_url", f"{base_url!r} is no address such as http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        super().__init__("endpoint-loop")
        self._client = self.thread.run(self._connect(api_key))
        self._places = asyncio.Semaphore(AT_ONCE)

    async def _connect(self, key: str | None) -> httpx.AsyncClient:
        import httpx

        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE, keepalive_expiry=IDLE)
        return httpx.AsyncClient(base_url=self.base_url, headers=headers, limits=limits, timeout=None)

    def close(self) -> None:
        if not self.thread.closed:
            self.thread.run(self._client.aclose())
        super().close()

    async def encode(self, script: Script) -> list[int]:
        script.check_writable()
        if not script.is_chat:
            return await self._tokens({"prompt": script.text})
        tokens = await self._tokens({"messages": [message.as_json() for message in script.messages]})
        if not script.text:
            return tokens
        before = await self._detokenized(tokens)
        return await self._tokens({"prompt": before + script.text, "add_special_tokens": False})

    async def render(self, script: Script) -> str:
        messages = [message.as_json() for message in script.messages]
        return await self._detokenized(await self._tokens({"messages": messages, "add_generation_prompt": False}))

    async def write(self, script: Script, settings: Settings, tell: Tell | None) -> Written:
        script.check_writable()
        body = completion_body(await self.encode(script) if script.is_chat else script.text, settings)
        if tell is not None:
            return await self._stream(body, tell)
        reply = await self._ask(COMPLETIONS, body)
        choice = reply["choices"][0]
        return Written(choice["text"], meta_of(reply, choice["finish_reason"]))

    async def score(self, prompt: list[int], continuation: list[int]) -> list[float]:
        """Each token behind those before it, all at once: the server has the prompt's pages from the first of them."""
        bodies = [scoring_body(prompt + continuation[:i], token) for i, token in enumerate(continuation)]
        replies = await asyncio.gather(*(self._ask(COMPLETIONS, body) for body in bodies))
        return [float(reply["choices"][0]["logprobs"]["token_logprobs"][0]) for reply in replies]

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        return list((await self._ask(TOKENIZE, body))["tokens"])

    async def _detokenized(self, tokens: list[int]) -> str:
        return str((await self._ask(DETOKENIZE, {"tokens": tokens}))["prompt"])

    async def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply in one."""
        async with self._open(path, body) as reply:
            found: dict[str, Any] = json.loads(await reply.aread())
        return found

    async def _stream(self, body: dict[str, Any], tell: Tell) -> Written:
        """The reply as it comes; the last chunk has what is known of it."""
        text, finish, meta = "", "", None
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._open(COMPLETIONS, body) as reply:
            async for chunk in _events(reply):
                for choice in chunk["choices"]:
                    if choice["text"]:
                        tell(choice["text"])
                    text, finish = text + choice["text"], choice["finish_reason"] or finish
                meta = meta_of(chunk, finish) if chunk.get("usage") else meta
        if meta is None:
            raise ForetellError(f"the server at {self.base_url} broke off")
        return Written(text, meta)

    @asynccontextmanager
    async def _open(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """A reply that is no refusal. Where too many wait it is asked again later; leaving early ends the request."""
        import httpx

        try:
            async with self._places:
                for left in reversed(range(TRIES)):
                    async with self._client.stream("POST", path, json=body) as reply:
                        if reply.status_code != TOO_MANY or not left:
                            await _check(reply)
                            yield reply
                            return
                    await asyncio.sleep(float(reply.headers.get("Retry-After", 1)))
        except httpx.ConnectError as error:
            port = urlsplit(self.base_url).port or 80
            words = f"no server answers at {self.base_url}; start one with foretell serve --port {port}"
            raise ForetellError(words) from error
        except httpx.TransportError as error:
            raise ForetellError(f"the server at {self.base_url} broke off: {type(error).__name__} {error}") from error


async def _check(reply: httpx.Response) -> None:
    """Raise what the server says against the request, in its own words."""
    if reply.is_success:
        return
    content = await reply.aread()
    try:
        words = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        words = f"HTTP {reply.status_code} from {reply.url}; is it a server of foretell?"
    raise ForetellError(str(words))


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if not line.startswith(DATA):
            continue
        data = line[len(DATA) :].strip()
        if data == DONE:
            return
        event = json.loads(data)
        if "error" in event:
            raise ForetellError(str(event["error"]["message"]))
        yield event

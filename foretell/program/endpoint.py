"""Backend for a server elsewhere: the same programs over HTTP."""

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

from .backend import GenOutput, OnText, ProgramBackend
from .prompt_state import PromptState
from .settings import DEFAULT_MAX_TOKENS, GenSettings

if TYPE_CHECKING:
    import httpx


def completion_body(prompt: str | list[int], settings: GenSettings) -> dict[str, Any]:
    """Return the body of POST /v1/completions."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": DEFAULT_MAX_TOKENS, **settings.sampling}
    if settings.grammar is not None:
        body["structured_outputs"] = _grammar_body(settings.grammar)
    return body if settings.speculation is None else body | _speculation_body(settings.speculation)


def scoring_body(prompt: list[int], token: int) -> dict[str, Any]:
    """Return a request for the log-probability of one token after a prompt."""
    return {
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0.0,
        "allowed_token_ids": [token],
        "logprobs": 0,
        "ignore_eos": True,
        "speculative": False,
    }


def meta_of(response: Mapping[str, Any], finish: str) -> dict[str, Any]:
    """Return the metadata of a response, or of its last chunk."""
    usage, timings = response["usage"], response.get("timings", {})
    return {
        "finish_reason": finish,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "seed": response["speculation"]["seeds"][0],
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
    fields = {name: value for name, value in asdict(choice).items() if value is not None}
    prediction, thresholds = fields.pop("prediction", None), fields.pop("acceptance_threshold", None)
    details = {"return_token_details": True} if fields.pop("details") else {}
    for name in ("prediction_is_inferred", "reference"):
        fields.pop(name, None)  # set by servers alone
    if thresholds is not None:
        fields |= {"acceptance_threshold": thresholds[0], "acceptance_threshold_lower": thresholds[1]}
    body: dict[str, Any] = {"speculative": fields, **details}
    return body if prediction is None else body | {"prediction": {"type": "content", "content": prediction}}


MAX_REQUESTS = 128  # requests in flight; more wait here
MAX_TRIES = 30  # attempts at a server that answers 429 (too many requests)
KEEPALIVE_SECONDS = 2.0  # below the 5 s after which the server closes idle connections itself
TOO_MANY_REQUESTS = 429
SSE_DATA = "data:"
SSE_DONE = "[DONE]"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"


class RuntimeEndpoint(ProgramBackend):
    """A server started by `foretell serve`."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url` is an address such as http://127.0.0.1:8000; no request is sent yet."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError("base_url", f"{base_url!r} is not an address such as http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        super().__init__("endpoint-loop")
        self._client = self.thread.run(self._connect(api_key))
        self._semaphore = asyncio.Semaphore(MAX_REQUESTS)

    async def _connect(self, key: str | None) -> httpx.AsyncClient:
        import httpx

        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=MAX_REQUESTS, keepalive_expiry=KEEPALIVE_SECONDS
        )
        return httpx.AsyncClient(base_url=self.base_url, headers=headers, limits=limits, timeout=None)

    def close(self) -> None:
        if not self.thread.closed:
            self.thread.run(self._client.aclose())
        super().close()

    async def encode(self, prompt: PromptState) -> list[int]:
        prompt.check_generable()
        if not prompt.is_chat:
            return await self._tokenize({"prompt": prompt.text})
        tokens = await self._tokenize({"messages": [message.as_json() for message in prompt.messages]})
        if not prompt.text:
            return tokens
        before = await self._detokenize(tokens)
        return await self._tokenize({"prompt": before + prompt.text, "add_special_tokens": False})

    async def render(self, prompt: PromptState) -> str:
        messages = [message.as_json() for message in prompt.messages]
        return await self._detokenize(await self._tokenize({"messages": messages, "add_generation_prompt": False}))

    async def generate(self, prompt: PromptState, settings: GenSettings, on_text: OnText | None) -> GenOutput:
        prompt.check_generable()
        body = completion_body(await self.encode(prompt) if prompt.is_chat else prompt.text, settings)
        if on_text is not None:
            return await self._stream(body, on_text)
        response = await self._post(COMPLETIONS, body)
        choice = response["choices"][0]
        return GenOutput(choice["text"], meta_of(response, choice["finish_reason"]))

    async def score(self, prompt: list[int], continuation: list[int]) -> list[float]:
        """Send one request per token, all at once: the server's prefix cache shares the prompt."""
        bodies = [scoring_body(prompt + continuation[:i], token) for i, token in enumerate(continuation)]
        responses = await asyncio.gather(*(self._post(COMPLETIONS, body) for body in bodies))
        return [float(response["choices"][0]["logprobs"]["token_logprobs"][0]) for response in responses]

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        return list((await self._post(TOKENIZE, body))["tokens"])

    async def _detokenize(self, tokens: list[int]) -> str:
        return str((await self._post(DETOKENIZE, {"tokens": tokens}))["prompt"])

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the whole response."""
        async with self._open(path, body) as response:
            found: dict[str, Any] = json.loads(await response.aread())
        return found

    async def _stream(self, body: dict[str, Any], on_text: OnText) -> GenOutput:
        """Stream a completion; the last chunk has the usage."""
        text, finish, meta = "", "", None
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._open(COMPLETIONS, body) as response:
            async for chunk in _events(response):
                for choice in chunk["choices"]:
                    if choice["text"]:
                        on_text(choice["text"])
                    text, finish = text + choice["text"], choice["finish_reason"] or finish
                meta = meta_of(chunk, finish) if chunk.get("usage") else meta
        if meta is None:
            raise ForetellError(f"the server at {self.base_url} closed the connection early")
        return GenOutput(text, meta)

    @asynccontextmanager
    async def _open(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """Open a successful response, with retries on 429. Leaving the context early cancels the request."""
        import httpx

        try:
            async with self._semaphore:
                for tries_left in reversed(range(MAX_TRIES)):
                    async with self._client.stream("POST", path, json=body) as response:
                        if response.status_code != TOO_MANY_REQUESTS or not tries_left:
                            await _check(response)
                            yield response
                            return
                    await asyncio.sleep(float(response.headers.get("Retry-After", 1)))
        except httpx.ConnectError as error:
            port = urlsplit(self.base_url).port or 80
            reason = f"no server answers at {self.base_url}; start one with foretell serve --port {port}"
            raise ForetellError(reason) from error
        except httpx.TransportError as error:
            raise ForetellError(f"the server at {self.base_url} failed: {type(error).__name__} {error}") from error


async def _check(response: httpx.Response) -> None:
    """Raise the server's error message unless the response is a success."""
    if response.is_success:
        return
    content = await response.aread()
    try:
        reason = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = f"HTTP {response.status_code} from {response.url}; is it a foretell server?"
    raise ForetellError(str(reason))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if not line.startswith(SSE_DATA):
            continue
        data = line[len(SSE_DATA) :].strip()
        if data == SSE_DONE:
            return
        event = json.loads(data)
        if "error" in event:
            raise ForetellError(str(event["error"]["message"]))
        yield event

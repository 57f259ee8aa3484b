"""Settings of the HTTP server: addresses, limits, timeouts, parsers and logging."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretell.errors import RequestError
from foretell.options import option, strict
from foretell.structured_output import GrammarSpec

TOOL_PARSERS = (
    "auto",
    "hermes",
    "llama3",
    "mistral",
    "qwen3_coder",
    "glm",
    "gemma4",
    "functiongemma",
    "harmony",
    "none",
)
REASONING_PARSERS = ("auto", "think", "gemma4", "mistral", "seed_oss", "none")
# vLLM's and SGLang's names of the formats that our parsers read.
OTHER_TOOL_PARSERS = {
    "llama3_json": "llama3",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
    "openai": "harmony",
}
OTHER_REASONING_PARSERS = {"deepseek_r1": "think", "deepseek-r1": "think", "qwen3": "think"}
METRIC_NAMES = ("foretell", "vllm", "both")
SPEC_METRICS_LEVELS = ("none", "summary", "detailed")
MAX_SCHEMA_BYTES = 64 * 1024  # limit of the grammar compiler
MAX_STOP_CHARS = 256  # characters of one stop string


@strict
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The options of `foretell serve` that concern the HTTP server."""

    host: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0 accepts connections from other machines", common=True
    )
    port: int = option(8000, "port to listen on; 0 picks a free one", common=True)
    api_key: tuple[str, ...] = option(
        (),
        "API key that clients must send; may be repeated. Requests with different keys share no prefix cache",
        common=True,
        metavar="KEY",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "name of the model in the API (default: the model as given); may be several",
        aliases=("--alias", "-a"),
        several=True,
        common=True,
        metavar="NAME",
    )
    seed: int | None = option(
        None,
        "base seed for requests without a seed; combined with the request number and the prompt index",
        aliases=("--random-seed", "-s"),
    )
    max_queue: int = option(
        256, "most waiting sequences; further requests get 429", aliases=("--max-queued-requests", "--max-waiting")
    )
    max_body_bytes: int = option(4 * 1024 * 1024, "largest request body in bytes")
    max_held_bytes: int = option(
        256 * 1024 * 1024, "memory for the bodies of all requests in flight, raw and parsed; requests beyond it get 429"
    )
    response_store_bytes: int = option(
        64 * 1024 * 1024, "memory for responses of /v1/responses that clients can continue by id; 0 stores none"
    )
    max_n: int = option(16, "most choices of one request")
    max_prompts: int = option(128, "most prompts of one request to /v1/completions")
    max_stop: int = option(16, f"most stop strings of one request, each of at most {MAX_STOP_CHARS} characters")
    max_logprobs: int = option(20, "most top logprobs per token")
    infer_prediction: bool = option(
        True,
        "draft from the text that a prompt asks to rewrite, in the formats of editors, and from results of tools as "
        "calls quote them; never changes the output",
    )
    strict_max_tokens: bool = option(
        False, "refuse a max_tokens above what the context has left, instead of lowering it"
    )
    strict_fields: bool = option(
        False, "refuse unknown request fields, instead of ignoring those close to no known one"
    )
    unstreamed_max_tokens: int = option(
        2048, "most output tokens of a response that is not streamed and whose request sets no limit"
    )
    max_schema_bytes: int = option(MAX_SCHEMA_BYTES, "largest JSON schema, regular expression or grammar in bytes")
    grammar_timeout: float = option(5.0, "seconds allowed for compiling a grammar")
    request_timeout: float = option(600.0, "seconds after which a request is aborted")
    body_timeout: float = option(30.0, "seconds allowed for receiving a request")
    drain_timeout: float = option(30.0, "seconds allowed for running requests to finish after SIGTERM")
    watchdog: float = option(120.0, "seconds after which a running step counts as stuck and /health fails")
    keep_alive: int = option(5, "seconds that an idle connection stays open", aliases=("--timeout-keep-alive",))
    stream_keepalive: float = option(
        10.0,
        "seconds without output after which a stream sends its headers, and a sign of life each time after; 0: never",
        aliases=("--sse-ping-interval",),
    )
    max_connections: int = option(1024, "most concurrent connections; further ones get 503")
    allowed_host: tuple[str, ...] = option(
        (), "Host name besides localhost accepted by a server on loopback without API keys; may be repeated"
    )
    cors_origin: tuple[str, ...] = option((), "web origin allowed to call the server (CORS); may be repeated")
    tool_call_parser: str = option(
        "auto",
        "tool call format of the model (auto: from its chat template)",
        choices=(*TOOL_PARSERS, *OTHER_TOOL_PARSERS),
        metavar="FORMAT",
    )
    reasoning_parser: str = option(
        "auto",
        "return reasoning as reasoning_content, by its tags (auto: those of the chat template)",
        choices=(*REASONING_PARSERS, *OTHER_REASONING_PARSERS),
        metavar="FORMAT",
    )
    metrics_names: str = option("foretell", "prefix of the metric names in /metrics", choices=METRIC_NAMES)
    per_request_spec_decode_metrics: str = option(
        "summary",
        "speculative decoding metrics in each response; detailed lists every step",
        choices=SPEC_METRICS_LEVELS,
    )
    log_requests: str | None = option(
        None, "file to append each request and its response to, as JSON lines", common=True, metavar="FILE"
    )
    watch_draft: str | None = option(
        None, "folder to watch for a draft head; a new head replaces the current one if it is accepted more often"
    )
    log_interval: float = option(10.0, "seconds between two log lines under load")
    log_format: str = option("text", "format of log lines", choices=("text", "json"), common=True)
    access_log: bool = option(False, "log a line for each HTTP request")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RequestError("port", f"must be between 0 and 65535, not {self.port}")
        for name in (
            "max_queue",
            "max_n",
            "unstreamed_max_tokens",
            "max_prompts",
            "max_body_bytes",
            "max_schema_bytes",
            "max_connections",
        ):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")
        for name in ("max_stop", "max_logprobs", "keep_alive", "response_store_bytes"):
            if getattr(self, name) < 0:
                raise RequestError(name, f"must be 0 or more, not {getattr(self, name)}")
        if not -math.inf < self.stream_keepalive < math.inf:
            raise RequestError("stream_keepalive", f"must be a number of seconds, not {self.stream_keepalive}")
        for name in TIMEOUTS:
            if not 0 < getattr(self, name) < math.inf:
                raise RequestError(name, f"must be above 0, not {getattr(self, name)}")
        if self.max_held_bytes < self.max_body_bytes:
            raise RequestError("max_held_bytes", f"must be max_body_bytes, {self.max_body_bytes}, or more")
        if self.max_schema_bytes > MAX_SCHEMA_BYTES:
            raise RequestError("max_schema_bytes", f"must be {MAX_SCHEMA_BYTES} or fewer")
        if not all(self.api_key):
            raise RequestError("api_key", "is empty; leave it out for a server without keys")

    @property
    def max_silence(self) -> float | None:
        """Return the seconds after which a stream without output sends a sign of life; None: it never does."""
        return self.stream_keepalive if self.stream_keepalive > 0 else None

    @property
    def tool_parser(self) -> str:
        """Return our name of the tool call format."""
        return OTHER_TOOL_PARSERS.get(self.tool_call_parser, self.tool_call_parser)

    @property
    def reasoning_format(self) -> str:
        """Return our name of the reasoning format."""
        return OTHER_REASONING_PARSERS.get(self.reasoning_parser, self.reasoning_parser)

    def check_grammar(self, spec: GrammarSpec) -> None:
        """Raise RequestError if a grammar is larger than allowed."""
        if spec.size > self.max_schema_bytes:
            raise RequestError(spec.field, f"has {spec.size} bytes; at most {self.max_schema_bytes} are allowed")


TIMEOUTS = ("grammar_timeout", "request_timeout", "body_timeout", "drain_timeout", "watchdog", "log_interval")

"""How the server listens, what it lets in, and what it tells: frozen, checked, declared once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretell.errors import RequestError
from foretell.options import option, strict
from foretell.structured_output import GrammarSpec

TOOL_PARSERS = ("auto", "hermes", "llama3", "mistral", "none")
REASONING_PARSERS = ("auto", "think", "none")
METRIC_NAMES = ("foretell", "vllm", "both")
RECORDS = ("none", "summary", "detailed")
MOST_SCHEMA_BYTES = 64 * 1024  # what the compiler of grammars takes
LONGEST_STOP = 256  # characters of one stop string


@strict
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The server around an engine."""

    host: str = option("127.0.0.1", "the address to listen on; 0.0.0.0 lets other machines in")
    port: int = option(8000, "the port to listen on; 0 takes a free one")
    api_key: tuple[str, ...] = option(
        (), "a key that callers must show; may be given several times. Keys also keep callers' caches apart"
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "the name the API knows the model by (default: as it was given); may be several",
        aliases=("--alias", "-a"),
        several=True,
    )
    seed: int | None = option(
        None, "derives the seed of each prompt without one, from the request's number and the prompt's index"
    )
    max_queue: int = option(
        256, "the most texts that wait; more are told 429", aliases=("--max-queued-requests", "--max-waiting")
    )
    max_body_bytes: int = option(4 * 1024 * 1024, "the largest request body")
    max_held_bytes: int = option(
        256 * 1024 * 1024, "memory for the bodies of all requests in flight, raw and parsed; requests beyond it get 429"
    )
    max_n: int = option(16, "the most choices of one request")
    max_prompts: int = option(128, "the most prompts of one request to /v1/completions")
    max_stop: int = option(16, f"the most stop strings, each of at most {LONGEST_STOP} characters")
    max_logprobs: int = option(20, "the most likeliest tokens that are told for a token")
    max_schema_bytes: int = option(MOST_SCHEMA_BYTES, "the largest schema, expression or grammar")
    grammar_timeout: float = option(5.0, "seconds that a grammar may take to compile")
    request_timeout: float = option(600.0, "seconds after which a request is ended")
    body_timeout: float = option(30.0, "seconds that a request may take to arrive")
    drain_timeout: float = option(30.0, "seconds that texts may still take after SIGTERM")
    watchdog: float = option(120.0, "seconds after which a step counts as stuck and /health says so")
    keep_alive: int = option(5, "seconds that an idle connection stays open", aliases=("--timeout-keep-alive",))
    max_connections: int = option(1024, "the most connections at once; more are told 503")
    allowed_host: tuple[str, ...] = option(
        (), "a name besides localhost that a server without keys on this machine alone answers to; may be repeated"
    )
    cors_origin: tuple[str, ...] = option((), "a web origin whose pages may call the server; may be repeated")
    tool_call_parser: str = option(
        "auto", "how the model writes tool calls (auto: by its template)", choices=TOOL_PARSERS
    )
    reasoning_parser: str = option(
        "auto", "whether <think> passages go to reasoning_content (auto: by the template)", choices=REASONING_PARSERS
    )
    metrics_names: str = option("foretell", "whose names /metrics speaks", choices=METRIC_NAMES)
    per_request_spec_decode_metrics: str = option(
        "summary", "how much of speculation each answer tells: detailed lists every step", choices=RECORDS
    )
    log_requests: str | None = option(None, "a file that gets each request and its answer, a JSON object a line")
    watch_draft: str | None = option(
        None, "a folder; a head that is written there replaces the one that guesses, if it guesses better"
    )
    log_interval: float = option(10.0, "seconds between two log lines under load")
    log_format: str = option("text", "how log lines are written", choices=("text", "json"))
    access_log: bool = option(False, "log a line for each HTTP request")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RequestError("port", f"must be between 0 and 65535, not {self.port}")
        for name in ("max_queue", "max_n", "max_prompts", "max_body_bytes", "max_schema_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")
        for name in ("max_stop", "max_logprobs", "keep_alive"):
            if getattr(self, name) < 0:
                raise RequestError(name, f"must be 0 or more, not {getattr(self, name)}")
        for name in TIMES:
            if not 0 < getattr(self, name) < math.inf:
                raise RequestError(name, f"must be above 0, not {getattr(self, name)}")
        if self.max_held_bytes < self.max_body_bytes:
            raise RequestError("max_held_bytes", f"must be max_body_bytes, {self.max_body_bytes}, or more")
        if self.max_schema_bytes > MOST_SCHEMA_BYTES:
            raise RequestError("max_schema_bytes", f"must be {MOST_SCHEMA_BYTES} or fewer")
        if not all(self.api_key):
            raise RequestError("api_key", "is empty; leave it out to let everybody in")

    def check_grammar(self, spec: GrammarSpec) -> None:
        """Refuse one that is too large before anything is done with it."""
        if spec.size > self.max_schema_bytes:
            raise RequestError(spec.field, f"has {spec.size} bytes; at most {self.max_schema_bytes} are taken")


TIMES = ("grammar_timeout", "request_timeout", "body_timeout", "drain_timeout", "watchdog", "log_interval")

"""One served model: the engine, request preprocessing, metrics, and the way of a request into the engine."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from foretell.engine.async_engine import AsyncEngine
from foretell.engine.streams import QueueFull
from foretell.errors import RequestError, UnknownModelError
from foretell.server.request_model import report_ignored
from foretell.server.response_builder import ResponseContext
from foretell.version import VERSION

from .background_tasks import DraftReloader
from .config import ServerConfig
from .memory_report import MemoryReport
from .metrics import Metrics
from .preprocess import ClientContext, GenerationJob, RequestPreprocessor
from .request_log import RequestLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from foretell.build.engine_builder import Assembly
    from foretell.config import EngineConfig, SpeculationConfig
    from foretell.engine.streams import Stream
    from foretell.structured_output import GrammarSpec

LOG = logging.getLogger("foretell")
T = TypeVar("T")
PREPROCESS_THREADS = 2  # chat templates and tokenization, which would block the event loop
GRAMMAR_THREADS = 2  # grammar compilation, which can take seconds


class Service:
    """A served model: its engine, preprocessing, metrics and log."""

    def __init__(
        self,
        assembly: Assembly,
        config: ServerConfig,
        engine_config: EngineConfig,
        speculation: SpeculationConfig,
    ) -> None:
        self.assembly, self.config = assembly, config
        self.engine_config, self.speculation = engine_config, speculation
        self.model_names = config.served_model_name or (engine_config.model,)
        engine = assembly.engine
        self.metrics = Metrics(
            self.model_names[0], engine.plain_seconds, engine.controller.decisions, lambda: engine.safe_drafter.health
        )
        max_requests = engine_config.max_num_seqs + config.max_queue
        self.engine = AsyncEngine(engine, max_requests, self.metrics.observe, assembly.while_idle)
        self.preprocessor = RequestPreprocessor(assembly, config)
        self.response_context = ResponseContext(
            preprocessor=self.preprocessor,
            fingerprint=f"foretell-{VERSION}",
            max_draft=speculation.budget,
            spec_metrics_level=config.per_request_spec_decode_metrics,
            plain_seconds=engine.plain_seconds,
        )
        self.log = RequestLog(config.log_requests)
        self.draft_reloader = None if config.watch_draft is None else DraftReloader(config.watch_draft, self.engine)
        self.memory = MemoryReport.measure(assembly, engine_config)
        self._preprocess_pool = ThreadPoolExecutor(PREPROCESS_THREADS, "foretell-preprocess")
        self._grammar_pool = ThreadPoolExecutor(GRAMMAR_THREADS, "foretell-grammar")
        self._request_numbers = itertools.count()
        self.num_preprocessing = 0  # requests in preprocessing or grammar compilation

    def client_context(self, prefix: str, api_key: str, cache_salt: str | None) -> ClientContext:
        """Return a new request id with `prefix`, the request's tenant, and its seed if the server has a seed."""
        return ClientContext(f"{prefix}{secrets.token_hex(12)}", tenant(api_key, cache_salt), self._next_seed())

    def _next_seed(self) -> int | None:
        if self.config.seed is None:
            return None
        digest = hashlib.sha256(f"{self.config.seed} {next(self._request_numbers)}".encode()).digest()
        return int.from_bytes(digest[:7])

    def check_model(self, name: str | None) -> str:
        """Return the model name for the response; raise UnknownModelError for a model that is not served."""
        if name is not None and name not in self.model_names:
            raise UnknownModelError(f"model: {name!r} is not served here; available: {', '.join(self.model_names)}")
        return self.model_names[0] if name is None else name

    async def submit(
        self,
        preprocess: Callable[[Any, ClientContext], GenerationJob],
        body: Any,
        client: ClientContext,
        deadline: float,
    ) -> tuple[GenerationJob, Stream]:
        """Preprocess a request, compile its grammar and submit it to the engine.

        `deadline` is in the event loop's time; the engine ends the request then. Without `body.stream` the stream
        collects deltas until the output is finished.
        """
        self.engine.check_open(1 + self.num_preprocessing)  # reject early, before any work is done for the request
        job = await self.run_in_worker(preprocess, body, client)
        report_ignored(job.ignored)
        if len(job.requests) > self.engine.max_sequences:
            raise RequestError(
                "n",
                f"times prompts is {len(job.requests)} sequences; the queue takes {self.engine.max_sequences}",
            )
        self.engine.check_open(len(job.requests))
        grammar = None if job.grammar is None else await self._compile_grammar(job.grammar)
        timeout = max(deadline - asyncio.get_running_loop().time(), 0.0)
        return job, self.engine.submit(job.requests, grammar, timeout, wants_deltas=bool(body.stream))

    async def run_in_worker(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function in a worker thread; raise QueueFull if too many requests wait for one."""
        with self._preprocessing_slot():
            async with asyncio.timeout(self.config.request_timeout):
                return await self.in_worker(function, *args)

    def in_worker(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run a blocking function that belongs to no queued request in a worker thread."""
        return asyncio.get_running_loop().run_in_executor(self._preprocess_pool, function, *args)

    @contextmanager
    def _preprocessing_slot(self) -> Iterator[None]:
        """Count a request against the queue limit while it is on its way to the engine."""
        if self.num_preprocessing >= self.engine.max_sequences:
            raise QueueFull(f"{self.num_preprocessing} requests are being preprocessed; retry later", 1)
        self.num_preprocessing += 1
        try:
            yield
        finally:
            self.num_preprocessing -= 1

    async def _compile_grammar(self, spec: GrammarSpec) -> Any:
        """Return a cached grammar, or compile it in a thread. Waiting for a free thread does not count as timeout."""
        cached = self.assembly.grammars.cached(spec)
        if cached is not None:
            return cached
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def compile_grammar() -> Any:
            loop.call_soon_threadsafe(started.set)
            return self.assembly.grammars.compile(spec)

        with self._preprocessing_slot():
            compiling = loop.run_in_executor(self._grammar_pool, compile_grammar)
            try:
                await started.wait()
                return await asyncio.wait_for(compiling, self.config.grammar_timeout)
            except TimeoutError:
                reason = f"takes more than {self.config.grammar_timeout:g} seconds to compile; simplify it"
                raise RequestError(spec.field, reason) from None
            finally:
                compiling.cancel()

    @property
    def unhealthy_reason(self) -> str | None:
        """Return why the engine does not work, or None if it does."""
        if self.engine.failure is not None:
            return f"the engine has failed: {self.engine.failure}"
        if self.engine.has_died:
            return "the engine's thread has ended"
        stuck = self.engine.stuck_for()
        return f"a step, or work between steps, has taken {stuck:.0f} seconds" if stuck > self.config.watchdog else None

    async def close(self) -> None:
        """Stop the engine and the worker threads."""
        await self.engine.stop()
        self._preprocess_pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)
        self.log.close()


def tenant(api_key: str, cache_salt: str | None) -> str:
    """Return the tenant of a request, whose prefix cache it may share: digests of its API key and of its cache salt."""
    return key_tenant(api_key) + (f":{_digest(cache_salt)}" if cache_salt else "")


def key_tenant(api_key: str) -> str:
    """Return the part of a tenant that stands for the API key; "" without one."""
    return _digest(api_key) if api_key else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

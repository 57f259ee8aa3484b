"""Everything behind the endpoints: the engine, the desk where requests are settled, and the books."""

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
from foretell.server.openai.response_builder import ResponseContext
from foretell.version import VERSION

from .config import ServerConfig
from .draft_reload import DraftReloader
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
WORKERS = 2  # for what would keep the event loop: templates, tokenizers
COMPILERS = 2  # for grammars, which may take long


class Service:
    """One model being served."""

    def __init__(
        self,
        assembly: Assembly,
        config: ServerConfig,
        engine_config: EngineConfig,
        speculation: SpeculationConfig,
    ) -> None:
        self.assembly, self.config = assembly, config
        self.engine_config, self.speculation = engine_config, speculation
        self.names = config.served_model_name or (engine_config.model,)
        engine = assembly.engine
        self.metrics = Metrics(
            self.names[0], engine.plain_seconds, engine.controller, lambda: engine.safe_drafter.health
        )
        most = engine_config.max_num_seqs + config.max_queue
        self.engine = AsyncEngine(engine, most, self.metrics.observe, assembly.while_idle)
        self.desk = RequestPreprocessor(assembly, config)
        longest = speculation.budget
        records = config.per_request_spec_decode_metrics
        self.house = ResponseContext(self.desk, f"foretell-{VERSION}", longest, records, engine.plain_seconds)
        self.log = RequestLog(config.log_requests)
        self.watch = None if config.watch_draft is None else DraftReloader(config.watch_draft, self.engine)
        self.footprint = MemoryReport.of(assembly, engine_config)
        self._workers = ThreadPoolExecutor(WORKERS, "foretell-desk")
        self._compilers = ThreadPoolExecutor(COMPILERS, "foretell-grammar")
        self._numbers = itertools.count()
        self.arriving = 0  # requests that are read, or whose grammars are compiled

    def caller(self, kind: str, key: str, salt: str | None) -> ClientContext:
        """A name for a request, its tenant, and its seed where the server gives seeds."""
        return ClientContext(f"{kind}-{secrets.token_hex(12)}", tenant(key, salt), self._seed())

    def _seed(self) -> int | None:
        if self.config.seed is None:
            return None
        drawn = hashlib.sha256(f"{self.config.seed} {next(self._numbers)}".encode()).digest()
        return int.from_bytes(drawn[:7])

    def check_model(self, name: str | None) -> str:
        """The name a reply carries; a model that is not served here is refused."""
        if name is not None and name not in self.names:
            raise UnknownModelError(f"model: {name!r} is not served here; there is {', '.join(self.names)}")
        return self.names[0] if name is None else name

    async def settle(self, make: Callable[..., T], *values: Any) -> T:
        """Run what takes a while beside the event loop, if not too many wait for that already."""
        with self._arriving():
            async with asyncio.timeout(self.config.request_timeout):
                return await asyncio.get_running_loop().run_in_executor(self._workers, make, *values)

    @contextmanager
    def _arriving(self) -> Iterator[None]:
        """Who is on the way to the engine takes a place as those who are there."""
        if self.arriving >= self.engine.max_sequences:
            raise QueueFull(f"{self.arriving} requests are being read and no more may; come back later", 1)
        self.arriving += 1
        try:
            yield
        finally:
            self.arriving -= 1

    async def open(self, job: GenerationJob, deadline: float, patient: bool) -> Stream:
        """Hand a job to the engine, to be ended at the `deadline` of the loop's clock; a grammar that takes too long
        to compile is refused. `patient`: the texts are told when they have ended."""
        if len(job.requests) > self.engine.max_sequences:
            raise RequestError("n", f"with these prompts is {len(job.requests)} texts; {self.engine.max_sequences} fit")
        self.engine.check_open(len(job.requests))
        grammar = None if job.grammar is None else await self._grammar(job.grammar)
        left = deadline - asyncio.get_running_loop().time()
        return self.engine.submit(job.requests, grammar, max(left, 0.0), wants_deltas=not patient)

    async def _grammar(self, spec: GrammarSpec) -> Any:
        """One that is known at once; another when it is compiled. Waiting for those of others does not count."""
        known = self.assembly.grammars.cached(spec)
        if known is not None:
            return known
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def compile_it() -> Any:
            loop.call_soon_threadsafe(begun.set)
            return self.assembly.grammars.compile(spec)

        with self._arriving():
            compiling = loop.run_in_executor(self._compilers, compile_it)
            try:
                await begun.wait()
                return await asyncio.wait_for(compiling, self.config.grammar_timeout)
            except TimeoutError:
                words = f"takes more than {self.config.grammar_timeout:g} seconds to compile; simplify it"
                raise RequestError(spec.field, words) from None
            finally:
                compiling.cancel()

    @property
    def problem(self) -> str | None:
        """What keeps the engine from working, if something does."""
        if self.engine.failure is not None:
            return f"the engine has failed: {self.engine.failure}"
        if self.engine.has_died:
            return "the engine's thread has ended"
        stuck = self.engine.stuck_for()
        return f"a step, or work between steps, has taken {stuck:.0f} seconds" if stuck > self.config.watchdog else None

    async def close(self) -> None:
        """Stop the engine and the workers."""
        await self.engine.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self.log.close()


def tenant(key: str, salt: str | None) -> str:
    """Whose caches a request may share: of the same key and the same salt. Neither can be read from it."""
    if not key and not salt:
        return ""
    mark = hashlib.sha256(key.encode())
    return hashlib.sha256(mark.digest() + (salt or "").encode()).hexdigest()

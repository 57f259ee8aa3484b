"""Starts and stops the server: logging, model loading, the listening socket, and draining on signals."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import uvicorn

from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.hub.catalog import BUILTINS
from foretell.server.app import create_app
from foretell.server.config import ServerConfig
from foretell.server.http_protocol import timeout_protocol
from foretell.server.registry import registered
from foretell.server.request_log import JsonFormatter
from foretell.server.service import Service, key_tenant
from foretell.server.startup import Startup, announce
from foretell.utils.system import gc_paused, trim_memory

LEVEL = logging.INFO


def set_up_logs(log_format: str) -> None:
    """Send the log lines of the package and of uvicorn to stderr. Prompts, outputs and keys are never logged."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    for name, level in (("foretell", LEVEL), ("uvicorn", LEVEL), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.propagate = name == "uvicorn.error"
        logger.setLevel(level)


LOG = logging.getLogger("foretell")


def serve(config: ServerConfig, engine: EngineConfig, speculation: SpeculationConfig, ignored_flags: list[str]) -> int:
    """Serve until a signal stops it; return 0 if every request was finished, else 1."""
    set_up_logs(config.log_format)
    if ignored_flags:
        LOG.info("ignored flags of other engines: %s", ", ".join(ignored_flags))
    with bind(config.host, config.port) as sock:  # before the model is loaded: a port in use fails at once
        with gc_paused():
            service = load(config, engine, speculation)
            app = create_app(service)
        settings = uvicorn.Config(
            app,
            http=timeout_protocol(config.body_timeout, config.request_timeout + 2 * config.body_timeout),
            loop="asyncio",  # even if uvloop is installed
            log_config=None,
            access_log=config.access_log,
            timeout_keep_alive=config.keep_alive,
            limit_concurrency=config.max_connections,
            server_header=False,
        )
        server, startup = Server(settings, service), Startup.of(service, sock)
        with registered(startup.url, startup.model, startup.drafters):
            server.run(sockets=[sock])
    return 1 if server.has_cut_off else 0


def load(config: ServerConfig, engine: EngineConfig, speculation: SpeculationConfig) -> Service:
    """Load the model and return its service."""
    from foretell.build.engine_builder import build_engine
    from foretell.build.model_source import print_progress

    progress = LOG.info if config.log_format == "json" else print_progress
    builtin = BUILTINS.get(engine.model)
    if builtin is not None and engine.chat_template is None:
        engine = replace(engine, chat_template=builtin.chat_template)
    assembly = build_engine(engine, with_corpus_tenants(speculation, config.api_key), progress=progress)
    if builtin is not None and engine.generation_config == "auto":
        assembly = replace(assembly, sampling_defaults={**builtin.sampling, **assembly.sampling_defaults})
    assembly.grammars.prepare()
    trim_memory()
    service = Service(assembly, config, engine, speculation)
    for notice in service.preprocessor.notices():
        progress(notice)
    return service


def with_corpus_tenants(speculation: SpeculationConfig, api_keys: Sequence[str]) -> SpeculationConfig:
    """Return the config with the tenants of API keys instead of their numbers before the paths of a draft corpus."""
    if not speculation.draft_corpus:
        return speculation
    from foretell.build.draft_corpus import for_tenants, is_shared

    if len(api_keys) > 1 and is_shared(speculation.draft_corpus):
        LOG.warning(
            "clients of every API key draft from the draft corpus, so response times can reveal what text it has; "
            "--draft-corpus N=FOLDER limits a folder to the Nth key"
        )
    return replace(speculation, draft_corpus=for_tenants(speculation.draft_corpus, list(map(key_tenant, api_keys))))


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not listening yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        reason = f"cannot resolve {host!r}; use 127.0.0.1 for this machine only, or 0.0.0.0 for all interfaces"
        raise RequestError("host", reason) from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            reason = f"{host} is no address of this machine; use 127.0.0.1, or 0.0.0.0 for all interfaces"
            raise RequestError("host", reason) from None
        raise RequestError("port", f"{host}:{port} cannot be bound: {error.strerror}; choose another --port") from None
    return sock


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first SIGINT or SIGTERM and stops at once on the second."""

    def __init__(self, settings: uvicorn.Config, service: Service) -> None:
        super().__init__(settings)
        self.service = service
        self.has_cut_off = False  # whether responses were cut off
        self._draining = False
        self._drain_task: asyncio.Task[None] | None = None  # a reference, or it might be garbage-collected

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started and sockets:
            self._announce(sockets[0])

    def _announce(self, sock: socket.socket) -> None:
        announce(Startup.of(self.service, sock), self.service.config.log_format)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            self.should_exit = True
        elif not self._draining:
            self._draining = True
            self._loop.call_soon_threadsafe(self._start_drain, sig)
        else:
            self.has_cut_off = self.should_exit = self.force_exit = True

    def _start_drain(self, sig: int) -> None:
        LOG.info("%s: draining %d sequences", signal.Signals(sig).name, self.service.engine.num_sequences)
        self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for sequences to finish and clients to read them, together up to the drain timeout."""
        deadline = self._loop.time() + self.service.config.drain_timeout
        if not await self.service.engine.drain(self.service.config.drain_timeout):
            LOG.warning("%d sequences were not finished in time and are aborted", self.service.engine.num_sequences)
            self.has_cut_off = True
            await self.service.engine.stop()
        self.config.timeout_graceful_shutdown = max(1, math.ceil(deadline - self._loop.time()))
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop, and cut off responses that clients have not read in time."""
        await super().shutdown(sockets)
        left = len(self.server_state.connections)
        if left and not self.force_exit:
            LOG.warning("%d responses were not read in time and are cut off", left)
            self.has_cut_off = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()

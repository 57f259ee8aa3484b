"""Starting and stopping: the model is loaded, the port opened, signals heeded."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from types import FrameType

import uvicorn

from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.utils.system import gc_paused, trim_memory

from .app import create_app
from .config import ServerConfig
from .http_protocol import impatient
from .logs import set_up_logs
from .service import Service

LOG = logging.getLogger("foretell")


def serve(config: ServerConfig, engine: EngineConfig, speculation: SpeculationConfig, foreign: list[str]) -> int:
    """Serve until a signal says to stop; the exit code says whether every text was finished."""
    set_up_logs(config.log_format)
    if foreign:
        LOG.info("flags of other engines that mean nothing here, or not just that: %s", ", ".join(foreign))
    with bind(config.host, config.port) as port:  # before the model is loaded: a port that is taken shows at once
        with gc_paused():
            service = load(config, engine, speculation)
            app = create_app(service)
        settings = uvicorn.Config(
            app,
            http=impatient(config.body_timeout, config.request_timeout + 2 * config.body_timeout),
            loop="asyncio",  # whether or not uvloop is installed
            log_config=None,
            access_log=config.access_log,
            timeout_keep_alive=config.keep_alive,
            limit_concurrency=config.max_connections,
            server_header=False,
        )
        server = Server(settings, service)
        server.run(sockets=[port])
    return 1 if server.hurried else 0


def load(config: ServerConfig, engine: EngineConfig, speculation: SpeculationConfig) -> Service:
    """The model, ready to be asked."""
    from foretell.build.engine_builder import build_engine
    from foretell.build.model_source import print_progress

    assembly = build_engine(engine, speculation, progress=print_progress)
    assembly.grammars.prepare()
    trim_memory()
    return Service(assembly, config, engine, speculation)


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, not open yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        words = f"there is no address {host!r}; 127.0.0.1 is this machine, 0.0.0.0 lets others in"
        raise RequestError("host", words) from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise RequestError("port", f"{host}:{port} cannot be opened: {error.strerror}; choose another --port") from None
    return found


class Server(uvicorn.Server):
    """The first signal to stop lets texts finish; the second does not."""

    def __init__(self, settings: uvicorn.Config, service: Service) -> None:
        super().__init__(settings)
        self.service = service
        self.hurried = False  # whether texts were cut off
        self._asked = False
        self._leaving: asyncio.Task[None] | None = None  # kept, or it might be collected on its way

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started and sockets:
            print(greeting(self.service, sockets[0]), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            self.should_exit = True
        elif not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._leave, sig)
        else:
            self.hurried = self.should_exit = self.force_exit = True

    def _leave(self, sig: int) -> None:
        LOG.info("%s: %d texts are finished first", signal.Signals(sig).name, self.service.engine.num_sequences)
        self._leaving = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Texts are finished first, and read to their ends; who does not read has what is left of the same time."""
        deadline = self._loop.time() + self.service.config.drain_timeout
        if not await self.service.engine.drain(self.service.config.drain_timeout):
            LOG.warning("%d texts were not finished in time", self.service.engine.num_sequences)
            self.hurried = True
            await self.service.engine.stop()
        self.config.timeout_graceful_shutdown = max(1, math.ceil(deadline - self._loop.time()))
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers that are not read in time are cut off."""
        await super().shutdown(sockets)
        left = len(self.server_state.connections)
        if left and not self.force_exit:
            LOG.warning("%d answers were not read in time", left)
            self.hurried = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()


def greeting(service: Service, port: socket.socket) -> str:
    """The line a server starts with: where, what drafts for what, and what memory it takes."""
    host, number = port.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return (
        f"foretell: http://{shown}:{number} serves {service.names[0]}; {_drafting(service)}; "
        f"memory: {service.footprint}"
    )


def _drafting(service: Service) -> str:
    drafter, speculation = service.assembly.engine.drafter, service.speculation
    if not drafter.drafters:
        return f"nothing drafts for it (--drafter {speculation.drafter})"
    length = speculation.num_speculative_tokens
    reach = f"up to {speculation.budget}" if length is None else str(length)
    return f"{' and '.join(drafter.default_drafters)} draft {reach} tokens a step for it, rule {speculation.rule}"

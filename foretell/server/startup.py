"""Announces that the server is ready: a banner in a terminal, one line elsewhere, one object in JSON logs."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.version import VERSION

from .memory_report import GIB, MemoryReport
from .request_log import JsonFormatter

if TYPE_CHECKING:
    import socket

    from .service import Service

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses of all interfaces, and how to reach them from here


@dataclass(frozen=True)
class Startup:
    """A server that is ready."""

    host: str
    port: int
    model: str
    drafters: tuple[str, ...]
    drafting: str  # the drafters with their settings, in words
    memory: MemoryReport

    @classmethod
    def of(cls, service: Service, sock: socket.socket) -> Startup:
        """Describe the server of a service that listens on a socket."""
        host, port = sock.getsockname()[:2]
        drafters = tuple(service.assembly.engine.drafter.default_drafters)
        return cls(host, port, service.model_names[0], drafters, _drafting(service), service.memory)

    @property
    def url(self) -> str:
        """Return the address it listens on."""
        return _url(self.host, self.port)

    @property
    def line(self) -> str:
        """Return the message of one line: URL, model, drafters and memory."""
        return f"foretell: {self.url} serves {self.model}; {self.drafting}; memory: {self.memory}"

    @property
    def values(self) -> dict[str, Any]:
        """Return the fields of the message in JSON logs."""
        return {"url": self.url, "model": self.model, "drafters": self.drafters, "memory_bytes": self.memory.total}

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the banner."""
        reachable = _url(WILDCARDS.get(self.host, self.host), self.port)
        found = [
            ("page", f"{reachable}/"),
            ("API", f"{reachable}/v1"),
            ("API docs", f"{reachable}/docs"),
            ("model", self.model),
            ("drafters", self.drafting.removeprefix("drafters ")),
        ]
        if self.host in WILDCARDS:
            found.insert(0, ("listens on", f"all interfaces, port {self.port}"))
        parts = [f"{name} {size / GIB:.2f}" for name, size in self.memory.parts().items() if size]
        return [*found, ("memory", f"at most {self.memory.total / GIB:.2f} GiB: {', '.join(parts)}")]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(startup: Startup, log_format: str) -> None:
    """Print that the server is ready, on standard output."""
    if log_format == "json":
        record = {"name": "foretell", "levelname": "INFO", "msg": startup.line, "values": startup.values}
        print(JsonFormatter().format(logging.makeLogRecord(record)), flush=True)
    elif sys.stdout.isatty():
        print_banner(startup)
    else:
        print(startup.line, flush=True)


def print_banner(startup: Startup) -> None:
    """Print a small table of addresses, model, drafters and memory."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, value in startup.rows():
        table.add_row(Text(label, style="bold"), Text(value))
    console = Console(highlight=False)
    console.print(
        Text(f"Foretell {VERSION}", style="bold cyan"), table, Text("Ctrl-C stops it.", style="dim"), sep="\n"
    )


def _drafting(service: Service) -> str:
    drafter, speculation = service.assembly.engine.drafter, service.speculation
    if not drafter.drafters:
        return f"no speculative decoding (--drafter {speculation.drafter})"
    length = speculation.num_speculative_tokens
    count = f"up to {speculation.budget}" if length is None else str(length)
    names = ", ".join(drafter.default_drafters)
    return f"drafters {names} with {count} draft tokens per step, rule {speculation.rule}"

"""Parses JSON request bodies: strictly, in a thread if large, with an upper bound on the memory."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache
from itertools import islice
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from foretell.server.request_model import FIELD_REPORT, FieldReport
from foretell.utils.system import without_gc

LOG = logging.getLogger("foretell")
IGNORED_HEADER = "X-Foretell-Ignored-Fields"  # names the parts of a request that had no effect
NAME = re.compile(r"[\w.\-]{1,64}", re.ASCII)  # a field that a header and a log line may name
MAX_NAMED = 8  # ignored fields named in the header
MAX_NOTED = 256  # sets of ignored fields that are logged once
LARGE = 64 * 1024  # bytes; larger bodies are parsed in a worker thread
UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
# Upper bounds on the bytes of Python objects for each structural character, measured on bodies made of nothing else:
# an integer and its list slot, a list of one integer, an empty dict, a dict entry, half of a string's header.
OBJECT_BYTES = {b",": 40, b"[": 96, b"{": 64, b":": 92, b'"': 28}
WIDEST = 4  # bytes of a character in a string with one character beyond U+FFFF


def parse_json(body: bytes) -> Any:
    """Return the value of a body, or raise JSONDecodeError.

    The parser takes UTF-8 only, refuses unpaired surrogates, and nests at most 200 levels deep. A UTF-8 byte order mark
    is skipped. The garbage collector is off meanwhile: it would scan the new objects again and again.
    """
    try:
        with without_gc():
            return from_json(body.removeprefix(UTF8_BOM))
    except ValueError as error:
        raise json.JSONDecodeError(_reason(body, str(error)), "", 0) from None


def _reason(body: bytes, error: str) -> str:
    if body.startswith(UTF16_BOMS) or b"\0" in body[:4]:
        return "it must be encoded in UTF-8, not in UTF-16 or UTF-32"
    if "hex escape" in error or "surrogate" in error:
        return f"{error}; escape a character beyond U+FFFF as a surrogate pair"
    return error


def parsed_bytes(body: bytes) -> int:
    """Return an upper bound on the memory of a body's parsed value, from counts of structural characters alone.

    Those inside strings count as well, so that the bound needs no parsing."""
    width = 1 if body.isascii() and b"\\u" not in body else WIDEST
    return width * len(body) + sum(size * body.count(each) for each, size in OBJECT_BYTES.items())


class JsonRequest(Request):
    """A request whose body is parsed by `parse_json`."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await asyncio.to_thread(parse_json, body) if len(body) > LARGE else parse_json(body)
        return self._json


class JsonRoute(APIRoute):
    """A route that parses its body as a JsonRequest, and names the fields that it ignored in a response header."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            report = FieldReport(request.app.state.strict_fields)
            token = FIELD_REPORT.set(report)
            try:
                response = await handle(JsonRequest(request.scope, request.receive))
            finally:
                FIELD_REPORT.reset(token)
            if report.ignored:
                response.headers[IGNORED_HEADER] = _named(request.url.path, report.ignored)
            return response

        return handle_json


@lru_cache(maxsize=MAX_NOTED)  # a client sends the same fields again and again; one log line is enough
def _noted(path: str, names: str) -> str:
    LOG.info("%s: ignored fields: %s", path, names)
    return names


def _named(path: str, fields: Collection[str]) -> str:
    """Return the names of ignored fields for a header, and log them the first time."""
    shown = [name if NAME.fullmatch(name) else "?" for name in islice(fields, MAX_NAMED)]
    more = [f"and {len(fields) - MAX_NAMED} more"] if len(fields) > MAX_NAMED else []
    return _noted(path, ", ".join([*shown, *more]))

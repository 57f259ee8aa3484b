"""The playground: a page at / and its files, which ask nobody but this server and run no script but their own."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foretell.server.errors import ApiError

FOLDER = files("foretell.server").joinpath("page")
INDEX = "index.html"
PREFIX = "/page/"
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # a browser refuses to read any text as HTML
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and sent again only where it changed
}


class PageFile:
    """One file, read when the server starts."""

    def __init__(self, name: str, body: bytes) -> None:
        self.body = body
        self.mark = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        self.headers = {**HEADERS, "Content-Type": KINDS[name.rpartition(".")[2]], "ETag": self.mark}

    def response(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self.mark:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def playground_routes() -> APIRouter:
    """/ and /page/NAME. They show nothing that needs a key."""
    router = APIRouter(include_in_schema=False)
    found = {each.name: PageFile(each.name, each.read_bytes()) for each in FOLDER.iterdir() if each.is_file()}

    @router.get("/")
    async def index(request: Request) -> Response:
        return found[INDEX].response(request)

    @router.get(PREFIX + "{name}")
    async def part(name: str, request: Request) -> Response:
        if name not in found:
            raise ApiError(404, f"the page has no file {name!r}", code="not_found")
        return found[name].response(request)

    return router


def is_page(path: str) -> bool:
    """Whether an address is the page's own, which everybody may see."""
    return path == "/" or path.startswith(PREFIX)

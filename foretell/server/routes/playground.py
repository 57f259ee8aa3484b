"""The playground: a web page at / and its files. They load nothing from other servers."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foretell.server.errors import ApiError

FOLDER = files("foretell.server").joinpath("page")
INDEX = "index.html"
PREFIX = "/page/"
MEDIA_TYPES = {
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
        "require-trusted-types-for 'script'",  # browsers refuse to parse strings as HTML
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated by ETag each time
}


class PageFile:
    """A file of the page, read when the server starts."""

    def __init__(self, name: str, body: bytes) -> None:
        self.body = body
        self.etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        self.headers = {**HEADERS, "Content-Type": MEDIA_TYPES[name.rpartition(".")[2]], "ETag": self.etag}

    def response(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def playground_routes() -> APIRouter:
    """Return the routes of / and /page/NAME, which need no API key."""
    router = APIRouter(include_in_schema=False)
    page_files = {file.name: PageFile(file.name, file.read_bytes()) for file in FOLDER.iterdir() if file.is_file()}

    @router.api_route("/", methods=["GET", "HEAD"])  # clients of other APIs ask with HEAD whether the server is there
    async def index(request: Request) -> Response:
        return page_files[INDEX].response(request)

    @router.get(PREFIX + "{name}")
    async def page_file(name: str, request: Request) -> Response:
        if name not in page_files:
            raise ApiError(404, f"the page has no file {name!r}", code="not_found")
        return page_files[name].response(request)

    return router


def is_page(path: str) -> bool:
    """Return whether a path belongs to the playground."""
    return path == "/" or path.startswith(PREFIX)

"""/docs: the API's description as a page of its own, without scripts, that asks nobody else for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

Schema = Mapping[str, Any]

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code{font:13px ui-monospace,monospace}h2{margin-top:2.5rem;border-top:1px solid #8884;padding-top:1rem}"
    "table{border-collapse:collapse;width:100%}td{vertical-align:top;padding:.2rem .8rem .2rem 0}"
    "td:first-child{white-space:nowrap}summary{cursor:pointer}"
)
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def openapi_routes(describe: Any) -> APIRouter:
    """/docs, of what `describe` gives: an OpenAPI document."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(describe()), headers=HEADERS)

    return router


def page(api: Schema) -> str:
    """All of it in HTML."""
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    calls = "".join(
        _call(api, path, method, call) for path, methods in api["paths"].items() for method, call in methods.items()
    )
    intro = (
        'For programs: <a href="/openapi.json"><code>/openapi.json</code></a>. To try it out: <a href="/">the page</a>.'
    )
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{title}</h1><p>{intro}</p>{calls}</body></html>'
    )


def _call(api: Schema, path: str, method: str, call: Schema) -> str:
    """One endpoint: what it does, what it takes, what it answers."""
    found = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(call.get('description', ''))}</p>"
    content = call.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        found += f"<h3>Fields</h3>{_fields(api, content['schema'])}"
    answers = [(status, _words(answer), _answer(api, answer)) for status, answer in call["responses"].items()]
    rows = "".join(f"<tr><td><code>{status}</code></td><td>{words}{more}</td></tr>" for status, words, more in answers)
    return f"{found}<h3>Answers</h3><table>{rows}</table>"


def _words(answer: Schema) -> str:
    return escape(answer.get("description", ""))


def _answer(api: Schema, answer: Schema) -> str:
    """What an answer consists of, folded away."""
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    inside = _fields(api, schema)
    return f"<details><summary>{escape(_kind(schema))}</summary>{inside}</details>" if inside else ""


def _fields(api: Schema, schema: Schema) -> str:
    rows = "".join(_rows(api, schema))
    return f"<table>{rows}</table>" if rows else ""


def _rows(api: Schema, schema: Schema) -> Iterator[str]:
    found = _resolved(api, schema)
    needed = found.get("required", ())
    for name, field in found.get("properties", {}).items():
        words = [escape(field.get("description", "")), "needed" if name in needed else ""]
        told = "; ".join(word for word in words if word)
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field))}</td><td>{told}</td></tr>"


def _resolved(api: Schema, schema: Schema) -> Schema:
    """The schema a reference stands for."""
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Schema = api["components"]["schemas"][name] if name else schema
    return found


def _kind(schema: Schema) -> str:
    """What a value is, in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind for each in schema["anyOf"] if (kind := _kind(each)) != "null"))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))

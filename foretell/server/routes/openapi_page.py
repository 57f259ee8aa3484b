"""/docs: the OpenAPI schema as an HTML page, without scripts or external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
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


def openapi_routes(schema: Callable[[], Schema]) -> APIRouter:
    """Return the route of /docs; `schema` returns the OpenAPI document."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(render_page(schema()), headers=HEADERS)

    return router


def render_page(api: Schema) -> str:
    """Return the HTML page of an OpenAPI document."""
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    calls = "".join(
        _call(api, path, method, call) for path, methods in api["paths"].items() for method, call in methods.items()
    )
    intro = 'OpenAPI schema: <a href="/openapi.json"><code>/openapi.json</code></a>. <a href="/">Playground</a>.'
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{title}</h1><p>{intro}</p>{calls}</body></html>'
    )


def _call(api: Schema, path: str, method: str, call: Schema) -> str:
    """Return the section of one endpoint: description, request fields, responses."""
    found = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(call.get('description', ''))}</p>"
    content = call.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        found += f"<h3>Fields</h3>{_fields(api, content['schema'])}"
    rows = "".join(
        f"<tr><td><code>{status}</code></td>"
        f"<td>{escape(response.get('description', ''))}{_response_fields(api, response)}</td></tr>"
        for status, response in call["responses"].items()
    )
    return f"{found}<h3>Responses</h3><table>{rows}</table>"


def _response_fields(api: Schema, response: Schema) -> str:
    """Return the fields of a response in a collapsed block."""
    schema = response.get("content", {}).get("application/json", {}).get("schema", {})
    fields = _fields(api, schema)
    return f"<details><summary>{escape(_type_name(schema))}</summary>{fields}</details>" if fields else ""


def _fields(api: Schema, schema: Schema) -> str:
    rows = "".join(_rows(api, schema))
    return f"<table>{rows}</table>" if rows else ""


def _rows(api: Schema, schema: Schema) -> Iterator[str]:
    resolved = _resolved(api, schema)
    required = resolved.get("required", ())
    for name, field in resolved.get("properties", {}).items():
        notes = [escape(field.get("description", "")), "required" if name in required else ""]
        note = "; ".join(each for each in notes if each)
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type_name(field))}</td><td>{note}</td></tr>"


def _resolved(api: Schema, schema: Schema) -> Schema:
    """Return the schema that a reference points to."""
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Schema = api["components"]["schemas"][name] if name else schema
    return found


def _type_name(schema: Schema) -> str:
    """Return a short name of a schema's type."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind for each in schema["anyOf"] if (kind := _type_name(each)) != "null"))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type_name(schema.get('items', {}))}"
    return str(schema.get("type", "any"))

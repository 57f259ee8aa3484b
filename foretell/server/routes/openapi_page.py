"""/docs: the OpenAPI schema as an HTML page, without scripts or external resources.

Swagger UI would be 1.5 MB of scripts, which FastAPI loads from a CDN: that needs the internet and a weaker policy.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

Schema = Mapping[str, Any]

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code,pre{font:13px/1.5 ui-monospace,monospace}h2{margin-top:2.5rem;border-top:1px solid #8884;padding-top:1rem}"
    "pre{background:#8881;border-radius:6px;padding:.7rem .9rem;overflow-x:auto}"
    "table{border-collapse:collapse;width:100%}td{vertical-align:top;padding:.25rem .8rem .25rem 0}"
    "tr+tr>td{border-top:1px solid #8883}td:first-child,code{overflow-wrap:anywhere}"
    "td:first-child{width:15rem}td:nth-child(2):not(:last-child){width:13rem}h2 code,h3 code{font-size:1.05rem}"
    "@media(max-width:45rem){tr,td{display:block;width:auto!important;border:0!important;padding:0}tr{margin:.8rem 0}}"
    "nav ul{columns:20rem;padding-left:1.2rem}a{color:LinkText}.required{font-weight:600}"
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
INTRO = (
    'The <a href="/">page</a> has a chat; <a href="/openapi.json"><code>/openapi.json</code></a> is this schema for '
    "programs. If the server has API keys, send one: <code>Authorization: Bearer KEY</code>."
)
MAX_SHOWN_LIMIT = 2**31  # larger limits are those of the integer type
BACKTICKS = re.compile(r"`([^`]+)`")


def openapi_routes(schema: Callable[[], Schema]) -> APIRouter:
    """Return the route of /docs; `schema` returns the OpenAPI document."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(render_page(schema()), headers=HEADERS)

    return router


def render_page(api: Schema) -> str:
    """Return the HTML page of an OpenAPI document: endpoints with examples first, then all types."""
    title = escape(f"{api['info']['title']} {api['info']['version']}: HTTP API")
    calls = [(path, method, call) for path, methods in api["paths"].items() for method, call in methods.items()]
    entries = "".join(
        f'<li><a href="#{_anchor(path, method)}"><code>{method.upper()} {escape(path)}</code></a></li>'
        for path, method, _ in calls
    )
    sections = "".join(_call(api, path, method, call) for path, method, call in calls)
    types = "".join(_type_section(api, name) for name in sorted(api["components"]["schemas"]))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style>"
    )
    body = (
        f'<h1>{title}</h1><p>{INTRO}</p><nav aria-label="Endpoints"><ul>{entries}</ul></nav>'
        f'<main>{sections}<h2 id="types">Types</h2>{types}</main>'
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _anchor(path: str, method: str) -> str:
    return escape(f"{method}{re.sub(r'[^a-z0-9]+', '-', path.lower())}")


def _call(api: Schema, path: str, method: str, call: Schema) -> str:
    """Return the section of one endpoint: description, example, request fields, responses."""
    found = (
        f'<h2 id="{_anchor(path, method)}"><code>{method.upper()} {escape(path)}</code></h2>'
        f"<p>{_text(call.get('description', ''))}</p>"
    )
    content = call.get("requestBody", {}).get("content", {}).get("application/json")
    found += f"<h3>Example</h3><pre>{escape(_curl(api, method, path, content))}</pre>"
    if content is not None:
        found += f"<h3>Fields</h3>{_fields(api, content['schema'])}"
    rows = "".join(
        f"<tr><td><code>{status}</code></td>"
        f"<td>{_text(response.get('description', ''))}{_response_type(response)}</td></tr>"
        for status, response in call["responses"].items()
    )
    return f"{found}<h3>Responses</h3><table>{rows}</table>"


def _curl(api: Schema, method: str, path: str, content: Schema | None) -> str:
    """Return a command that calls an endpoint, with the examples of its fields as body."""
    url = f"http://127.0.0.1:8000{re.sub(r'{([^}]+)}', lambda found: found[1].upper(), path)}"
    if content is None:
        return f"curl {url}" if method == "get" else f"curl {url} -X {method.upper()}"
    properties = _resolved(api, content["schema"])["properties"]
    body = {name: field["examples"][0] for name, field in properties.items() if "examples" in field}
    return f"curl {url} \\\n  -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body)}'"


def _response_type(response: Schema) -> str:
    """Return the type of a response's body."""
    schema = response.get("content", {}).get("application/json", {}).get("schema", {})
    return f": {_type_name(schema)}" if schema else ""


def _type_section(api: Schema, name: str) -> str:
    """Return the description and the fields of one type."""
    schema = api["components"]["schemas"][name]
    description = _text(schema.get("description", ""))
    return f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{description}</p>{_fields(api, schema)}'


def _fields(api: Schema, schema: Schema) -> str:
    rows = "".join(_rows(api, schema))
    return f"<table>{rows}</table>" if rows else ""


def _rows(api: Schema, schema: Schema) -> Iterator[str]:
    resolved = _resolved(api, schema)
    required = resolved.get("required", ())
    for name, field in resolved.get("properties", {}).items():
        mark = '<span class="required">Required.</span> ' if name in required else ""
        described = {**_resolved(api, field), **field}  # a reference has no description that its type has, too
        note = f"{mark}{_text(described.get('description', ''))}{_limits(field)}"
        yield f"<tr><td><code>{escape(name)}</code></td><td>{_type_name(field)}</td><td>{note}</td></tr>"


def _limits(field: Schema) -> str:
    """Return the range and the default of a field, if it has them and its description does not say so."""
    low, high, above = (field.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
    notes = []
    if above is not None:
        notes.append(f"above {above:g}, at most {high:g}" if high is not None else f"above {above:g}")
    elif low is not None and abs(low) < MAX_SHOWN_LIMIT:
        notes.append(f"{low:g} to {high:g}" if high is not None else f"{low:g} or more")
    if field.get("default") is not None:
        notes.append(f"default {json.dumps(field['default'])}")
    shown = [note for note in notes if note not in field.get("description", "")]
    return f" ({escape(', '.join(shown))})" if shown else ""


def _text(text: str) -> str:
    """Return a description as HTML; text in backticks is code."""
    return BACKTICKS.sub(r"<code>\1</code>", escape(text))


def _resolved(api: Schema, schema: Schema) -> Schema:
    """Return the schema that a reference points to."""
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Schema = api["components"]["schemas"][name] if name else schema
    return found


def _type_name(schema: Schema) -> str:
    """Return a short name of a schema's type as HTML, with links to types of this page."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind for each in schema["anyOf"] if (kind := _type_name(each)) != "null"))
    if "enum" in schema:
        return escape(", ".join(map(str, schema["enum"])))
    if "const" in schema:
        return escape(str(schema["const"]))
    if schema.get("type") == "array":
        return f"list of {_type_name(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))

"""The OpenAPI schema, with the limits of this server: ids of its vocabulary, its settings, its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from foretell.server.openai.requests import Speculative
from foretell.server.service import Service

# Lists of token ids in request bodies.
TOKEN_FIELDS = [
    ("CompletionRequest", "prompt"),
    ("LlamaCompletionRequest", "prompt"),
    ("DetokenizeRequest", "tokens"),
    *[
        (name, field)
        for name in ("CompletionRequest", "ChatCompletionRequest")
        for field in ("stop_token_ids", "allowed_token_ids")
    ],
]
STOP_FIELDS = ("stop", "stop_sequences")


def openapi_schema(app: FastAPI, service: Service) -> dict[str, Any]:
    """Return the OpenAPI schema. Invalid bodies get 400, so FastAPI's 422 responses are removed."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = schema["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        _describe_tokens(schemas, service)
        _describe_limits(schemas, service)
        _describe_unknown_fields(schemas, service)
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_tokens(schemas: dict[str, Any], service: Service) -> None:
    """State the range of token ids, whether a prompt may be empty, and whether the model fills gaps."""
    largest, tokenizer = service.assembly.requests.limits.vocab - 1, service.assembly.tokenizer
    for name, field in TOKEN_FIELDS:
        for integers in _items(schemas[name]["properties"][field], "integer"):
            integers |= {"minimum": 0, "maximum": largest}
    for name in ("CompletionRequest", "LlamaCompletionRequest"):
        prompt = schemas[name]["properties"]["prompt"]
        if not tokenizer.encode(""):
            for texts in [each for each in prompt["anyOf"] if each["type"] == "string"]:
                texts["minLength"] = 1
            if name == "CompletionRequest":
                for texts in _items(prompt, "string"):
                    texts["minLength"] = 1
    if tokenizer.fim is None:
        for name in ("CompletionRequest", "OllamaGenerateRequest"):
            for texts in [each for each in schemas[name]["properties"]["suffix"]["anyOf"] if each["type"] == "string"]:
                texts["maxLength"] = 0


def _describe_limits(schemas: dict[str, Any], service: Service) -> None:
    """State the limits that are settings of the server."""
    config = service.config
    for schema in schemas.values():
        properties = schema.get("properties", {})
        for name in STOP_FIELDS:
            for texts in _arrays(properties.get(name)):
                texts["maxItems"] = config.max_stop
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        properties = schemas[name]["properties"]
        properties["n"]["maximum"] = min(config.max_n, service.engine.max_sequences)
        for field in ("logprobs", "top_logprobs"):
            if "maximum" in properties.get(field, {}):
                properties[field]["maximum"] = min(properties[field]["maximum"], config.max_logprobs)
    for prompts in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        if prompts.get("items", {}).get("type") in ("string", "array"):
            prompts["maxItems"] = config.max_prompts


def _describe_unknown_fields(schemas: dict[str, Any], service: Service) -> None:
    if not service.config.strict_fields:
        for name, schema in schemas.items():
            if name != Speculative.__name__ and schema.get("additionalProperties") is False:
                del schema["additionalProperties"]


def _arrays(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the lists in a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            yield schema
        yield from (found for value in schema.values() for found in _arrays(value))
    elif isinstance(schema, list):
        yield from (found for value in schema for found in _arrays(value))


def _items(schema: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the items of this type in the lists of a schema."""
    for each in _arrays(schema):
        items = each.get("items", {})
        yield from (choice for choice in (items, *items.get("anyOf", ())) if choice.get("type") == kind)

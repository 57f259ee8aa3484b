"""What a JSON schema permits as the value of an argument: its types, and its options if they are listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ALTERNATIVES = ("anyOf", "oneOf")
MAX_DEPTH = 32  # of references and alternatives within each other
TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)

Types = frozenset[str] | None  # None: any


def type_of(value: Any) -> str:
    """Return the name of a value's type in JSON schemas."""
    return next((name for kind, name in TYPES if isinstance(value, kind)), "null")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within `root` refers to; others and unknown references as they are."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if target is None:
            return schema
        schema = target
    return schema


def permitted_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Types:
    """Return the types of the values that a schema permits."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    given = schema.get("type")
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str)) | _nullable(schema)
    options = listed_options(schema)
    if options is not None:
        return frozenset(map(type_of, options))
    for name in ALTERNATIVES:
        choices = schema.get(name)
        if isinstance(choices, list) and choices:
            return _union([permitted_types(choice, root, depth + 1) for choice in choices])
    return None


def permitted_options(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Any] | None:
    """Return all values that a schema permits; None if it does not list them."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    options = listed_options(schema)
    if options is None and schema.get("type") == "null":
        return [None]
    for name in ALTERNATIVES if options is None else ():
        choices = schema.get(name)
        if isinstance(choices, list) and choices:
            lists = [permitted_options(choice, root, depth + 1) for choice in choices]
            return None if None in lists else [option for each in lists for option in each or ()]
    return options


def listed_options(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of `enum` or `const`; None without them."""
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) and options else None


def is_text(types: Types) -> bool:
    """Return whether a value is a string for certain."""
    return types == frozenset(("string",))


def permits(types: Types, value: Any) -> bool:
    """Return whether a value is of one of the types."""
    name = type_of(value)
    return types is None or name in types or (name == "integer" and "number" in types)


def _nullable(schema: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(("null",)) if schema.get("nullable") is True else frozenset()


def _union(every: Sequence[Types]) -> Types:
    found: frozenset[str] = frozenset()
    for types in every:
        if types is None:
            return None
        found |= types
    return found

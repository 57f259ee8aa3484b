"""Lark rules of Gemma's calls, whose arguments are JSON without quotes around keys and with a tag as quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.server.openai.chat_requests import FunctionDefinition

from .gemma import Gemma4Parser
from .lark import LarkTokens, json_rule
from .schemas import ALTERNATIVES, listed_options

PLAIN_KEY = re.compile(r"[\w.\-]+")  # a key without quotes
SCALARS = ("integer", "number", "boolean", "null")
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# A value without a schema, to any depth.
ANY_VALUE = """\
any: any_string | %json {{"type": ["number", "boolean", "null"]}} | any_list | any_object
any_string: {quote} words
any_list: "[" (any ("," any)*)? "]"
any_object: "{{" (any_member ("," any_member)*)? "}}"
any_member: /[A-Za-z_][A-Za-z0-9_.\\-]*/ ":" any
"""


def gemma_call(form: type[Gemma4Parser], functions: Sequence[FunctionDefinition], tokens: LarkTokens) -> str:
    """Return the rules `call` of one call of any of the functions, after its start tag."""
    rules = _GemmaRules(form, tokens)
    calls = [rules.call(function) for function in functions]
    return "\n".join([f"call: {' | '.join(calls)}", *rules.lines]) + "\n" + rules.shared()


class _GemmaRules:
    """Collects the rules of schemas; each is named, so that a schema may refer to itself."""

    def __init__(self, form: type[Gemma4Parser], tokens: LarkTokens) -> None:
        self.form, self.tokens = form, tokens
        self.lines: list[str] = []
        self._named: dict[tuple[int, str], str] = {}  # rules of references, by function
        self._root: Mapping[str, Any] = {}
        self._function = -1

    def call(self, function: FunctionDefinition) -> str:
        """Return the rule of one function's call."""
        self._root, self._function = function.parameters or {"properties": {}}, self._function + 1
        opening = self.tokens.text(f"call:{function.name}")
        end = self.tokens.text(self.form.end_tag)
        return self._add(f"{opening} {self._object(self._root)} {end}")

    def shared(self) -> str:
        """Return the rules that all calls use."""
        return ANY_VALUE.format(quote=self.tokens.text(self.form.quote)) + self.tokens.until("words", self.form.quote)

    def _add(self, body: str) -> str:
        name = f"g{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        """Return the body of a rule for the values of a schema."""
        if not isinstance(schema, Mapping):
            return "any"
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"])
        options = listed_options(schema)
        if options is not None:
            return f"({' | '.join(map(self._constant, options))})"
        for name in ALTERNATIVES:
            if isinstance(schema.get(name), list) and schema[name]:
                return f"({' | '.join(map(self._value, schema[name]))})"
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return f"({' | '.join(self._typed(kind, schema) for kind in kinds)})"

    def _typed(self, kind: Any, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return "any_string"
            case "array":
                return self._list(schema)
            case "object":
                return self._object(schema)
        if kind not in SCALARS:
            return "any"
        limits = {name: schema[name] for name in LIMITS if name in schema and kind in ("integer", "number")}
        return self._add(json_rule({"type": kind, **limits}))

    def _reference(self, reference: str) -> str:
        """Return the name of a reference's rule, which is written once."""
        key = (self._function, reference)
        if key not in self._named:
            target: Any = self._root if reference.startswith("#") else None
            for name in reference.strip("#/").split("/") if reference.strip("#/") else ():
                target = target.get(name) if isinstance(target, Mapping) else None
            self._named[key] = self._add("")
            place = len(self.lines) - 1
            self.lines[place] = f"{self._named[key]}: {self._value(target)}"
        return self._named[key]

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self._add(self._value(schema.get("items")))
        some = f'{item} ("," {item})*'
        return f'"[" {some} "]"' if schema.get("minItems") else f'"[" ({some})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return an object with the members of the schema, in the order in which templates show them."""
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping):
            return "any_object"
        required = required if isinstance(required, list) else []
        rest = first = ""  # the members from here on, after another one and as the first ones
        for key, value in sorted(properties.items(), key=lambda item: str(item[0]).lower(), reverse=True):
            member = self._add(f"{self._key(str(key))} {self._value(value)}")
            chosen = f"{member} {rest}"
            if key in required:
                first, rest = self._add(chosen), self._add(f'"," {chosen}')
            else:
                first = self._add(f"{chosen} | {first}" if first else f"({chosen})?")
                rest = self._add(f'("," {member})? {rest}')
        return f'"{{" {first} "}}"'

    def _key(self, key: str) -> str:
        quote = self.tokens.text(self.form.quote)
        return json.dumps(f"{key}:") if PLAIN_KEY.fullmatch(key) else f'{quote} {json.dumps(key)} {quote} ":"'

    def _constant(self, value: Any) -> str:
        """Return the part of a rule that derives one value."""
        quote = self.tokens.text(self.form.quote)
        if isinstance(value, str):
            return f"{quote} {json.dumps(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, list):
            items = ' "," '.join(map(self._constant, value))
            return f'"[" {items} "]"'
        if isinstance(value, Mapping):
            members = ' "," '.join(f"{self._key(str(key))} {self._constant(each)}" for key, each in value.items())
            return f'"{{" {members} "}}"'
        return json.dumps(json.dumps(value))

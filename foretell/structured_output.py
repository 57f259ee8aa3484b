"""Grammars of structured outputs, as a request specifies them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from foretell.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

FIELD = "structured_outputs"
MAX_CHOICES = 1024
MAX_CHOICE_LENGTH = 4096  # characters
WHITESPACE = r"[ \t\r\n]{1,40}"  # bounded, or a small model may generate line breaks until max_tokens
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps does


@dataclass(frozen=True)
class GrammarSpec:
    """One of five kinds of grammar. Equal specs compile to the same grammar.

    `text` is the JSON text of a schema, a regular expression for the entire output, or a Lark grammar in llguidance's
    dialect. Without `any_whitespace` JSON is on one line with ", " and ": ", as json.dumps writes it: then the grammar
    forces more tokens, which are drafted for free.
    """

    kind: Kind
    text: str = ""
    choices: tuple[str, ...] = ()
    any_whitespace: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise RequestError(FIELD, f"has no kind {self.kind!r}; use one of {', '.join(get_args(Kind))}")
        self._check_text()
        self._check_choices()

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, any_whitespace: bool = True) -> GrammarSpec:
        """Return a grammar of JSON that satisfies `schema`, a value or JSON text. Properties come in its order."""
        if isinstance(schema, str):
            schema = _parse(schema)
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise RequestError(f"{FIELD}.json_schema", "must be a JSON object, or true for any JSON")
        return cls("json_schema", _text_of(schema), any_whitespace=any_whitespace)

    @classmethod
    def json_object(cls, *, any_whitespace: bool = True) -> GrammarSpec:
        """Return a grammar of any JSON object."""
        return cls("json_object", any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Return a grammar of strings that `pattern` matches from end to end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> GrammarSpec:
        """Return a grammar of exactly the strings in `choices`."""
        if isinstance(choices, str):
            raise RequestError(f"{FIELD}.choice", "must be a list of strings, not one string")
        return cls("choice", choices=tuple(choices))

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """Return a grammar of strings that the rule `start` of a Lark grammar derives."""
        return cls("lark", grammar)

    @property
    def field(self) -> str:
        """Return the field that errors about this spec name."""
        return f"{FIELD}.{self.kind}"

    @property
    def size(self) -> int:
        """Return the size in bytes of UTF-8."""
        return len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)

    def bounded_schema(self) -> dict[str, Any]:
        """Return the JSON schema with this spec's whitespace options; those that the schema sets take precedence."""
        schema = json.loads(self.text) if self.kind == "json_schema" else {"type": "object"}
        options: dict[str, Any] = {"whitespace_pattern": WHITESPACE} if self.any_whitespace else ONE_LINE
        own = schema.get("x-guidance", {})
        return {**schema, "x-guidance": options | own if isinstance(own, dict) else own}

    def _check_text(self) -> None:
        wanted = self.kind in ("json_schema", "regex", "lark")
        if not isinstance(self.text, str) or wanted != bool(self.text.strip()):
            raise RequestError(self.field, "must be a string that is not empty" if wanted else "takes no text")
        _check_unicode(self.field, self.text)

    def _check_choices(self) -> None:
        if self.kind != "choice":
            if self.choices:
                raise RequestError(self.field, "takes no choices")
            return
        if not 1 <= len(self.choices) <= MAX_CHOICES:
            raise RequestError(self.field, f"must have between 1 and {MAX_CHOICES} choices, not {len(self.choices)}")
        for choice in self.choices:
            if not isinstance(choice, str) or not 1 <= len(choice) <= MAX_CHOICE_LENGTH:
                raise RequestError(self.field, f"each must be a string of 1 to {MAX_CHOICE_LENGTH} characters")
            _check_unicode(self.field, choice)


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RequestError(field, f"has half a surrogate pair at character {problem.start}") from None


def _parse(schema: str) -> Any:
    try:
        return json.loads(schema)
    except json.JSONDecodeError as problem:
        where = f"line {problem.lineno}, column {problem.colno}"
        raise RequestError(f"{FIELD}.json_schema", f"is not JSON: {problem.msg} at {where}") from None
    except RecursionError:
        raise RequestError(f"{FIELD}.json_schema", "is nested too deeply; use fewer levels") from None


def _text_of(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as problem:
        raise RequestError(f"{FIELD}.json_schema", f"is not JSON: {problem}") from None
    except RecursionError:
        raise RequestError(f"{FIELD}.json_schema", "is nested too deeply; use fewer levels") from None

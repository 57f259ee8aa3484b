"""Compiling grammars: what is refused and how, what is kept, and that any thread may ask."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from foretell.errors import RequestError
from foretell.sampling.grammar import GrammarCompiler
from foretell.structured_output import MAX_CHOICES, GrammarSpec
from tests.sampling.grammars import EXAMPLES, compiler, text_of, tokenizer, write

REFUSED: dict[str, tuple[Callable[[], GrammarSpec], str]] = {
    "no such kind": (lambda: GrammarSpec("xml", "<a/>"), "has no kind 'xml'; use one of json_schema"),  # type: ignore[arg-type]
    "not JSON": (lambda: GrammarSpec.json_schema("{'a': 1}"), "is not JSON: .* at line 1, column 2"),
    "no schema": (lambda: GrammarSpec.json_schema("[1]"), "must be a JSON object"),
    "the schema of nothing": (lambda: GrammarSpec.json_schema(False), "must be a JSON object, or true"),
    "not a JSON number": (lambda: GrammarSpec.json_schema({"const": float("nan")}), "is not JSON"),
    "not a JSON value": (lambda: GrammarSpec.json_schema({"const": {1, 2}}), "is not JSON"),
    "nested too deeply": (lambda: GrammarSpec.json_schema('{"not":' * 9999 + "{}" + "}" * 9999), "too deeply"),
    "nested deeply": (lambda: GrammarSpec.json_schema('{"items":' * 300 + "{}" + "}" * 300), "recursion limit"),
    "unknown keyword": (lambda: GrammarSpec.json_schema({"not": {"type": "string"}}), "not"),
    "unknown type": (lambda: GrammarSpec.json_schema({"type": "text"}), "text"),
    "unsatisfiable": (lambda: GrammarSpec.json_schema({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisf"),
    "unknown reference": (lambda: GrammarSpec.json_schema({"$ref": "#/$defs/none"}), "none"),
    "remote reference": (lambda: GrammarSpec.json_schema({"$ref": "https://example.com/a"}), "example.com"),
    "bad spacing": (lambda: GrammarSpec.json_schema({"x-guidance": 3}), "x-guidance|invalid type"),
    "object with text": (lambda: GrammarSpec("json_object", "{}"), "takes no text"),
    "no regex": (lambda: GrammarSpec.regex(""), "must be a string that is not empty"),
    "open bracket": (lambda: GrammarSpec.regex("[a-"), "unclosed character class"),
    "look-ahead": (lambda: GrammarSpec.regex("(?=a)b"), "look-around"),
    "empty text only": (lambda: GrammarSpec.regex("(a{0})"), "allows no text but the empty one"),
    "nothing matches": (lambda: GrammarSpec.regex(r"[^\s\S]"), ".+"),
    "half a character": (lambda: GrammarSpec.regex("\ud83d"), "half a surrogate pair"),
    "no choices": (lambda: GrammarSpec.choice([]), "between 1 and"),
    "many choices": (lambda: GrammarSpec.choice(["a"] * (MAX_CHOICES + 1)), "between 1 and"),
    "an empty choice": (lambda: GrammarSpec.choice(["a", ""]), "each must be a string"),
    "a long choice": (lambda: GrammarSpec.choice(["a" * 5000]), "each must be a string"),
    "a choice that is no text": (lambda: GrammarSpec.choice([1]), "each must be a string"),  # type: ignore[list-item]
    "one string for choices": (lambda: GrammarSpec.choice("yes"), "must be a list of strings"),
    "choices for a regex": (lambda: GrammarSpec("regex", "a", ("b",)), "takes no choices"),
    "no start": (lambda: GrammarSpec.lark('begin: "a"'), "start"),
    "bad Lark": (lambda: GrammarSpec.lark("start: ("), ".+"),
    "JSON for Lark": (lambda: GrammarSpec.lark('{"grammars": []}'), ".+"),
    "cannot be taken back": (lambda: GrammarSpec.lark('start: a "z"\na[stop="x"]: /[a-y]+/'), "rollback not supported"),
    "too long": (lambda: GrammarSpec.regex("x" * 70_000), "has 70000 bytes; at most 65536 are accepted"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_followed_is_refused_in_one_line(what: str) -> None:
    make, reason = REFUSED[what]
    with pytest.raises(RequestError, match=reason) as caught:
        compiler("byte-level").compile(make())
    assert caught.value.field.startswith("structured_outputs")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_schema_of_any_depth_is_refused_by_its_field() -> None:
    """Near the limit of the stack, which a test starts deep in, text can be parsed that cannot be written again."""
    for depth in range(880, 1000):
        with pytest.raises(RequestError, match="structured_outputs.json_schema") as caught:
            compiler("byte-level").compile(GrammarSpec.json_schema('{"a":' * depth + "{}" + "}" * depth))
        assert "\n" not in str(caught.value)


def test_a_schema_may_be_text_or_a_value_and_equal_ones_are_one() -> None:
    specs = {GrammarSpec.json_schema('{"type": "object"}'), GrammarSpec.json_schema({"type": "object"})}
    assert len(specs) == 1
    compiler("byte-level").compile(GrammarSpec.json_schema(True))


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        GrammarCompiler(tokenizer("byte-level"), 500).compile(GrammarSpec.json_object())


def test_threads_compile_and_follow_the_same_grammars_at_once() -> None:
    shared = GrammarCompiler(tokenizer("byte-level"), 500, kept=3)
    names = ["person", "one-line person", "tree", "regex", "choice"] * 4

    def text(seed: int) -> bool:
        example = EXAMPLES[names[seed]]
        follower = shared.compile(example.spec).matcher(tokenizer("byte-level").end_ids)
        return example.is_valid(
            text_of(tokenizer("byte-level"), write(tokenizer("byte-level"), follower, random.Random(seed)))
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(text, range(len(names))))


def test_equal_specs_are_compiled_once_while_they_are_kept() -> None:
    few = GrammarCompiler(tokenizer("byte-level"), 500, kept=2)
    first, second, third = (few.compile(GrammarSpec.regex(text)) for text in "abc")
    assert few.compile(GrammarSpec.regex("b")) is second
    few.compile(GrammarSpec.regex("d"))
    assert few.compile(GrammarSpec.regex("b")) is second
    assert few.compile(GrammarSpec.regex("c")) is not third
    assert few.compile(GrammarSpec.regex("a")) is not first


def test_a_schema_may_be_too_large() -> None:
    with pytest.raises(RequestError, match="has 101 bytes; at most 100 are accepted"):
        GrammarCompiler(tokenizer("byte-level"), 500, max_bytes=100).compile(GrammarSpec.regex("x" * 101))

"""Grammars after reasoning and combined with tool calls keep the rules of the plain grammar."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foretell.build.engine_builder import Assembly
from foretell.errors import RequestError
from foretell.server.chat_grammar import ChatGrammars
from foretell.server.openai.chat_requests import FunctionDefinition
from foretell.server.parsers.tools.grammar import FORMATS
from foretell.server.parsers.tools.lark import LarkTokens
from foretell.structured_output import GrammarSpec
from foretell.tokenizer.reasoning_tags import THINK

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
THOUGHT = "a thought</think>"
FUNCTIONS = [FunctionDefinition(name="f")]
PLAIN = ChatGrammars(LarkTokens(), THINK)
THINKING = ChatGrammars(LarkTokens(), THINK, in_reasoning=True)
Embed = Callable[[GrammarSpec], GrammarSpec]
# How a grammar is embedded, and the output that precedes its answer.
EMBEDDINGS: dict[str, tuple[Embed, str]] = {
    "plain": (PLAIN.answer, ""),
    "thinking": (THINKING.answer, THOUGHT),
    "tools": (lambda spec: PLAIN.answer_or_calls(spec, FORMATS["hermes"], FUNCTIONS, parallel=True), ""),
    "thinking and tools": (
        lambda spec: THINKING.answer_or_calls(spec, FORMATS["hermes"], FUNCTIONS, parallel=True),
        THOUGHT,
    ),
}


def accepts(assembly: Assembly, spec: GrammarSpec, text: str) -> bool:
    """Return whether the grammar allows all tokens of `text`."""
    matcher = assembly.grammars.compile(spec).matcher(())
    tokens = assembly.tokenizer.encode(text, add_special=False)
    return matcher.count_allowed(tokens) == len(tokens)


@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_the_whitespace_bound_holds_in_every_embedding(assembly: Assembly, embedding: str, kind: str) -> None:
    embed, before = EMBEDDINGS[embedding]
    spec = GrammarSpec.json_schema(SCHEMA) if kind == "json_schema" else GrammarSpec.json_object()
    grammar = embed(spec)
    assert accepts(assembly, grammar, before + "{" + "\n" * 40 + '"a": 1}')
    assert not accepts(assembly, grammar, before + "{" + "\n" * 41 + '"a": 1}')


@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_disable_any_whitespace_holds_in_every_embedding(assembly: Assembly, embedding: str, kind: str) -> None:
    embed, before = EMBEDDINGS[embedding]
    if kind == "json_schema":
        spec = GrammarSpec.json_schema(SCHEMA, any_whitespace=False)
    else:
        spec = GrammarSpec.json_object(any_whitespace=False)
    grammar = embed(spec)
    assert accepts(assembly, grammar, before + '{"a": 1}')
    assert not accepts(assembly, grammar, before + '{\n"a": 1}')
    assert not accepts(assembly, grammar, before + '{"a":  1}')


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_the_whitespace_options_of_a_schema_take_precedence(assembly: Assembly, embedding: str) -> None:
    embed, before = EMBEDDINGS[embedding]
    grammar = embed(GrammarSpec.json_schema(SCHEMA | {"x-guidance": {"whitespace_pattern": "~{0,2}"}}))
    assert accepts(assembly, grammar, before + '{~~"a"~:~1}')
    assert not accepts(assembly, grammar, before + '{~~~"a":1}')


SLASHES = [
    ("a/b", "a/b", "ab"),
    (r"\d\/\d", "1/2", r"1\/2"),
    (r"a\\/b", r"a\/b", "a/b"),
    (r"[/]x", "/x", "x"),
    (r"[\/]x", "/x", r"\/x"),
    ("a\nb", "a\nb", "ab"),
    (r'a\/ | "free" | /b', "a/ ", '"free"'),  # a pattern that could close the literal and add rules of its own
]


@pytest.mark.parametrize(("pattern", "good", "bad"), SLASHES)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_slashes_in_a_regex_are_escaped_once(
    assembly: Assembly, embedding: str, pattern: str, good: str, bad: str
) -> None:
    embed, before = EMBEDDINGS[embedding]
    grammar = embed(GrammarSpec.regex(pattern))
    assert accepts(assembly, grammar, before + good)
    assert not accepts(assembly, grammar, before + bad)


@pytest.mark.parametrize("embedding", ["thinking", "tools", "thinking and tools"])
def test_a_trailing_backslash_cannot_open_the_rest_of_the_grammar(assembly: Assembly, embedding: str) -> None:
    embed, _ = EMBEDDINGS[embedding]
    with pytest.raises(RequestError):
        assembly.grammars.compile(embed(GrammarSpec.regex("a\\")))

"""Reasoning and tool call parsers: independent of chunk sizes, and all other text is unchanged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.server.chat_template import call_arguments
from foretell.server.choice_state import ChoiceState, ParsedOutput
from foretell.server.parsers.base import OutputParser
from foretell.server.parsers.reasoning import ReasoningParser, ends_in_reasoning
from foretell.server.parsers.tools import TOOL_PARSERS, detect_tool_parser
from foretell.tokenizer.reasoning_tags import REASONING_TAGS, detect_reasoning

SHORT = 36
NAMES = frozenset({"f", "g"})
Parts = list[tuple[str, str]]
PARAMETERS = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "o": {"type": "object"},
            "t": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "i": {"type": ["string", "integer"]},
            "r": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
        },
        "$defs": {"Text": {"type": "string"}},
    }
}

NASTY = json.dumps({"a": 'x }"]\\ </tool_call> [TOOL_CALLS]', "b": [1, {"c": "{"}], "é": "ü\n"}, ensure_ascii=False)

CALLS: dict[str, list[tuple[str, Parts]]] = {
    "hermes": [
        (
            'Well.\n<tool_call>\n{"name": "f", "arguments": ' + NASTY + "}\n</tool_call>",
            [("content", "Well."), ("call", "f"), ("arguments", NASTY)],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"arguments": {"x": 1}, "name": "g"}'
            "\n</tool_call>\n bye ",
            [("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", '{"x": 1}'), ("content", "bye ")],
        ),
        ('<tool_call>{"name":"f"}</tool_call>\n', [("call", "f"), ("arguments", "{}")]),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', [("call", "f"), ("arguments", '{"a":1}')]),
        ('<tool_call>{"name":"f","arguments":{"a":[1', [("call", "f"), ("arguments", '{"a":[1')]),
        (
            '<tool_call>{"name":"f","arguments":{}}\n<tool_call>{"name":"g","arguments":{}}</tool_call>',
            [("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", "{}")],
        ),
        ("a <tool_call>nonsense</tool_call> x", [("content", "a <tool_call>nonsense</tool_call> x")]),
        ('<tool_call>{"arguments": {}}</tool_call>', [("content", '<tool_call>{"arguments": {}}</tool_call>')]),
        ("a < b <tool", [("content", "a < b <tool")]),
        (" \n words \n", [("content", " \n words \n")]),
    ],
    "llama3": [
        (
            '<|python_tag|>{"name": "f", "parameters": ' + NASTY + '}; {"name":"g","parameters":{}}',
            [("call", "f"), ("arguments", NASTY), ("call", "g"), ("arguments", "{}")],
        ),
        (
            ' {"name":"f","parameters":{"a": "b c"}} thanks',
            [("call", "f"), ("arguments", '{"a": "b c"}'), ("content", "thanks")],
        ),
        ('{"name": "Bob", "age": 3} ok', [("content", '{"name": "Bob", "age": 3} ok')]),
        ('{"name":"zz","parameters":{"a":1}}', [("content", '{"name":"zz","parameters":{"a":1}}')]),
        ('plain {"name":"f","parameters":{}}', [("content", 'plain {"name":"f","parameters":{}}')]),
        ("<|python_tag|>print(1)", [("content", "<|python_tag|>print(1)")]),
        ("{", [("content", "{")]),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": ' + NASTY + '}, {"name": "g", "arguments": {}}]',
            [("call", "f"), ("arguments", NASTY), ("call", "g"), ("arguments", "{}")],
        ),
        (
            "ok [TOOL_CALLS]f[ARGS]" + NASTY + "[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}",
            [("content", "ok"), ("call", "f"), ("arguments", NASTY), ("call", "g"), ("arguments", "{}")],
        ),
        ('[{"name":"f","arguments":{"x":1}}]', [("call", "f"), ("arguments", '{"x":1}')]),
        ("[1, 2, 3]", [("content", "[1, 2, 3]")]),
        ('[{"a":1}] more', [("content", '[{"a":1}] more')]),
        ("[TOOL_CALLS]", [("content", "[TOOL_CALLS]")]),
        ('[TOOL_CALLS]b ad{"x"} text', [("content", '[TOOL_CALLS]b ad{"x"} text')]),
        ('a [TOOL_CALLS]b ad{"x"} text', [("content", 'a [TOOL_CALLS]b ad{"x"} text')]),
        ("a [TOOL_CALLS][{}]", [("content", "a [TOOL_CALLS][{}]")]),
        ("words [TOOL", [("content", "words [TOOL")]),
    ],
    "qwen3_coder": [
        (
            'Ok.\n<tool_call>\n<function=f>\n<parameter=s>\nif a < "b":\n\tc\n\n</parameter>\n<parameter=n>\n3\n'
            '</parameter>\n<parameter=o>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>\nbye',
            [
                ("content", "Ok."),
                ("call", "f"),
                ("arguments", '{"s": "if a < \\"b\\":\\n\\tc\\n", "n": 3, "o": {"a": [1]}}'),
                ("content", "bye"),
            ],
        ),
        (
            "<tool_call><function=g></function></tool_call><tool_call>\n<function=f>\n<parameter=s>\n</parameter>"
            "<parameter=n>two</parameter></tool_call>",
            [("call", "g"), ("arguments", "{}"), ("call", "f"), ("arguments", '{"s": "", "n": "two"}')],
        ),
        ("<tool_call>\n<function=f>\n<parameter=s>\nO</para", [("call", "f"), ("arguments", '{"s": "O</para')]),
        ('<tool_call>{"name": "f"}', [("content", '<tool_call>{"name": "f"}')]),
        ("<tool_call>\n<function=a b>", [("content", "<tool_call>\n<function=a b>")]),
        ("<tool_call>\n<func", [("content", "<tool_call>\n<func")]),
        ("<tool_call><function=f><parameter=q>True</parameter>", [("call", "f"), ("arguments", '{"q": true')]),
        (
            "So:\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>\n<function=g></function>\nbye",
            [
                ("content", "So:"),
                ("call", "f"),
                ("arguments", '{"n": 3}'),
                ("call", "g"),
                ("arguments", "{}"),
                ("content", "bye"),
            ],
        ),
        ("as <function=name> <function", [("content", "as <function=name> <function")]),
        *[
            (
                f"<tool_call><function=f><parameter=t>\n{text}\n</parameter></function></tool_call>",
                [("call", "f"), ("arguments", f'{{"t": {value}}}')],
            )
            for text, value in (
                ("123", '"123"'),
                ('{"a": [1]}', '"{\\"a\\": [1]}"'),
                ('"q"', '"\\"q\\""'),
                ("None", "null"),
                ("True", '"True"'),
            )
        ],
        (
            "<tool_call><function=f><parameter=i>12</parameter><parameter=r>1</parameter></function></tool_call>",
            [("call", "f"), ("arguments", '{"i": 12, "r": "1"}')],
        ),
    ],
    "glm": [
        (
            "Ok.\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\n<b </arg_value>\n<arg_key>n</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>\nbye",
            [("content", "Ok."), ("call", "f"), ("arguments", '{"s": "a\\n<b ", "n": 3}'), ("content", "bye")],
        ),
        (
            "<tool_call>g</tool_call><tool_call>f<arg_key>o</arg_key><arg_value>[1, null]</arg_value></tool_call>",
            [("call", "g"), ("arguments", "{}"), ("call", "f"), ("arguments", '{"o": [1, null]}')],
        ),
        ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</ar", [("call", "f"), ("arguments", '{"s": "a</ar')]),
        ('<tool_call>{"name": "f"}', [("content", '<tool_call>{"name": "f"}')]),
        ("a\n<tool_call>words\nof text", [("content", "a\n<tool_call>words\nof text")]),
        ("<tool_call>f", [("content", "<tool_call>f")]),
        (
            "<tool_call>f<arg_key>t</arg_key><arg_value>[1]</arg_value><arg_key>i</arg_key><arg_value>1.5</arg_value>"
            "</tool_call>",
            [("call", "f"), ("arguments", '{"t": "[1]", "i": "1.5"}')],
        ),
    ],
    "gemma4": [
        (
            'Ok <|tool_call>call:f{s:<|"|>a "q", {x}\n<|"|>,n:-3.5,o:{k:[true,null,<|"|><|"|>],e:{}}}<tool_call|> bye',
            [
                ("content", "Ok"),
                ("call", "f"),
                (
                    "arguments",
                    '{"s": "a \\"q\\", {x}\\n", "n": -3.5, "o": {"k": [true, null, ""], "e": {}}}',
                ),
                ("content", "bye"),
            ],
        ),
        ("<|tool_call>call:g{}<tool_call|>", [("call", "g"), ("arguments", "{}")]),
        (
            '<|tool_call>call:g{a:"x\\"y",<|"|>b c<|"|>:NaN}',
            [("call", "g"), ("arguments", '{"a": "x\\"y", "b c": "NaN"}')],
        ),
        ('<|tool_call>call:f{s:<|"|>a<|"', [("call", "f"), ("arguments", '{"s": "a<|\\"')]),
        ("a <|tool_call>words{", [("content", "a <|tool_call>words{")]),
        *[
            (f"<|tool_call>call:f{given}<tool_call|>!", [("call", "f"), ("arguments", arguments), ("content", "!")])
            for given, arguments in (
                ("{n:1,}", '{"n": 1}'),
                ('{s:<|"|>a<|"|>bc,n:1}', '{"s": "a", "n": 1}'),
                ('{s:<|"|>a<|"|>n:1}', '{"s": "a", "n": 1}'),
                ('{s:b<|"|>a<|"|>}', '{"s": "a"}'),
                ("{n:,m:[1,,2,],o}", '{"n": null, "m": [1, 2], "o": null}'),
                ("{{n:1}}", '{"n": 1}'),
                ("{o:[1}", '{"o": [1]}'),
                ("{o:{a:[1", '{"o": {"a": [1]}}'),
                ("{t:12:30,u:a b}", '{"t": "12:30", "u": "a b"}'),
                ('{a:"x\\d\\u00e9\\u0\\"y"}', '{"a": "x\\\\d\\u00e9\\\\u0\\"y"}'),
                ("{n:1]}", '{"n": 1}'),
            )
        ],
        ("<|tool_call>call:", [("content", "<|tool_call>call:")]),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:f{s:<escape>Oslo<escape>,n:3}<end_function_call>",
            [("call", "f"), ("arguments", '{"s": "Oslo", "n": 3}')],
        ),
        ("plain <escape>", [("content", "plain <escape>")]),
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>Hm <|x.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"s": "<|end"}<|call|>',
            [("reasoning", "Hm <|x."), ("call", "f"), ("arguments", '{"s": "<|end"}')],
        ),
        (
            "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.g<|channel|>commentary "
            "json<|message|>{}<|call|>",
            [("content", "First."), ("call", "g"), ("arguments", "{}")],
        ),
        (" to=functions.g<|message|>{}", [("call", "g"), ("arguments", "{}")]),
        ("<|channel|>final<|message|>Yes.\n<|return|>", [("content", "Yes.\n")]),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assi", [("reasoning", "Hm")]),
        ("No header <|message|>", [("content", "No header <|message|>")]),
        ('{"a": 1}', [("content", '{"a": 1}')]),
        ("<|channel|>fin", []),
    ],
}

REASONING: list[tuple[str, bool, Parts]] = [
    ("<think>\nhm </thin\n</think>\n\nyes ", False, [("reasoning", "hm </thin"), ("content", "yes ")]),
    ("\n hm</think>yes</think>", True, [("reasoning", "hm"), ("content", "yes</think>")]),
    ("no thought <think>", False, [("content", "no thought <think>")]),
    (" <think>endless", False, [("reasoning", "endless")]),
    ("<thi", False, [("content", "<thi")]),
    ("<think></think>", False, []),
]
TAGGED_REASONING: list[tuple[str, str, Parts]] = [
    ("gemma4", "<|channel>thought\nhm <channel\n<channel|>yes", [("reasoning", "hm <channel"), ("content", "yes")]),
    ("gemma4", "<|channel>thought\n<channel|>yes", [("content", "yes")]),
    ("gemma4", "<|channel>final", [("content", "<|channel>final")]),
    ("mistral", "[THINK]hm[/THINK]\nyes [THINK]", [("reasoning", "hm"), ("content", "yes [THINK]")]),
    ("seed_oss", "<seed:think>hm</seed:think>yes", [("reasoning", "hm"), ("content", "yes")]),
]


def read(reader: OutputParser | ParsedOutput, parts: Iterable[str]) -> Parts:
    """Return the parsed parts, with adjacent parts of a kind joined."""
    parsed: Parts = []
    for part in [each for text in parts for each in reader.feed(text)] + reader.finish():
        if parsed and parsed[-1][0] == part.kind != "call":
            parsed[-1] = (part.kind, parsed[-1][1] + part.text)
        else:
            parsed.append((part.kind, part.text))
    return parsed


def cuts(text: str) -> Iterable[list[str]]:
    """Check the text complete, by character, split at every position and, if short, at every two."""
    yield [text]
    yield list(text)
    for place in range(len(text) + 1):
        yield [text[:place], text[place:]]
    for first, second in itertools.combinations(range(len(text) + 1), 2) if len(text) <= SHORT else ():
        yield [text[:first], text[first:second], text[second:]]


def check(make: Callable[[], OutputParser | ParsedOutput], text: str, expected: Parts) -> None:
    for parts in cuts(text):
        assert read(make(), parts) == expected, parts


@pytest.mark.parametrize(("family", "text", "expected"), [(f, *case) for f, cases in CALLS.items() for case in cases])
def test_tool_calls_in_chunks_of_any_size(family: str, text: str, expected: Parts) -> None:
    check(lambda: TOOL_PARSERS[family](NAMES, PARAMETERS), text, expected)


@pytest.mark.parametrize(("text", "in_reasoning", "expected"), REASONING)
def test_reasoning_in_chunks_of_any_size(text: str, in_reasoning: bool, expected: Parts) -> None:
    check(lambda: ReasoningParser(in_reasoning), text, expected)


@pytest.mark.parametrize(("tags", "text", "expected"), TAGGED_REASONING)
def test_reasoning_between_the_tags_of_a_family(tags: str, text: str, expected: Parts) -> None:
    check(lambda: ReasoningParser(False, REASONING_TAGS[tags]), text, expected)
    start = REASONING_TAGS[tags].start
    if text.startswith(start):
        check(lambda: ReasoningParser(True, REASONING_TAGS[tags]), text.removeprefix(start), expected)
    assert ends_in_reasoning(f"x{start}\n", REASONING_TAGS[tags])


def test_reasoning_tags_are_detected_from_templates() -> None:
    for name, tags in REASONING_TAGS.items():
        assert detect_reasoning(f"x {tags.end}") == name
    assert detect_reasoning(None) is None and detect_reasoning("<|channel|>analysis<|message|>") is None


def test_thoughts_may_speak_of_calls_without_making_them() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    expected = [("reasoning", f"I could {call}"), ("call", "f"), ("arguments", "{}")]
    check(
        lambda: ParsedOutput(ReasoningParser(False), TOOL_PARSERS["hermes"](NAMES)),
        f"<think>I could {call}</think>{call}",
        expected,
    )


@pytest.mark.parametrize("one", [True, False])
def test_without_parallel_tool_calls_only_the_first_is_returned(one: bool) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    text += '<tool_call>{"name": "g", "arguments": {}}</tool_call>x'
    answer = ChoiceState(None, 0, ParsedOutput(None, TOOL_PARSERS["hermes"](NAMES)), one)  # type: ignore[arg-type]
    for char in text:
        answer.record(answer.output.feed(char))
    answer.record(answer.output.finish())
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    assert calls == ([("f", '{"a": 1}')] if one else [("f", '{"a": 1}'), ("g", "{}")]) and answer.content == "x"
    assert len({call.id for call in answer.tool_calls}) == len(calls)


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "{",
    "}",
    "[",
    "]",
]
PIECES += ["<function=f>", "</function>", "<parameter=s>", "<parameter=n>", "</parameter>", "<arg_key>s</arg_key>"]
PIECES += ["<arg_value>", "</arg_value>", "<|tool_call>call:f{", "<tool_call|>", '<|"|>', "<start_function_call>call:f"]
PIECES += ["<end_function_call>", "<escape>", "<|channel|>analysis", "<|message|>", "<|end|>", "to=functions.f", "s:"]
PIECES += ["<|channel>thought", "<channel|>", "[THINK]", "[/THINK]", "<parameter=t>", "1", '"', "null", "call:f{n:1,"]
PIECES += ['"name": "f"', '"arguments": ', '"parameters": ', ", ", ";", ":", "f", " ", "\n", "\\", '"', "é", "x"]


@pytest.mark.parametrize("family", TOOL_PARSERS)
@settings(max_examples=60, deadline=None)
@given(
    tags=st.sampled_from(sorted(REASONING_TAGS)),
    in_reasoning=st.booleans(),
    parts=st.lists(st.sampled_from(PIECES), max_size=24),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=9),
)
def test_parsing_does_not_depend_on_chunk_sizes(
    family: str, tags: str, in_reasoning: bool, parts: list[str], chunks: list[int]
) -> None:
    text = "".join(parts)

    def make() -> ParsedOutput:
        reasoning = ReasoningParser(in_reasoning, REASONING_TAGS[tags])
        return ParsedOutput(reasoning, TOOL_PARSERS[family](NAMES, PARAMETERS))

    pieces, start = [], 0
    for size in itertools.cycle(chunks):
        if start >= len(text):
            break
        pieces.append(text[start : start + size])
        start += size
    assert read(make(), pieces) == read(make(), [text]) == read(make(), list(text))


GEMMAS = ['<|"|>', "{", "}", "[", "]", ":", ",", '"', "\\", "u00e9", "a", "1", "-", " ", "\n", "true", "\u2028"]


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(GEMMAS), max_size=30), ends=st.booleans())
def test_gemmas_arguments_are_json_whatever_is_written(parts: list[str], ends: bool) -> None:
    parsed = read(TOOL_PARSERS["gemma4"](), ["<|tool_call>call:f{" + "".join(parts) + ("<tool_call|>" if ends else "")])
    arguments = "".join(text for kind, text in parsed if kind == "arguments")
    try:
        assert isinstance(json.loads(arguments), dict)
    except ValueError:  # cut within a string or before the end
        assert arguments.startswith("{") and call_arguments(arguments) is not None
        assert not ends or '"' in "".join(parts)


@pytest.mark.parametrize(("family", "text", "expected"), [(f, *case) for f, cases in CALLS.items() for case in cases])
def test_streamed_arguments_are_valid_prefixes(family: str, text: str, expected: Parts) -> None:
    """At every cut, the arguments so far are the start of the final ones, which are JSON unless the text was cut."""
    parser, calls, seen = TOOL_PARSERS[family](NAMES, PARAMETERS), [""], []
    for part in [part for char in text for part in parser.feed(char)] + parser.finish():
        calls += [""] if part.kind == "call" else []
        calls[-1] += part.text if part.kind == "arguments" else ""
        seen.append((len(calls) - 1, calls[-1]))
    final = [text for kind, text in expected if kind == "arguments"]
    assert calls[1:] == final and all(not i or final[i - 1].startswith(start) for i, start in seen)
    for arguments in final[:-1]:
        assert isinstance(json.loads(arguments), dict)
    assert all(call_arguments(arguments) is not None for arguments in final)


def test_tool_parsers_are_detected_from_templates() -> None:
    tools = "{% for t in tools %}"
    assert detect_tool_parser(tools + "<tool_call>") == "hermes"
    assert detect_tool_parser(tools + "[TOOL_CALLS]") == "mistral"
    assert detect_tool_parser(tools + '{"name": x, "parameters": y}') == "llama3"
    assert detect_tool_parser(tools + "<|python_tag|>") == "llama3"
    assert detect_tool_parser(tools + "<tool_call><function=") == "qwen3_coder"
    assert detect_tool_parser(tools + "<tool_call><arg_key>") == "glm"
    assert detect_tool_parser(tools + "<|tool_call>call:") == "gemma4"
    assert detect_tool_parser(tools + "<start_function_call>") == "functiongemma"
    assert detect_tool_parser(tools + "<|channel|>") == "harmony"
    assert detect_tool_parser("{{ messages }}") == "hermes" and detect_tool_parser(None) is None
    assert (
        detect_tool_parser(tools + "<tool_call>", "mistral") == "mistral"
        and detect_tool_parser(tools + "<tool_call>", "none") is None
    )
    assert ends_in_reasoning("assistant\n<think>\n") and not ends_in_reasoning("<think>\n\n</think>\n\n")

"""Grammars of calls in every format, with tags that are special tokens and without, after reasoning and lazily."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly, build_engine
from foretell.config import EngineConfig, SpeculationConfig
from foretell.server.config import ServerConfig
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.parsers.tools import TOOL_PARSERS
from foretell.server.preprocess import ClientContext, GenerationJob, RequestPreprocessor
from foretell.server.service import Service
from foretell.structured_output import GrammarSpec
from foretell.tokenizer.chat import ChatTemplates
from tests.folder import Shape, write_tiny_folder
from tests.server.in_process import run_app
from tests.server.test_parsers import read

SPECIAL = (
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"),
    *("<|channel>", "<channel|>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
    *("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
)
SHOWN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}{% if tools %}{{ tools }}{% endif %}"
TAGS = {  # of the templates by which the formats are recognized
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral named": "[TOOL_CALLS][ARGS]",
    "qwen3_coder": "<tool_call><function=",
    "glm": "<tool_call><arg_key>",
    "gemma4": "<|tool_call>",
    "functiongemma": "<start_function_call>",
    "harmony": "<|channel|>",
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"mode": {"enum": ["a", "w"]}, "deep": {"$ref": "#/$defs/Deep"}},
    "required": ["mode"],
    "additionalProperties": False,
    "$defs": {
        "Deep": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "more": {"$ref": "#/$defs/Deep"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NAME = "f" * 128
# A call with each of two arguments, and one with the wrong value of the second.
ARGUMENTS = '{"mode": "w", "deep": {"x": 1, "more": {"x": 2}}}'
QWEN = "<parameter={}>\n{}\n</parameter>\n"
GLM = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
DEEP = '{"x": 1, "more": {"x": 2}}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3": f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "{NAME}", "arguments": {ARGUMENTS}}}]',
    "mistral named": f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}",
    "qwen3_coder": f"<tool_call>\n<function={NAME}>\n{QWEN.format('mode', 'w')}{QWEN.format('deep', DEEP)}"
    "</function>\n</tool_call>",
    "glm": f"<tool_call>{NAME}\n{GLM.format('mode', 'w')}{GLM.format('deep', DEEP)}</tool_call>",
    "gemma4": f'<|tool_call>call:{NAME}{{deep:{{more:{{x:2}},x:1}},mode:<|"|>w<|"|>}}<tool_call|>',
    "functiongemma": f"<start_function_call>call:{NAME}{{deep:{{more:{{x:2}},x:1}},mode:<escape>w<escape>}}"
    "<end_function_call>",
    "harmony": f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{ARGUMENTS}",
}
TRIGGERED = [family for family in CALLS if family not in ("llama3", "harmony")]
HELLO = [{"role": "user", "content": "Hello"}]
WANTED = {"type": "json_schema", "json_schema": {"schema": {"enum": [["yes"]]}}}


@pytest.fixture(scope="module")
def special_assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """Build an engine whose vocabulary has the tags of all formats as special tokens."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("models") / "m", shape=Shape(context=1024), special=SPECIAL)
    return build_engine(EngineConfig(model=str(folder)), SpeculationConfig())


@pytest.fixture(params=["special tokens", "text"])
def model(request: pytest.FixtureRequest, special_assembly: Assembly, assembly: Assembly) -> Assembly:
    return special_assembly if request.param == "special tokens" else assembly


def use(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, family: str, more: str = "", end: str = "") -> None:
    template = f"{{# {TAGS[family]}{more} #}}{SHOWN}{end}"
    monkeypatch.setattr(assembly.tokenizer, "_templates", ChatTemplates({"default": template}, {}))


def function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": NAME, "parameters": PARAMETERS, **more}}


def job(assembly: Assembly, *tools: Any, config: ServerConfig = ServerConfig(), **more: Any) -> GenerationJob:
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "tools": [*tools] or [function()], **more})
    return RequestPreprocessor(assembly, config).preprocess_chat(body, ClientContext("a", ""))


def accepts(assembly: Assembly, spec: GrammarSpec | None, text: str) -> bool:
    """Return whether a grammar allows this text, and that it ends there."""
    assert spec is not None
    end = assembly.tokenizer.encode("<|im_end|>")[0]
    tokens = [*assembly.tokenizer.encode(text, add_special=False), end]
    return assembly.grammars.compile(spec).matcher([end]).count_allowed(tokens) == len(tokens)


def wrong(call: str) -> str:
    return call.replace("2", "null")


@pytest.mark.parametrize("family", CALLS)
def test_a_forced_call_follows_its_schema(model: Assembly, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    use(model, monkeypatch, family)
    made = job(model, tool_choice="required")
    call = CALLS[family]
    if family == "mistral" and model.tokenizer.special_ids.isdisjoint(model.tokenizer.encode("[TOOL_CALLS]")):
        call = call.removeprefix("[TOOL_CALLS]")
    assert accepts(model, made.grammar, call)
    assert not accepts(model, made.grammar, wrong(call)) and not accepts(model, made.grammar, "Hello")
    parser = TOOL_PARSERS[family.split()[0]](made.tool_names, made.tool_parameters)
    (_, name), (_, arguments) = read(parser, [call])
    assert name == NAME and json.loads(arguments) == json.loads(ARGUMENTS)


@pytest.mark.parametrize("family", CALLS)
def test_an_answer_or_a_call(special_assembly: Assembly, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    use(special_assembly, monkeypatch, family)
    grammar = job(special_assembly, response_format=WANTED).grammar
    answer = '<|channel|>final<|message|>["yes"]' if family == "harmony" else '["yes"]'
    assert accepts(special_assembly, grammar, answer) and accepts(special_assembly, grammar, CALLS[family])
    assert not accepts(special_assembly, grammar, wrong(CALLS[family]))
    assert not accepts(special_assembly, grammar, answer.replace("yes", "no"))


REASONING = {
    "think": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


@pytest.mark.parametrize("tags", REASONING)
@pytest.mark.parametrize("family", ["hermes", "gemma4", "mistral named", "llama3"])
def test_a_call_is_forced_after_reasoning(
    model: Assembly, monkeypatch: pytest.MonkeyPatch, family: str, tags: str
) -> None:
    start, end = REASONING[tags]
    use(model, monkeypatch, family, more=end, end=start)
    made = job(model, tool_choice={"type": "function", "function": {"name": NAME}})
    assert made.starts_in_reasoning
    assert accepts(model, made.grammar, f"I call {{f}}.{end}\n\n{CALLS[family]}")
    assert not accepts(model, made.grammar, f"I call {{f}}.{end}No.")
    assert accepts(model, job(model, response_format=WANTED).grammar, f'Yes?{end}["yes"]')


def test_harmony_reasons_before_forced_calls_and_answers(model: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    use(model, monkeypatch, "harmony")
    reasoning = "<|channel|>analysis<|message|>Hm, {f}.<|end|><|start|>assistant"
    assert accepts(model, job(model, tool_choice="required").grammar, reasoning + CALLS["harmony"])
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "response_format": WANTED})
    grammar = RequestPreprocessor(model, ServerConfig()).preprocess_chat(body, ClientContext("a", "")).grammar
    assert accepts(model, grammar, f'{reasoning}<|channel|>final<|message|>["yes"]')
    assert not accepts(model, grammar, '<|channel|>final<|message|>["no"]')


@pytest.mark.parametrize("family", TRIGGERED)
def test_strict_tools_allow_text_and_calls_that_follow_their_schema(
    model: Assembly, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    use(model, monkeypatch, family)
    loose = {"type": "function", "function": {"name": "g", "strict": False, "parameters": PARAMETERS}}
    made = job(model, function(strict=True), loose)
    call = CALLS[family]
    other = wrong(call.replace(NAME, "g"))
    for text in ("Hello", f"Well, {call}", f"{call}\n{call} so.", f"a < b {other}"):
        assert accepts(model, made.grammar, text), text
    assert not accepts(model, made.grammar, wrong(call)) and not accepts(model, made.grammar, f"a{call}b{wrong(call)}")
    assert made.ignored == ()


@pytest.mark.parametrize("tags", ["gemma4", "mistral"])
def test_strict_tools_allow_reasoning_between_special_tokens(
    special_assembly: Assembly, monkeypatch: pytest.MonkeyPatch, tags: str
) -> None:
    start, end = REASONING[tags]
    use(special_assembly, monkeypatch, "gemma4", more=end)
    grammar = job(special_assembly, function(strict=True)).grammar
    for text in (f"{start}\nHm.{end}So: {CALLS['gemma4']}", "No thoughts."):
        assert accepts(special_assembly, grammar, text)


@pytest.mark.parametrize("family", ["llama3", "harmony"])
def test_strict_is_ignored_by_name_where_calls_have_no_start_tag(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    use(assembly, monkeypatch, family)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "tools": [function(strict=True)], "max_tokens": 1}
        for path, tools in (
            ("/v1/chat/completions", body["tools"]),
            ("/v1/messages", [{"name": NAME, "input_schema": PARAMETERS, "strict": True}]),
        ):
            reply = await client.post(path, json={**body, "tools": tools})
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-foretell-ignored-fields"] == "tools.function.strict"

    run_app(assembly, play)


def test_strict_is_ignored_by_name_if_the_schemas_are_too_large(assembly: Assembly) -> None:
    for limit, ignored in ((200, ("tools.function.strict",)), (20_000, ())):
        config = ServerConfig(max_schema_bytes=limit)
        assert job(assembly, function(strict=True), config=config).ignored == ignored


@pytest.mark.parametrize("family", ["hermes", "llama3", "qwen3_coder"])
def test_keywords_that_no_grammar_enforces_are_left_out(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    use(assembly, monkeypatch, family)
    extra = {"propertyNames": {"pattern": "^[a-z]+$"}, "not": {"required": ["none"]}}
    more = {"items": {"type": "string", "format": "unheard-of"}, "type": "array", "uniqueItems": True}
    schema = {**PARAMETERS, **extra, "properties": {**PARAMETERS["properties"], "more": more}}
    made = job(assembly, function(parameters=schema), tool_choice="required")
    assert accepts(assembly, made.grammar, CALLS[family]) and not accepts(assembly, made.grammar, wrong(CALLS[family]))


@pytest.mark.parametrize("family", ["gemma4", "functiongemma", "mistral named"])
def test_a_forced_call_between_special_tokens_is_generated_and_parsed(
    special_assembly: Assembly, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    use(special_assembly, monkeypatch, family)
    schema = {"type": "object", "properties": {"mode": {"enum": ["a", "w"]}}, "required": ["mode"]}
    tools = [function(parameters={**schema, "additionalProperties": False})]

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "tools": tools, "tool_choice": "required", "max_tokens": 400, "seed": 1}
        reply = await client.post("/v1/chat/completions", json=body)
        choice = reply.json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == NAME
        assert json.loads(call["function"]["arguments"])["mode"] in ("a", "w")

    run_app(special_assembly, play)


@pytest.mark.parametrize("tags", ["gemma4", "mistral"])
def test_reasoning_between_special_tokens_is_returned_separately(
    special_assembly: Assembly, monkeypatch: pytest.MonkeyPatch, tags: str
) -> None:
    start, end = REASONING[tags]
    use(special_assembly, monkeypatch, "hermes", more=end)
    tokens = RequestPreprocessor(special_assembly, ServerConfig()).lark_tokens
    output = GrammarSpec.lark(f"start: {tokens.text(f'{start}{chr(10)}Hm, {{f}}.{end}Yes.')}\n")
    monkeypatch.setattr(RequestPreprocessor, "_chat_grammar", lambda *_: output)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 60}
        reply = (await client.post("/v1/chat/completions", json=body)).json()
        message = reply["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, {f}.", "Yes.")
        details = reply["usage"]["completion_tokens_details"]
        assert 0 < details["reasoning_tokens"] < reply["usage"]["completion_tokens"]
        blocks = (await client.post("/v1/messages", json=body)).json()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]

    run_app(special_assembly, play)


def test_a_thinking_budget_ends_the_reasoning_of_the_template(
    special_assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, end = REASONING["gemma4"]
    use(special_assembly, monkeypatch, "hermes", more=end, end=start)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 20, "thinking_budget": 4, "ignore_eos": True, "seed": 1}
        reply = (await client.post("/v1/chat/completions", json=body)).json()
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
        assert reply["choices"][0]["message"]["content"]

    run_app(special_assembly, play)


VALUES: list[tuple[Any, str, str]] = [  # of a property x: its schema, and a value that it allows, and one it does not
    ({"type": "string"}, 'x:<|"|>a, {b}\n<|"|>', "x:a"),
    ({"type": "number"}, "x:-3.5", "x:true"),
    ({"type": "integer", "minimum": 3}, "x:7", "x:2"),
    ({"type": ["boolean", "null"]}, "x:null", "x:1"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 'x:<|"|><|"|>', "x:1"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, "x:[1,2]", "x:[]"),
    ({"type": "array"}, 'x:[1,<|"|>a<|"|>,{b:[]}]', "x:[1"),
    ({"type": "object"}, "x:{a:1,b:{c:null}}", "x:[]"),
    ({"enum": [None, ["a", 1], {"k": True}]}, 'x:[<|"|>a<|"|>,1]', "x:[1]"),
    ({"const": {"k": ""}}, 'x:{k:<|"|><|"|>}', "x:{}"),
    ({}, 'x:{a:[1,<|"|>b<|"|>]}', "x:{a:b}"),
    ({"type": "object", "properties": {"a b": {"type": "null"}, "c": {"type": "null"}}}, "x:{c:null}", "x:{a b:null}"),
    ({"type": "object", "properties": {"a b": {"type": "null"}}}, 'x:{<|"|>a b<|"|>:null}', "x:{b:null}"),
]


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES)
def test_gemmas_values_follow_their_schema(
    special_assembly: Assembly, monkeypatch: pytest.MonkeyPatch, schema: Any, good: str, bad: str
) -> None:
    use(special_assembly, monkeypatch, "gemma4")
    tool = function(parameters={"type": "object", "properties": {"x": schema}})
    grammar = job(special_assembly, tool, tool_choice="required").grammar
    for members, allowed in ((good, True), ("", True), (bad, False)):
        call = f"<|tool_call>call:{NAME}{{{members}}}<tool_call|>"
        assert accepts(special_assembly, grammar, call) is allowed, members
    (_, (_, arguments)) = read(TOOL_PARSERS["gemma4"](), [f"<|tool_call>call:f{{{good}}}<tool_call|>"])
    assert list(json.loads(arguments)) == ["x"]


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
LISTED = {"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}]}


@pytest.mark.parametrize("family", ["qwen3_coder", "glm"])
def test_optional_strings_are_text_between_tags(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    use(assembly, monkeypatch, family)
    schema = {"type": "object", "properties": {"s": OPTIONAL, "m": LISTED}, "$defs": {"Mode": {"enum": ["a", "w"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    made = job(assembly, tool, tool_choice="required")
    ends = {
        "qwen3_coder": ("<tool_call>\n<function=f>\n", "</function>\n</tool_call>"),
        "glm": ("<tool_call>f\n", "</tool_call>"),
    }
    argument = {"qwen3_coder": QWEN, "glm": GLM}[family]
    for text, value in (("123", "123"), ('{"a": 1}', '{"a": 1}'), ('"q"', '"q"'), ("null", None), ("a\nb", "a\nb")):
        call = f"{ends[family][0]}{argument.format('s', text)}{argument.format('m', 'w')}{ends[family][1]}"
        assert accepts(assembly, made.grammar, call)
        assert not accepts(assembly, made.grammar, call.replace("w<", "x<").replace("\nw\n", "\nx\n"))
        (_, (_, arguments)) = read(TOOL_PARSERS[family](made.tool_names, made.tool_parameters), [call])
        assert json.loads(arguments) == {"s": value, "m": "w"}


def test_the_folder_has_the_special_tokens(special_assembly: Assembly) -> None:
    ids = [special_assembly.tokenizer.encode(name, add_special=False) for name in SPECIAL]
    assert all(len(each) == 1 and each[0] in special_assembly.tokenizer.special_ids for each in ids)

"""Tools with a separate tool template, and tool calls combined with structured output."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.errors import RequestError
from foretell.server.chat_template import apply_chat_template
from foretell.server.config import ServerConfig
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.parsers.tools import TOOL_PARSERS
from foretell.server.preprocess import ClientContext, GenerationJob, RequestPreprocessor
from foretell.server.service import Service
from foretell.structured_output import GrammarSpec
from foretell.tokenizer.chat import ChatTemplates
from tests.server.in_process import run_app

HELLO = [{"role": "user", "content": "Hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
ANSWER = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FORMS: dict[str, dict[str, Any]] = {
    "response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}},
    "guided_regex": {"value": "[0-9]+"},
    "guided_choice": {"value": ["yes", "no"]},
}
GOOD = {"response_format": '{"a": true}', "guided_regex": "42", "guided_choice": "no"}
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"x": 1}}',
    "mistral": '[{"name": "f", "arguments": {"x": 1}}]',
}


def job(assembly: Assembly, form: str, family: str = "hermes", **more: Any) -> GenerationJob:
    asked = FORMS[form].get("value", FORMS[form])
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "tools": TOOLS, form: asked, **more})
    return RequestPreprocessor(assembly, ServerConfig(tool_call_parser=family)).preprocess_chat(
        body, ClientContext("a", "")
    )


def accepts(assembly: Assembly, spec: GrammarSpec | None, text: str) -> bool:
    assert spec is not None
    matcher = assembly.grammars.compile(spec).matcher(())
    tokens = assembly.tokenizer.encode(text, add_special=False)
    return matcher.count_allowed(tokens) == len(tokens)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", CALLS)
def test_an_answer_has_its_form_or_is_a_call(assembly: Assembly, form: str, family: str) -> None:
    grammar = job(assembly, form, family).grammar
    assert accepts(assembly, grammar, GOOD[form]) and accepts(assembly, grammar, CALLS[family])
    assert not accepts(assembly, grammar, CALLS[family].replace("1", '"one"')), "arguments keep to their schema"
    assert not accepts(assembly, grammar, "free words")


def test_it_may_be_thought_about_first(assembly: Assembly) -> None:
    grammar = job(assembly, "guided_choice", chat_template_kwargs={"think": True}).grammar
    for good in ("no", CALLS["hermes"]):
        assert accepts(assembly, grammar, f"well</think>\n\n{good}")
    assert not accepts(assembly, grammar, "well</think>\n\nmaybe")


def test_a_single_tool_call_if_requested(assembly: Assembly) -> None:
    two = "\n".join([CALLS["hermes"]] * 2)
    assert accepts(assembly, job(assembly, "guided_choice").grammar, two)
    assert not accepts(assembly, job(assembly, "guided_choice", parallel_tool_calls=False).grammar, two)


def test_where_no_call_may_be_made_there_is_none(assembly: Assembly) -> None:
    grammar = job(assembly, "response_format", tool_choice="none").grammar
    assert accepts(assembly, grammar, GOOD["response_format"]) and not accepts(assembly, grammar, CALLS["hermes"])


def test_a_grammar_of_ones_own_leaves_no_room(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "tools": TOOLS, "guided_grammar": 'start: "a"'}
        error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
        assert error["param"] == "structured_outputs.grammar" and "tools" in error["message"]

    run_app(assembly, play)


def test_tools_of_a_model_with_a_template_of_its_own_for_them(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Hermes 2 Pro, whose default template does not support tools."""
    plain = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    with_tools = "{{ tools | tojson }} <tool_call></tool_call>" + plain
    own = ChatTemplates({"default": plain, "tool_use": with_tools}, {})
    monkeypatch.setattr(assembly.tokenizer, "_templates", own)
    desk = RequestPreprocessor(assembly, ServerConfig())
    assert desk.tool_parser == "hermes"
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "tools": TOOLS})
    made = desk.preprocess_chat(body, ClientContext("a", ""))
    assert made.tool_parser == "hermes" and '"name": "f"' in assembly.tokenizer.decode(made.requests[0].prompt)
    assert apply_chat_template(assembly.tokenizer, body, None) == "user: Hello"
    monkeypatch.setattr(assembly.tokenizer, "_templates", ChatTemplates({"default": plain}, {}))
    with pytest.raises(RequestError, match="no tool call format"):
        RequestPreprocessor(assembly, ServerConfig(tool_call_parser="none")).preprocess_chat(
            body, ClientContext("a", "")
        )


TAGGED = {
    "qwen3_coder": (
        "<tool_call>\n<function=write>\n<parameter=text>\n{}\n</parameter>\n",
        "<parameter=mode>\n{}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "glm": (
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n",
        "<arg_key>mode</arg_key>\n<arg_value>{}</arg_value>\n",
        "</tool_call>",
    ),
}


@pytest.mark.parametrize("family", TAGGED)
def test_forced_calls_with_text_between_tags(assembly: Assembly, family: str) -> None:
    properties = {"text": {"type": "string"}, "mode": {"type": "string", "enum": ["a", "w"]}}
    parameters = {"type": "object", "properties": properties, "required": ["text"]}
    tools = [{"type": "function", "function": {"name": "write", "parameters": parameters}}]
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "tools": tools, "tool_choice": "required"})
    desk = RequestPreprocessor(assembly, ServerConfig(tool_call_parser=family))
    made = desk.preprocess_chat(body, ClientContext("a", ""))
    text, mode, end = TAGGED[family]
    words = 'if a < "b":\n\tc'
    for arguments, call in (
        ({"text": words}, text.format(words) + end),
        ({"text": words, "mode": "w"}, text.format(words) + mode.format("w") + end),
    ):
        assert accepts(assembly, made.grammar, call)
        parser = TOOL_PARSERS[family](made.tool_names, made.tool_parameters)
        parts = [*parser.feed(call), *parser.finish()]
        assert parts[0].text == "write" and json.loads(parts[1].text) == arguments
    assert not accepts(assembly, made.grammar, text.format(words) + mode.format("x") + end), "an enum is kept to"
    assert not accepts(assembly, made.grammar, text.format(words) + end + text), "one call"


@pytest.mark.parametrize("family", ["gemma4", "functiongemma", "harmony"])
def test_tags_that_are_special_tokens_are_left_in_the_text(assembly: Assembly, family: str) -> None:
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "tools": TOOLS})
    made = RequestPreprocessor(assembly, ServerConfig(tool_call_parser=family)).preprocess_chat(
        body, ClientContext("a", "")
    )
    assert made.tool_parser == family and not made.requests[0].params.skip_special_tokens

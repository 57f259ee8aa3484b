"""Chats written as text by the model's own template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from foretell.errors import RequestError
from foretell.tokenizer import Tokenizer
from tests.tokenizer.examples import CONFIG, byte_level_json, metaspace_json

CHATML = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
)
RICH = (
    "{{ bos_token }}{%- macro wrap(text) %}[{{ text | trim }}]{% endmacro %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ wrap(m.content) }}{{ m.reasoning_content }}{% set ns.last = m.role %}{% endif %}{% endfor %}"
    "{{ ns.last }}{% if mode is defined %}{{ mode }}{% endif %}{{ {'a': '<é>&'} | tojson }}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind. "},
    {"role": "skip", "content": "x"},
    {"role": "user", "content": "Grüße <b> & 世界", "reasoning": "hm"},
    {"role": "assistant", "content": "ok"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def with_template(template: Any, **files: str) -> Tokenizer:
    config = json.dumps({**CONFIG, "chat_template": template})
    contents = {"tokenizer.json": byte_level_json(), "tokenizer_config.json": config}
    return Tokenizer.from_files(contents | {name.replace("__", "."): text for name, text in files.items()})


def theirs(template: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer as Backend

    made = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(byte_level_json()), bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [CHATML, RICH])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chats_read_as_transformers_writes_them(template: str, prompt: bool, tools: Any) -> None:
    ours, other = with_template(template), theirs(template)
    options = {"add_generation_prompt": prompt, "tools": tools, "mode": "brief"}
    assert ours.apply_chat_template(MESSAGES, **options) == other.apply_chat_template(
        MESSAGES, tokenize=False, **options
    )
    ids = other.apply_chat_template(MESSAGES, tokenize=True, return_dict=False, **options)
    assert ours.encode_chat(MESSAGES, **options) == ids


def test_bos_written_by_the_template_is_not_added_again() -> None:
    config = json.dumps({**CONFIG, "chat_template": RICH})
    tokenizer = Tokenizer.from_files({"tokenizer.json": metaspace_json(), "tokenizer_config.json": config})
    assert tokenizer.encode_chat(MESSAGES).count(tokenizer.bos_id) == 1
    assert tokenizer.encode("a")[0] == tokenizer.bos_id


def test_the_template_with_tools_is_used_when_there_are_some() -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = with_template(templates)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "tools"
    assert with_template("plain").apply_chat_template(MESSAGES, tools=TOOLS) == "plain"


def test_a_file_of_its_own_goes_before_the_configuration() -> None:
    assert with_template("old", chat_template__jinja="new").chat_template == "new"
    assert with_template(None, chat_template__json='{"chat_template": "other"}').chat_template == "other"
    folder = {"additional_chat_templates/tool_use.jinja": "tools"}
    assert with_template("plain", **folder).apply_chat_template(MESSAGES, tools=TOOLS) == "tools"


def test_templates_of_gguf_files_have_names_too() -> None:
    from tests.tokenizer.test_gguf import byte_level_metadata

    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools{{ bos_token }}"}
    tokenizer = Tokenizer.from_gguf(byte_level_metadata() | named)
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "tools<s>"


def test_messages_may_be_any_mappings() -> None:
    frozen: list[Mapping[str, Any]] = [MappingProxyType(message) for message in MESSAGES]
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    tokenizer = with_template(template)
    assert tokenizer.apply_chat_template(tuple(frozen)) == tokenizer.apply_chat_template(MESSAGES)
    assert "thinking" not in MESSAGES[2]


def test_templates_can_tell_the_date() -> None:
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d", with_template("{{ strftime_now('%Y-%m-%d') }}").apply_chat_template(MESSAGES)
    )


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template; send the text as a raw prompt") as caught:
        with_template(None).apply_chat_template(MESSAGES)
    assert caught.value.field == "messages"
    assert with_template(None).chat_template is None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "is broken"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ 'a' + 1 }}", "can only concatenate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}", "20000 steps"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}", "20000 steps"),
    ],
)
def test_a_template_that_fails_is_about_the_messages(template: str, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("foretell.tokenizer.render_budget.MAX_STEPS", 20_000)
    with pytest.raises(RequestError, match=message) as caught:
        with_template(template).apply_chat_template(MESSAGES)
    assert caught.value.field == "messages"
    assert "\n" not in str(caught.value)


HI = {"role": "user", "content": "hi"}
CALL = {"type": "function", "id": "1", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "must be a list of one or more"),
        ("hello", "must be a list of one or more"),
        (b"hello", "must be a list of one or more"),
        (7, "must be a list of one or more"),
        (HI, "put this one into a list"),
        ([HI, "hello"], "message 1 must be an object"),
        ([None], "message 0 must be an object"),
        ([HI, {"content": "hi"}], "message 1 needs a role"),
        ([{"role": None, "content": "hi"}], "message 0 needs a role"),
        ([{"role": 3, "content": "hi"}], "message 0 needs a role"),
        ([HI, {"role": "user"}], "message 1 needs a content .* not none"),
        ([{"role": "user", "content": None}], "message 0 needs a content .* not none"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "message 0 needs a content"),
        ([{"role": "user", "content": 7}], "message 0 needs a content .* not int"),
        ([{"role": "user", "content": {"type": "text", "text": "hi"}}], "message 0 needs a content .* not dict"),
        ([{"role": "assistant", "content": 7, "tool_calls": [CALL]}], "message 0 needs a content"),
        (
            [HI, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "is of type 'image_url'; this model takes text only",
        ),
        ([{"role": "user", "content": ["hi"]}], "message 0 has a part that is not"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "message 0 has a part that is not"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "message 0 has a part that is not"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "hi"}]}], "message 0 has a part that is not"),
    ],
)
def test_invalid_messages_are_named(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        with_template(CHATML).apply_chat_template(messages)
    assert caught.value.field in ("messages", "messages.1.content.0") and "\n" not in str(caught.value)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    tokenizer = with_template("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    for content in (parts, tuple(parts)):
        assert json.loads(tokenizer.apply_chat_template([HI | {"content": content}])) == HI | {"content": "Hello, you"}
    assert json.loads(tokenizer.apply_chat_template([HI | {"content": []}]))["content"] == ""


def test_a_message_that_calls_tools_needs_no_content() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    for message in ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": None}):
        whole = message | {"tool_calls": [CALL]}
        assert json.loads(tokenizer.apply_chat_template([whole])) == whole

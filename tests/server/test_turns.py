"""System turns, and turns of one role in a row, for chat templates that refuse them or leave them out."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.server.chat_template import apply_chat_template
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.service import Service
from foretell.server.turns import fit_turns
from foretell.tokenizer.chat import ChatTemplates
from foretell.tokenizer.turn_rules import TurnRules
from tests.server.in_process import run_app

SHOWN = "[{{ m['role'] }}]{{ m['content'] }}"
TOOLS_SHOWN = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
ENDING = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
# As Gemma 2's: no system role, and roles that alternate.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    f"{SHOWN}{ENDING}"
)
# As Qwen3.5's: a system turn only as the first one.
SYSTEM_FIRST = (
    f"{TOOLS_SHOWN}{{% for m in messages %}}{{% if m['role'] == 'system' and not loop.first %}}"
    f"{{{{ raise_exception('System message must be at the beginning.') }}}}{{% endif %}}{SHOWN}{ENDING}"
)
# As Mistral's: besides the system turn, roles alternate; calls and their results do not count.
ALTERNATING = (
    f"{TOOLS_SHOWN}{{% set ns = namespace(count=0) %}}{{% for m in messages %}}"
    "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system') }}{% endif %}"
    "{% if m['role'] in ['user', 'assistant'] and not m['tool_calls'] %}"
    "{% if (m['role'] == 'user') != (ns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    f"{{% set ns.count = ns.count + 1 %}}{{% endif %}}{SHOWN}{ENDING}"
)
# As that of gpt-oss: later system turns are left out without an error.
SILENT = f"{{% for m in messages %}}{{% if m['role'] != 'system' or loop.first %}}{SHOWN}{{% endif %}}{ENDING}"
EVERY = f"{TOOLS_SHOWN}{{% for m in messages %}}{SHOWN}{ENDING}"
TEMPLATES = {"no system": NO_SYSTEM, "first": SYSTEM_FIRST, "alternating": ALTERNATING, "silent": SILENT, "all": EVERY}


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


S, T, U, A, V = turn("system", "S"), turn("system", "T"), turn("user", "U"), turn("assistant", "A"), turn("user", "V")
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {**turn("tool", "R"), "tool_call_id": CALL["id"]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def use(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(assembly.tokenizer, "_templates", ChatTemplates({"default": TEMPLATES[template]}, {}))


def prompt_of(assembly: Assembly, *messages: dict[str, Any], **more: Any) -> str:
    body = ChatCompletionRequest.model_validate({"messages": list(messages), **more})
    return apply_chat_template(assembly.tokenizer, body, body.tools)


LEADING = ["[system]S[user]U", "[system]S\n\nT[user]U"]
LATER = ["[user]U\n\nS", "[user]U[assistant]A[user]S\n\nV"]
PROMPTS: dict[str, list[str]] = {  # of the chats in the test below, without their end
    "no system": ["[user]S\n\nU", "[user]S\n\nT\n\nU", *LATER, "[user]U\n\nV"],
    "first": [*LEADING, *LATER, "[user]U[user]V"],
    "alternating": [*LEADING, *LATER, "[user]U\n\nV"],
    "silent": [*LEADING, *LATER, "[user]U[user]V"],
    "all": [
        "[system]S[user]U",
        "[system]S[system]T[user]U",
        "[user]U[system]S",
        "[user]U[assistant]A[system]S[user]V",
        "[user]U[user]V",
    ],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_refused_turns_join_the_neighbouring_user_turn(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    use(assembly, monkeypatch, template)
    chats = [[S, U], [S, T, U], [U, S], [U, A, S, V], [U, V]]
    assert [prompt_of(assembly, *chat) for chat in chats] == [f"{text}[assistant]" for text in PROMPTS[template]]


@pytest.mark.parametrize("template", ["first", "alternating", "all"])
def test_a_user_turn_after_a_tools_result(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    use(assembly, monkeypatch, template)
    text = prompt_of(assembly, S, U, *CALLED, V, A, T, U, tools=TOOLS).partition("[system]")[2]
    result = "[tool]R\n\nV" if template == "alternating" else "[tool]R[user]V"
    last = "[system]T[user]U" if template == "all" else "[user]T\n\nU"
    assert text == f"S[user]U[assistant]{result}[assistant]A{last}[assistant]"


def test_tools_are_described_to_a_template_with_rules(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    use(assembly, monkeypatch, "no system")
    text = prompt_of(assembly, S, U, *CALLED, V, tools=TOOLS)
    assert text.startswith("[user]S\n\n# Tools") and text.count("[user]") == 2 and text.endswith("V[assistant]")


@pytest.mark.parametrize("template", ["no system", "first", "alternating", "silent"])
def test_every_api_takes_system_turns(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    use(assembly, monkeypatch, template)
    chat = [S, U, T, A, T, V]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": chat, "max_tokens": 1},
        "/v1/messages": {"system": [{"type": "text", "text": "S"}], "messages": chat[1:], "max_tokens": 1},
        "/v1/responses": {"instructions": "S", "input": chat[1:], "max_output_tokens": 1},
        "/api/chat": {"model": "tiny", "messages": chat, "options": {"num_predict": 1}},
        "/tokenize": {"messages": chat},
        "/apply-template": {"messages": chat},
    }

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for path, body in bodies.items():
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, (path, reply.text)

    run_app(assembly, play)


def test_the_start_of_the_prompt_stays_when_a_turn_is_added(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(assembly, monkeypatch, "first")
    before = prompt_of(assembly, S, U, T, A, V).removesuffix("[assistant]")
    assert prompt_of(assembly, S, U, T, A, V, A, T, U).startswith(before)


def test_calls_of_joined_turns_are_kept() -> None:
    other = {**CALL, "id": "other"}
    turns = [U, CALLED[0], {**A, "tool_calls": [other]}, V]
    fitted = fit_turns(turns, TurnRules(repeated_roles=False))
    assert fitted == [U, {**A, "tool_calls": [CALL, other]}, V]
    assert fit_turns([S], TurnRules(leading_system=False)) == [turn("user", "S")]


def test_a_template_that_shows_nothing_is_left_alone(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly.tokenizer, "_templates", ChatTemplates({"default": "plain"}, {}))
    assert assembly.tokenizer.turn_rules(with_tools=False) == TurnRules()

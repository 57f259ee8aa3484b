"""Prompts with a common prefix share their first hashes, and only those."""

from __future__ import annotations

import json
from typing import Any

from foretell.cluster.prefix_affinity import HASH_STEP, prefix_hashes

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = "A story that goes on for a while, and then for a while longer. " * 4


def chat(*contents: str, key: str = "", **more: Any) -> tuple[bytes, ...]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return prefix_hashes(CHAT, key, json.dumps({"messages": messages, **more}).encode())


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_the_next_turn_begins_with_the_last() -> None:
    before, after = chat(LONG), chat(LONG, "an answer", "and a further question")
    assert len(before) >= 3
    assert common(before, after) >= len(before) - 1, "all but the closing brackets"
    assert len(after) > len(before)


def test_what_only_changes_the_answer_does_not_matter() -> None:
    assert chat(LONG, temperature=0.5, seed=3, max_tokens=9) == chat(LONG)
    swapped = json.dumps({"seed": 1, "messages": [{"content": LONG, "role": "user"}]}).encode()
    assert prefix_hashes(CHAT, "", swapped) == chat(LONG)


def test_tools_salts_and_keys_change_the_hashes() -> None:
    others = [
        chat(LONG, tools=[{"type": "function"}]),
        chat(LONG, cache_salt="s"),
        chat(LONG, key="k"),
        chat("x" + LONG),
    ]
    assert all(common(chat(LONG), other) == 0 for other in others)
    assert len({marks[0] for marks in others}) == len(others)


def test_a_key_and_a_salt_do_not_run_into_each_other() -> None:
    assert common(chat(LONG, key="ab", cache_salt="c"), chat(LONG, key="a", cache_salt="bc")) == 0


def test_prompts_of_all_four_shapes() -> None:
    def ask(prompt: Any) -> tuple[bytes, ...]:
        return prefix_hashes(TEXT, "", json.dumps({"prompt": prompt}).encode())

    assert ask(LONG) == ask([LONG, "another"]) != ()
    tokens = list(range(200))
    assert ask(tokens) == ask([tokens, [1]]) != ()
    assert ask([]) == ask("short") == ask(None) == ()


def test_what_is_no_request_has_none() -> None:
    for body in (b"", b"{", b"[]", b"3", b'{"messages": 3}', b"[" * 100_000, b"\xff"):
        assert prefix_hashes(CHAT, "", body) == ()
    assert prefix_hashes("/tokenize", "", json.dumps({"prompt": LONG}).encode()) == ()
    assert prefix_hashes(CHAT, "", b'{"messages": [{"content": "' + rb"\ud800" * HASH_STEP + b'"}]}')


def test_a_long_prompt_has_few_hashes_and_shares_nearly_all() -> None:
    text = LONG * 4000
    whole = prefix_hashes(TEXT, "", json.dumps({"prompt": text}).encode())
    longer = prefix_hashes(TEXT, "", json.dumps({"prompt": text + "more" * 20}).encode())
    assert 50 < len(whole) < 200
    assert common(whole, longer) == len(whole)


def test_the_translated_apis_have_hashes_of_their_prompts() -> None:
    def ask(path: str, **body: Any) -> tuple[bytes, ...]:
        return prefix_hashes(path, "", json.dumps(body).encode())

    turn = [{"role": "user", "content": LONG}]
    assert ask("/v1/messages", messages=turn) == ask("/api/chat", messages=turn) == chat(LONG)
    assert ask("/v1/responses", input=turn) == chat(LONG) and len(ask("/v1/responses", input=LONG)) >= 3
    for name, path in (("system", "/v1/messages"), ("instructions", "/v1/responses")):
        assert common(ask(path, messages=turn), ask(path, messages=turn, **{name: "x" * 90})) == 0


def test_llama_cpps_endpoints_have_hashes_of_what_comes_first() -> None:
    def ask(path: str, **body: Any) -> tuple[bytes, ...]:
        return prefix_hashes(path, "", json.dumps(body).encode())

    assert ask("/completion", prompt=LONG) == prefix_hashes(TEXT, "", json.dumps({"prompt": LONG}).encode()) != ()
    mixed = ask("/completion", prompt=[LONG, 7, LONG])
    assert common(mixed, ask("/completion", prompt=[LONG, 7, LONG + "more"])) >= len(mixed) - 1
    assert common(mixed, ask("/completion", prompt=[LONG, 8, LONG])) < len(mixed)
    gap = {"input_prefix": LONG, "input_suffix": "after"}
    assert (
        ask("/infill", **gap) == ask("/infill", **{**gap, "input_suffix": "other"}) == ask("/completion", prompt=LONG)
    )
    typed = ask("/infill", **{**gap, "input_prefix": LONG + "more"}, prompt="typed")
    assert common(typed, ask("/infill", **gap)) == len(ask("/infill", **gap))
    files = [{"filename": "a.py", "text": LONG}]
    assert common(ask("/infill", **gap, input_extra=files), ask("/infill", **gap)) == 0
    whole = ask("/infill", **gap, input_extra=files)
    assert common(whole, ask("/infill", input_prefix=LONG + "x", input_suffix="", input_extra=files)) >= len(whole) - 1
    assert ask("/infill", input_prefix=3, input_extra=4) == ()


def test_a_billing_line_does_not_change_the_hashes() -> None:
    def ask(checksum: str) -> tuple[bytes, ...]:
        line = f"x-anthropic-billing-header: cc_version=2; cch={checksum};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": LONG}]
        return prefix_hashes("/v1/messages", "", json.dumps({"system": system, "messages": []}).encode())

    assert ask("a1") == ask("b2") and len(ask("a1")) >= 3

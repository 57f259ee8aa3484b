"""Predictions found in prompts: the formats of editors, nothing elsewhere, and the same output."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.server.inferred_prediction import MIN_CHARS, infer_prediction
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.preprocess import ClientContext, GenerationJob
from foretell.server.service import Service
from tests.server.in_process import run_app

CODE = "def add(first, second):\n    total = first + second\n    print(total)\n    return total\n\n\nprint(add(1, 2))"
REGION = f"<|editable_region_start|>\n{CODE}\n<|editable_region_end|>"
CURSOR = REGION.replace("total)", "total<|user_cursor_is_here|>)")
FOUND: list[tuple[str, str]] = [
    (f"### User Edits:\nx\n### User Excerpt:\n```a.py\nimport os\n{CURSOR}\nend\n```\n### Response:\n", REGION),
    (f"<code>\n{CODE}\n</code>\nRename add to plus.", f"<code>\n{CODE}\n</code>"),
    (
        f"<instruction>types</instruction>\n<code>{CODE}\n</code>\n<update>{CODE[:40]}\n</update>",  # apply models
        f"<code>{CODE}\n</code>",
    ),
    (f"<document>a\n<rewrite_this>\n{CODE}\n</rewrite_this>b</document> Make it fast", CODE + "\n"),
    (f"<|file_sep|>original/a.py\nx\n<|file_sep|>current/a.py\n{CODE}\n<|file_sep|>updated/a.py\n", CODE + "\n"),
    (f"```python\n{CODE}\n```\nAdd types. Answer with the whole file.", f"```python\n{CODE}\n```"),
]
NOT_FOUND = [
    "",
    "Explain the tags <code> and </code> to me, then add an example of each, in a long sentence about the web.",
    f"<code>\n{CODE}\n</code>\nWhat does it do?",
    f"```python\n{CODE}\n```\nWhat does this do?",
    f"```python\n{CODE}\n```\nAdd types. Answer with the whole file.\n```\nexample\n```",
    "<code>\nx\n</code> rename it",
    f"<code>\n{CODE}\nrename it, without an end",
    f"</code>\n{CODE}\n<code> rename it",
    f"<|file_sep|>current/a.py\n{CODE}\n<|file_sep|>updated/a.py\nx\n<|file_sep|>b.py\n",
]


@pytest.mark.parametrize(("text", "expected"), FOUND)
def test_the_text_to_rewrite_is_found(text: str, expected: str) -> None:
    assert infer_prediction(text) == expected and len(expected) >= MIN_CHARS


@pytest.mark.parametrize("text", NOT_FOUND)
def test_other_prompts_have_none(text: str) -> None:
    assert infer_prediction(text) is None


def test_long_hostile_prompts_have_none() -> None:
    for text in ("<code>" * 300_000, "```" * 2, "<|file_sep|>current/" * 100_000, "rename " * 200_000 + "</code>"):
        assert infer_prediction(text) is None


def test_the_output_is_the_same_and_usage_does_not_count_it(assembly: Assembly) -> None:
    text = FOUND[1][0]
    chat: Any = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}
    asked: Any = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def drafters(of: dict[str, Any]) -> set[str]:
        return set(of["speculation"]["drafters"])

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": text})):
            replies = {
                name: (await client.post(path, json={**body, **asked, **more})).json()
                for name, more in {
                    "inferred": {},
                    "plain": {"speculative": False},
                    "named": {"speculative": {"drafter": "suffix"}},
                    "own": {"prediction": {"type": "content", "content": "other words"}},
                }.items()
            }
            outputs = [reply["choices"][0].get("text") or reply["choices"][0]["message"] for reply in replies.values()]
            assert all(output == outputs[0] for output in outputs)
            counted = {
                name: "accepted_prediction_tokens" in reply["usage"]["completion_tokens_details"]
                for name, reply in replies.items()
            }
            assert counted == {"inferred": False, "plain": False, "named": False, "own": True}
            assert "prediction" not in drafters(replies["named"])
        request = (await inferred_request(service, chat)).requests[0]
        assert assembly.tokenizer.decode(request.prediction) == FOUND[1][1] and request.drafters[0] == "prediction"
        history = [*chat["messages"], {"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}]
        assert not (await inferred_request(service, {"messages": history})).requests[0].prediction

    run_app(assembly, play)

    async def off(service: Service, client: httpx.AsyncClient) -> None:
        assert not (await inferred_request(service, chat)).requests[0].prediction

    run_app(assembly, off, infer_prediction=False)


async def inferred_request(service: Service, body: dict[str, Any]) -> GenerationJob:
    chat = ChatCompletionRequest.model_validate({**body, "max_tokens": 4})
    return await service.run_in_worker(service.preprocessor.preprocess_chat, chat, ClientContext("a", ""))

"""Images, audio and video are refused by the name of their field, in every API: no input is dropped silently."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.server.service import Service
from tests.server.in_process import run_app

DATA = "data:image/png;base64,aGk="


def chat(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What is this?", **fields}]}


def blocks(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 4}


def items(*content: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, *content]}]}


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PARTS = {
    "image_url": {"type": "image_url", "image_url": {"url": DATA}},
    "input_audio": {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    "audio_url": {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,aGk="}},
    "video_url": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}},
    "file": {"type": "file", "file": {"file_data": "aGk="}},
}
SENT: dict[str, tuple[str, dict[str, Any], str]] = {  # path, body, field
    **{f"chat: {name}": (CHAT, chat(part), "messages.0.content.1") for name, part in PARTS.items()},
    "chat: images": (CHAT, message(images=["aGk="]), "messages.0"),
    "chat: audio of an earlier response": (CHAT, message(audio={"id": "a"}), "messages.0"),
    "chat: videos": (CHAT, message(videos=["aGk="]), "messages.0"),
    "chat: output audio": (CHAT, message() | {"modalities": ["text", "audio"]}, "modalities"),
    "chat: a voice": (CHAT, message() | {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    "completions: images": ("/v1/completions", {"prompt": "a", "images": ["aGk="]}, "images"),
    "completions: image_data": ("/v1/completions", {"prompt": "a", "image_data": [{"data": "aGk="}]}, "image_data"),
    "completions: multimodal_data": (
        "/v1/completions",
        {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}},
        "prompt",
    ),
    **{
        f"responses: {kind}": (RESPONSES, items({"type": kind}), "input.0.content.1")
        for kind in ("input_image", "input_audio", "input_video", "input_file")
    },
    "messages: image": (MESSAGES, blocks(IMAGE), "messages.0.content.0"),
    "messages: document": (MESSAGES, blocks({"type": "document", "source": {}}), "messages.0.content.0"),
    "ollama: images": ("/api/chat", {"model": "tiny", **message(images=["aGk="])}, "messages.0.images"),
    "ollama: images of a prompt": ("/api/generate", {"model": "tiny", "prompt": "a", "images": ["aGk="]}, "images"),
    "llama.cpp: image_data": ("/completion", {"prompt": "a", "image_data": [{"data": "aGk=", "id": 1}]}, "image_data"),
    "llama.cpp: multimodal_data": (
        "/completion",
        {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}},
        "prompt",
    ),
    "llama.cpp: infill": (
        "/infill",
        {"input_prefix": "a", "input_suffix": "b", "image_data": [{"data": "aGk="}]},
        "image_data",
    ),
    "llama.cpp: a template": ("/apply-template", chat(PARTS["image_url"]), "messages.0.content.1"),
    "tokenize": ("/tokenize", chat(PARTS["image_url"]), "messages.0.content.1"),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_not_text_is_refused_by_its_field(name: str, assembly: Assembly) -> None:
    path, body, field = SENT[name]

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post(path, json=body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        words, named = (
            (error, error) if isinstance(error, str) else (error["message"], error.get("param", error["message"]))
        )
        assert named.startswith(field) and "\n" not in words, reply.text

    run_app(assembly, play)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion", "/api/generate"])
def test_a_field_without_media_is_no_error(path: str, assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = message() if path == CHAT else {"prompt": "a"}
        limit = {"options": {"num_predict": 1}, "stream": False} if path.startswith("/api") else {"max_tokens": 1}
        limit = {"n_predict": 1} if path == "/completion" else limit
        reply = await client.post(path, json={**body, **limit, "images": [], "image_data": []})
        assert reply.status_code == 200, reply.text

    run_app(assembly, play)

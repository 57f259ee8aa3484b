"""Requests and answers in a file, for those who ask for it: later training reads them."""

from __future__ import annotations

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from foretell.errors import RequestError
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import GenerationRequest

from .choice_state import ChoiceState

LOG = logging.getLogger("foretell")
PRIVATE = 0o600  # other users of the machine have no business with prompts


class RequestLog:
    """Appends one JSON object a line, beside the event loop; without a file it does nothing."""

    def __init__(self, path: str | None) -> None:
        self._file = None if path is None else _open(Path(path))
        self._worker = ThreadPoolExecutor(1, "foretell-log")
        self._lost = 0  # records in a row that could not be written

    def write(self, name: str, model: str, body: GenerationRequest, answers: list[ChoiceState]) -> None:
        """Note a request that was answered."""
        if self._file is not None:
            self._worker.submit(self._append, _record(name, model, body, answers))

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "there is a file to write to"
        try:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
        except Exception as error:  # a full disk, say; whoever trains on the file must know that it has gaps
            self._lost += 1
            if self._lost == 1:
                LOG.error("--log-requests: a request is not kept: %s: %s", type(error).__name__, error)
        else:
            if self._lost:
                LOG.warning("--log-requests: works again; %d requests were not kept", self._lost)
            self._lost = 0

    def close(self) -> None:
        self._worker.shutdown()
        if self._file is not None:
            with suppress(OSError):  # what could not be written was told
                self._file.close()


def _open(path: Path) -> Any:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE), "a", encoding="utf-8")
    except OSError as error:
        raise RequestError("log_requests", f"{path} cannot be written: {error.strerror}") from None


def _record(name: str, model: str, body: GenerationRequest, answers: list[ChoiceState]) -> dict[str, Any]:
    """The request as it was sent and its answers, in the shape of training data."""
    request = body.model_dump(exclude_none=True, exclude_unset=True, by_alias=True)
    return {
        "id": name,
        "time": time.time(),
        "model": model,
        "kind": "chat" if isinstance(body, ChatCompletionRequest) else "completion",
        "request": request,
        "answers": [_answer(answer) for answer in answers],
    }


def _answer(answer: ChoiceState) -> dict[str, Any]:
    return {
        "text": answer.text,
        "content": answer.content,
        "reasoning_content": answer.reasoning,
        "tool_calls": [call.as_json() for call in answer.tool_calls],
        "finish_reason": answer.openai_finish_reason,
        "token_ids": answer.tokens,
        "seed": answer.request.seed,
    }

"""JSON lines: the log itself with --log-format json, and requests of --log-requests, which training can read."""

from __future__ import annotations

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from foretell.errors import RequestError
from foretell.server.openai.chat_requests import ChatCompletionRequest

from .choice_state import ChoiceState

LOG = logging.getLogger("foretell")
PRIVATE = 0o600  # file mode: prompts are readable by the owner only


class RequestLog:
    """Appends one JSON object per line, in a thread; does nothing without a file."""

    def __init__(self, path: str | None) -> None:
        self._file = None if path is None else _open(Path(path))
        self._worker = ThreadPoolExecutor(1, "foretell-log")
        self._lost = 0  # consecutive records that could not be written

    def write(self, request_id: str, model: str, body: BaseModel, choices: list[ChoiceState]) -> None:
        """Queue a finished request for the thread that writes the file."""
        if self._file is not None:
            self._worker.submit(self._append, _record(request_id, model, body, choices))

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "only called with a file"
        try:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
        except Exception as error:  # for example a full disk; the log must show that the file has gaps
            self._lost += 1
            if self._lost == 1:
                LOG.error("--log-requests: a request was not written: %s: %s", type(error).__name__, error)
        else:
            if self._lost:
                LOG.warning("--log-requests: writing again; %d requests were not written", self._lost)
            self._lost = 0

    def close(self) -> None:
        self._worker.shutdown()
        if self._file is not None:
            with suppress(OSError):  # failed writes were logged
                self._file.close()


def _open(path: Path) -> Any:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE), "a", encoding="utf-8")
    except OSError as error:
        raise RequestError("log_requests", f"{path} cannot be written: {error.strerror}") from None


def _record(request_id: str, model: str, body: BaseModel, choices: list[ChoiceState]) -> dict[str, Any]:
    """Return the request as it was sent and its choices, in the format of training data."""
    request = body.model_dump(exclude_none=True, exclude_unset=True, by_alias=True)
    return {
        "id": request_id,
        "time": time.time(),
        "model": model,
        "kind": "chat" if isinstance(body, ChatCompletionRequest) else "completion",
        "request": request,
        "answers": [_choice_record(choice) for choice in choices],
    }


def _choice_record(choice: ChoiceState) -> dict[str, Any]:
    return {
        "text": choice.text,
        "content": choice.content,
        "reasoning_content": choice.reasoning,
        "tool_calls": [call.as_json() for call in choice.tool_calls],
        "finish_reason": choice.openai_finish_reason,
        "token_ids": choice.tokens,
        "seed": choice.request.seed,
    }


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line, with the fields of `extra={"values": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)

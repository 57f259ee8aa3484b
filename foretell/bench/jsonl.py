"""Readers of JSON lines files, compressed or not; errors name the line."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from foretell.errors import RequestError
from foretell.sampling_params import DECIDING, SamplingParams

OTHER_FIELDS = ("response_format", "prediction")  # other fields that decide the output or its speed
COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


def find_file(data: Path, names: tuple[str, ...]) -> Path:
    """Return the file itself, or in a folder the first of `names`, compressed or not."""
    if not data.exists():
        raise RequestError("data", f"there is no {data}; name the workload's file, or its folder")
    if not data.is_dir():
        return data
    if not names:
        raise RequestError("data", f"{data} is a folder; name a file with one request per line")
    for name in names:
        for ending in ("", *COMPRESSED):
            if (data / f"{name}{ending}").is_file():
                return data / f"{name}{ending}"
    raise RequestError("data", f"there is no {names[0]} in {data}; name the file")


def read_records(path: Path) -> list[Record]:
    """Read the objects of a file; an empty file is an error."""
    try:
        with _open(path) as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise RequestError("data", f"{path} cannot be read: {error}") from None
    records = list(parse_lines(lines, path.name))
    if not records:
        raise RequestError("data", f"{path} is empty; put one JSON object on each line")
    return records


def _open(path: Path) -> TextIO:
    opened: TextIO = COMPRESSED.get(path.suffix, open)(path, "rt", encoding="utf-8-sig")
    return opened


def parse_lines(lines: Iterable[str], name: str) -> Iterator[Record]:
    """Yield a record for each line that is not empty."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError("data", f"{where} is not JSON: {error.msg}; put one JSON object on each line") from None
        if not isinstance(value, dict):
            raise RequestError("data", f"{where} is not a JSON object; put one on each line")
        yield Record(value, where)


@dataclass(frozen=True)
class Record:
    """The object of one line, with file and line number for errors."""

    value: Mapping[str, Any]
    where: str

    def string(self, name: str) -> str:
        found = self.value.get(name)
        if not isinstance(found, str) or not found.strip():
            raise self._wrong(name, "must be a non-empty string")
        return found

    def strings(self, name: str) -> tuple[str, ...]:
        found = self.value.get(name)
        if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
            raise self._wrong(name, "must be a list of strings")
        return tuple(found)

    def integer(self, name: str) -> int:
        found = self.value.get(name)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self._wrong(name, "must be an integer of 1 or more")
        return found

    def messages(self) -> tuple[Mapping[str, Any], ...]:
        found = self.value.get("messages")
        if not isinstance(found, list) or not found or not all(isinstance(e, dict) and "role" in e for e in found):
            raise self._wrong("messages", "must be a list of objects with role and content")
        return tuple(found)

    def inner(self, name: str) -> Record:
        """Return the object under `name`, or the record itself without one."""
        found = self.value.get(name, self.value)
        if not isinstance(found, dict):
            raise self._wrong(name, "must be an object")
        return Record(found, self.where)

    def max_tokens(self) -> int | None:
        """Return the maximum output length by either of its OpenAI names."""
        for name in ("max_completion_tokens", "max_tokens"):
            if self.value.get(name) is not None:
                return self.integer(name)
        return None

    def prediction(self) -> str | None:
        """Return the text of OpenAI's `prediction`: a string, or {"type": "content", "content": string or parts}."""
        found = self.value.get("prediction")
        if isinstance(found, dict):
            found = found.get("content")
        if isinstance(found, list):
            found = "".join(str(part.get("text", "")) for part in found if isinstance(part, dict))
        if found is not None and not isinstance(found, str):
            raise self._wrong("prediction", 'must be {"type": "content", "content": "..."}')
        return found or None

    def schema(self) -> Mapping[str, Any] | bool | None:
        """Return the schema of OpenAI's `response_format`; true for any JSON object."""
        form = self.value.get("response_format")
        if form is None:
            return None
        if not isinstance(form, dict):
            raise self._wrong("response_format", "must be an object")
        if form.get("type") == "json_object":
            return True
        wanted = form.get("json_schema")
        found = wanted.get("schema") if isinstance(wanted, dict) else None
        if found is not None and not isinstance(found, dict):
            raise self._wrong("response_format", "must have its schema under json_schema.schema")
        return found

    def sampling(self) -> dict[str, Any]:
        """Return the validated sampling parameters; `n` and logprobs are left out, because they are not measured."""
        given = {name: value for name, value in self.value.items() if name in DECIDING and value is not None}
        try:
            SamplingParams(**given)
        except RequestError as error:
            raise self._wrong(error.field, error.message) from None
        return given

    def fields(self) -> dict[str, Any]:
        """Return all fields of the request that decide the output."""
        names = (*DECIDING, *OTHER_FIELDS)
        return {name: self.value[name] for name in names if self.value.get(name) is not None}

    def _wrong(self, name: str, problem: str) -> RequestError:
        return RequestError("data", f"{self.where}: {name} {problem}")

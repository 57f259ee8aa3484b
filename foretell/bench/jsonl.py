"""Files of JSON lines, packed or not, and what may stand in a line; what is wrong is said with its place."""

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

BESIDE = ("response_format", "prediction")  # of what decides a text or its speed, what is not sampling
PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


def find_file(data: Path, names: tuple[str, ...]) -> Path:
    """The file itself, or in a folder the first of `names`, packed or not."""
    if not data.exists():
        raise RequestError("data", f"there is no {data}; name the workload's file, or the folder it lies in")
    if not data.is_dir():
        return data
    if not names:
        raise RequestError("data", f"{data} is a folder; name a file of requests, one a line")
    for name in names:
        for ending in ("", *PACKED):
            if (data / f"{name}{ending}").is_file():
                return data / f"{name}{ending}"
    raise RequestError("data", f"there is no {names[0]} in {data}; name the file")


def read_records(path: Path) -> list[Record]:
    """The objects of a file; a file without any is refused."""
    try:
        with _open(path) as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise RequestError("data", f"{path} cannot be read: {error}") from None
    records = list(whole_lines(lines, path.name))
    if not records:
        raise RequestError("data", f"{path} is empty; put one JSON object on each line")
    return records


def _open(path: Path) -> TextIO:
    opened: TextIO = PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8-sig")
    return opened


def whole_lines(lines: Iterable[str], name: str) -> Iterator[Record]:
    """A record for each line that is not empty."""
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
    """One line, and where it stands."""

    value: Mapping[str, Any]
    where: str

    def text(self, name: str) -> str:
        found = self.value.get(name)
        if not isinstance(found, str) or not found.strip():
            raise self._wrong(name, "must be a text that is not empty")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        found = self.value.get(name)
        if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
            raise self._wrong(name, "must be a list of texts")
        return tuple(found)

    def whole(self, name: str) -> int:
        found = self.value.get(name)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self._wrong(name, "must be a whole number, 1 or more")
        return found

    def messages(self) -> tuple[Mapping[str, Any], ...]:
        found = self.value.get("messages")
        if not isinstance(found, list) or not found or not all(isinstance(e, dict) and "role" in e for e in found):
            raise self._wrong("messages", "must be a list of objects with role and content")
        return tuple(found)

    def inner(self, name: str) -> Record:
        """The object under `name`, or the record itself where there is none."""
        found = self.value.get(name, self.value)
        if not isinstance(found, dict):
            raise self._wrong(name, "must be an object")
        return Record(found, self.where)

    def max_tokens(self) -> int | None:
        """By either of OpenAI's names."""
        for name in ("max_completion_tokens", "max_tokens"):
            if self.value.get(name) is not None:
                return self.whole(name)
        return None

    def prediction(self) -> str | None:
        """OpenAI's `prediction`: a text, or {"type": "content", "content": a text or parts}."""
        found = self.value.get("prediction")
        if isinstance(found, dict):
            found = found.get("content")
        if isinstance(found, list):
            found = "".join(str(part.get("text", "")) for part in found if isinstance(part, dict))
        if found is not None and not isinstance(found, str):
            raise self._wrong("prediction", 'must be {"type": "content", "content": "..."}')
        return found or None

    def schema(self) -> Mapping[str, Any] | bool | None:
        """The schema of OpenAI's `response_format`; true for any JSON object."""
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
        """What the request says of sampling, checked. `n` and log-probabilities are left out: they are not measured."""
        given = {name: value for name, value in self.value.items() if name in DECIDING and value is not None}
        try:
            SamplingParams(**given)
        except RequestError as error:
            raise self._wrong(error.field, error.message) from None
        return given

    def fields(self) -> dict[str, Any]:
        """All that decides the text, as the request has it."""
        names = (*DECIDING, *BESIDE)
        return {name: self.value[name] for name in names if self.value.get(name) is not None}

    def _wrong(self, name: str, words: str) -> RequestError:
        return RequestError("data", f"{self.where}: {name} {words}")

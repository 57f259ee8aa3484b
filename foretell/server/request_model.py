"""The base of all request bodies: what becomes of fields that it does not declare, alike in every API.

A misspelt field is refused with the right name; any other unknown one is ignored and named in a response header, or
refused by `--strict-fields`. Fields that an API has and that mean nothing here are declared, so that they pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from foretell.options import very_close

# Other servers' fields for images, audio and video. They are never ignored: the answer would be about nothing.
MEDIA_FIELDS = frozenset(
    (
        "image",
        "images",
        "image_data",
        "image_url",
        "multimodal_data",
        "video",
        "videos",
        "audio",
        "audios",
        "input_audio",
    )
)
TEXT_ONLY = "is not supported: this model takes text only; leave the field out"
MAX_IGNORED = 32  # unknown fields of one object; each is compared to all known names


@dataclass
class FieldReport:
    """The fields of one request that have no effect, in order, though a client may expect one."""

    strict: bool = False  # refuse unknown fields
    ignored: dict[str, None] = field(default_factory=dict)

    def add(self, names: Iterable[str]) -> None:
        self.ignored |= dict.fromkeys(names)


# The report of the request that is validated; without one, unknown fields are refused.
FIELD_REPORT: ContextVar[FieldReport | None] = ContextVar("field_report", default=None)


def report_ignored(names: Iterable[str]) -> None:
    """Report parts of the current request that have no effect."""
    report = FIELD_REPORT.get()
    if report is not None:
        report.add(names)


class StrictModel(BaseModel):
    """A model that converts no types. Unknown fields are refused, or ignored where the `FIELD_REPORT` says so."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    path: ClassVar[str] = ""  # of its fields in a request body
    refusals: ClassVar[Mapping[str, str]] = {}  # unknown fields that are never ignored, with the reason
    reported: ClassVar[frozenset[str]] = frozenset()  # fields without effect whose meaning is lost: they are named

    @model_validator(mode="before")
    @classmethod
    def drop_unknown_fields(cls, data: Any) -> Any:
        """Drop the unknown fields that may be ignored, and of the others all but the first.

        One is enough for the error, and validation reports each at length.
        """
        if not isinstance(data, dict):
            return data
        report = FIELD_REPORT.get()
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in data if name not in known]
        refused = unknown[:1]
        if report is not None and not report.strict and len(unknown) <= MAX_IGNORED:
            refused = [name for name in unknown if not _may_ignore(cls, name, data[name], known)][:1]
        if not refused:
            lost = {name for name in cls.reported if data.get(name)}.union(unknown)
            report_ignored(cls.path + name for name in data if name in lost)
        return {name: value for name, value in data.items() if name in known or name in refused}

    @classmethod
    def may_ignore(cls, name: str, known: Iterable[str]) -> bool:
        """Return whether a request with this unknown field is served without it: it is no misspelt known field."""
        return very_close(name, known) is None


def _may_ignore(model: type[StrictModel], name: str, value: Any, known: Iterable[str]) -> bool:
    if name in model.refusals:
        return False
    if name in MEDIA_FIELDS:
        return not value  # clients send empty lists of images
    return model.may_ignore(name, known)


def without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a body that are not null: null counts as left out."""
    return {name: value for name, value in data.items() if value is not None}

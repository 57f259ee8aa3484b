"""Validated access to the entries of a model's config."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from foretell.errors import ModelError, UnsupportedModelError


class ConfigFields:
    """Entries of a config by name, with a common prefix. None counts as absent, as it does in config files."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values, self.prefix = values, prefix

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = 2**31) -> int:
        """Return an integer between `least` and `most`."""
        value = self._one(name, self._wanted(name, default))
        is_integer = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if not is_integer or isinstance(value, bool) or not least <= value <= most:
            raise self.invalid(name, f"an integer from {least} to {most}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._wanted(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.invalid(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self._wanted(name, default)
        if not isinstance(value, str):
            raise self.invalid(name, "a string")
        return value

    def strings(self, name: str) -> list[str]:
        """Return a list of strings; empty if absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.invalid(name, "a list of strings")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` finite numbers above 0."""
        value = self._wanted(name, None)
        is_list = isinstance(value, list | tuple) and len(value) == count
        if not is_list or not all(
            isinstance(each, int | float) and not isinstance(each, bool) and 0 < each <= sys.float_info.max
            for each in value
        ):
            raise self.invalid(name, f"a list of {count} numbers above 0")
        return tuple(float(each) for each in value)

    def section(self, name: str) -> ConfigFields:
        """Return the nested config `name`; empty if absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.invalid(name, "a mapping")
        return ConfigFields(value)

    def invalid(self, name: str, wanted: str) -> ModelError:
        value = reprlib.repr(self.get(name))
        return ModelError(f"the model's config says {self.prefix}{name} is {value}; it must be {wanted}")

    def missing(self, name: str) -> ModelError:
        return ModelError(f"the model's config has no {self.prefix}{name}; download the model again or add it")

    def _wanted(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.missing(name)
        return value

    def _one(self, name: str, value: Any) -> Any:
        """Return the common value of a list with one value per layer (GGUF). Layers that differ are not supported."""
        if not isinstance(value, list | tuple) or not value:
            return value
        if any(other != value[0] for other in value):
            raise UnsupportedModelError(f"{self.prefix}{name} differs between layers, which is not supported")
        return value[0]

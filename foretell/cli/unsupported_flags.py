"""Flags of other engines without an equivalent here, with the reason."""

from __future__ import annotations

UNSUPPORTED: dict[str, str] = {}

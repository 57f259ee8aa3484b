"""Anthropic's tools that a client runs: their types stand for schemas that Claude knows and other models do not."""

from __future__ import annotations

import re
from typing import Any

VERSION = re.compile(r"_\d{8}$")  # the date at the end of a tool's type
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
EDITS = {
    "path": {**TEXT, "description": "Absolute path of the file or folder."},
    "file_text": {**TEXT, "description": "create: the content of the file."},
    "old_str": {**TEXT, "description": "str_replace: the text to replace, which must occur once."},
    "new_str": {**TEXT, "description": "str_replace: the text that replaces it."},
    "insert_line": {**NUMBER, "description": "insert: the line after which the text is inserted; 0 for the start."},
    "insert_text": {**TEXT, "description": "insert: the text."},
    "view_range": {
        "type": "array",
        "items": NUMBER,
        "description": "view: the first and last line; -1 is the end.",
    },
}


def _commands(*names: str) -> dict[str, Any]:
    return {"command": {**TEXT, "enum": list(names), "description": "What to do."}}


# By type without its date: the usual name, the description, the properties, and those that are required.
CLIENT_TOOLS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "bash": (
        "bash",
        "Run a command in a bash shell that stays open between calls.",
        {
            "command": {**TEXT, "description": "The command; leave it out to restart the shell."},
            "restart": {"type": "boolean", "description": "true: restart the shell."},
        },
        [],
    ),
    "text_editor": (
        "str_replace_based_edit_tool",
        "View, create and edit text files.",
        {**_commands("view", "create", "str_replace", "insert"), **EDITS},
        ["command", "path"],
    ),
    "memory": (
        "memory",
        "Keep notes in files under /memories, which last between conversations.",
        {
            **_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **EDITS,
            "old_path": {**TEXT, "description": "rename: the path so far."},
            "new_path": {**TEXT, "description": "rename: the path from now on."},
        },
        ["command"],
    ),
}


def client_tool(kind: str) -> tuple[str, str, dict[str, Any]] | None:
    """Return the usual name, description and schema of a tool that the client runs; None for any other type."""
    found = CLIENT_TOOLS.get(VERSION.sub("", kind))
    if found is None:
        return None
    name, description, properties, required = found
    return name, description, {"type": "object", "properties": properties, "required": required}


def needs_images(kind: str) -> bool:
    """Return whether the results of a tool are screenshots."""
    return VERSION.sub("", kind) == "computer"

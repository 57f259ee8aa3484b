"""What kind of text a request asks for, as far as its own words tell."""

from __future__ import annotations

import re

# How sure a draft must be for the rule `confidence` to take it unseen: forms that repeat can be trusted later.
WORKLOADS = {"code": 0.75, "json": 0.65, "narrative": 0.5}

CODE_LINES = 2  # one such line may be a sentence that happens to look like code

_FENCE = re.compile(r"^\s*(```|~~~)", re.MULTILINE)
_CODE_LINE = re.compile(
    r"^\s*(def \w+\(|class \w+[:(]|(async )?function\b.*\(|import \w|from \w[\w.]* import |#include\b|"
    r"(const|let|var|int|float|void|public|private|fn|func) .*[=({;]|(if|for|while) .*[:{]$|return\b.*[;)\]]$|"
    r"(SELECT|INSERT|UPDATE|CREATE) .*|.*[;{}]\s*$|\w[\w.\[\]]* [-+*/]?= .+)",
    re.MULTILINE,
)
_CODE_WISH = re.compile(
    r"\b(write|implement|fix|debug|refactor|complete|review|port|optimi[sz]e|rewrite|create|generate)\b"
    r"(?![^.?!\n]*\b(story|poem|essay|letter|song|article)\b)[^.?!\n]*"
    r"\b(function|code|unit tests?|regex|quer(y|ies)|algorithm|"
    r"python|javascript|typescript|java|rust|golang|c\+\+|sql|bash|html|css)(?![\w+])",
    re.IGNORECASE,
)
_JSON_WISH = re.compile(
    r"\b(as|in|into|to|valid|only|return|output|produce|with) (an? |the |valid |only |one |single )*json\b|"
    r"\bjson (object|array|schema|format|only)\b",
    re.IGNORECASE,
)
_JSON_TEXT = re.compile(r'\s*[\[{]\s*("|\{|\[|\d|\]|\})')


def detect_workload(text: str, wants_json: bool) -> str:
    """A name of WORKLOADS, for a request's text and whether its response format is JSON.

    The response format decides where it is given. Then, in this order: a code fence, lines that read like code or a
    wish for code; a text that is JSON or a wish for it; and what is left is prose. Code goes before JSON, because a
    program that handles JSON is still a program.
    """
    if wants_json:
        return "json"
    if _is_code(text):
        return "code"
    return "json" if _JSON_TEXT.match(text) or _JSON_WISH.search(text) else "narrative"


def _is_code(text: str) -> bool:
    if _FENCE.search(text) or _CODE_WISH.search(text):
        return True
    return not _JSON_TEXT.match(text) and sum(1 for _ in _CODE_LINE.finditer(text)) >= CODE_LINES

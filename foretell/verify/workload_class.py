"""What kind of text a request asks for, as far as its own words tell."""

from __future__ import annotations

import re

# How sure a draft must be for the rule `confidence` to take it unseen.
WORKLOADS = {"code": 0.75, "json": 0.65, "narrative": 0.5}

CODE_LINES = 2  # one such line may be a sentence that happens to look like code
LONGEST_LINE = 200  # what is read of a line; also keeps patterns from searching a long one again and again

_VERBS = {
    "write",
    "implement",
    "fix",
    "debug",
    "refactor",
    "complete",
    "review",
    "port",
    "rewrite",
    "create",
    "generate",
}
_LANGUAGES = {"python", "javascript", "typescript", "java", "rust", "golang", "c++", "sql", "bash", "html", "css"}
_CODE = {"function", "code", "regex", "query", "queries", "algorithm", *_LANGUAGES}
_PROSE = {"story", "poem", "essay", "letter", "song", "article"}

_CODE_LINE = re.compile(
    r"\s*(def \w+\(|class \w+[:(]|(async )?function\b.*\(|import \w|from \w[\w.]* import |#include\b|"
    r"(const|let|var|int|float|void|public|private|fn|func) .*[=({;]|(if|for|while) .*[:{]$|return\b.*[;)\]]$|"
    r"(SELECT|INSERT|UPDATE|CREATE) .*|.*[;{}]\s*$|\w[\w.\[\]]* [-+*/]?= .+)"
)
_JSON_WISH = re.compile(
    r"\b(as|in|into|to|valid|only|return|output|produce|with) ((an?|the|valid|only|one|single) ){0,3}json\b|"
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
    is_json = bool(_JSON_TEXT.match(text))
    lines = [line[:LONGEST_LINE] for line in text.splitlines() if line]
    if any(map(_is_fence, lines)) or any(map(_wishes_code, lines)) or (not is_json and _reads_like_code(lines)):
        return "code"
    return "json" if is_json or any(map(_JSON_WISH.search, lines)) else "narrative"


def _is_fence(line: str) -> bool:
    return line.lstrip().startswith(("```", "~~~"))


def _wishes_code(line: str) -> bool:
    """Whether one sentence has a verb of making and a word for code, and none for prose."""
    sentences = (set(re.findall(r"[\w+]+", sentence.lower())) for sentence in re.split(r"[.?!]", line))
    return any(words & _VERBS and words & _CODE and not words & _PROSE for words in sentences)


def _reads_like_code(lines: list[str]) -> bool:
    return sum(1 for line in lines if _CODE_LINE.match(line)) >= CODE_LINES

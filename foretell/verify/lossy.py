"""Rules that trade the target's exact distribution for longer drafts. None is used unless asked for by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from foretell.errors import RequestError
from foretell.options import nearest, option, strict
from foretell.types import Draft, VerifyResult
from foretell.verify.rejection import guess_of, is_drawn, rejection

if TYPE_CHECKING:
    from torch import Tensor

    from .randomness import RandomSource

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


@strict
@dataclass(frozen=True, kw_only=True)
class ThresholdSettings:
    """How far the lossy rules may go."""

    upper: float = option(0.9, "confidence: take a guess unseen if its drafter gave it at least this probability")
    lower: float = option(0.2, "confidence: drop a guess if its drafter gave it less than this probability")
    epsilon: float = option(0.09, "typical: a guess the target finds likelier than this stands")
    delta: float = option(0.3, "typical: where the target is unsure, this share of its typical probability is enough")
    weight: float = option(0.7, "ensemble: the target's share of the distribution; the drafter has the rest")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise RequestError(f.name, f"must be between 0 and 1, not {value}")
        if self.lower > self.upper:
            raise RequestError("lower", f"must be at most upper ({self.upper}), not {self.lower}")

    @classmethod
    def for_workload(cls, workload: str) -> ThresholdSettings:
        """The rule `confidence` as it suits one kind of text."""
        if workload not in WORKLOADS:
            raise RequestError("workload", f"{workload!r} is not known; {nearest(workload, WORKLOADS)}")
        return cls(upper=WORKLOADS[workload])


DEFAULTS = ThresholdSettings()


def confidence(
    draft: Draft, probs: Tensor, chance: RandomSource, settings: ThresholdSettings = DEFAULTS
) -> VerifyResult:
    """Trust a drafter that is sure, drop a guess it doubts, and in between ask for the target's likeliest token."""

    def stands(node: int, target: Tensor) -> bool:
        sure = _sureness(draft, node)
        liked = bool(target[draft.tokens[node]] == target.max())
        return sure >= settings.upper or (sure >= settings.lower and liked)

    return _walk(draft, probs, chance, stands)


def typical(draft: Draft, probs: Tensor, chance: RandomSource, settings: ThresholdSettings = DEFAULTS) -> VerifyResult:
    """Medusa's rule: a guess stands if the target finds it not much less likely than what it typically says."""

    def stands(node: int, target: Tensor) -> bool:
        entropy = -float(target.xlogy(target).sum())
        return float(target[draft.tokens[node]]) > min(settings.epsilon, settings.delta * math.exp(-entropy))

    return _walk(draft, probs, chance, stands)


def ensemble(draft: Draft, probs: Tensor, chance: RandomSource, settings: ThresholdSettings = DEFAULTS) -> VerifyResult:
    """Text of weight * target + (1 - weight) * draft, exactly, wherever a guess is made (arXiv 2604.07622).

    After the last node of a branch there is no guess to mix in, and the token is the target's own.
    """
    mixed = probs.double().clone()
    for node in range(-1, len(draft)):
        for first in draft.children(node)[:1]:
            row = mixed[node + 1]
            row.mul_(settings.weight).add_(guess_of(draft, first, row), alpha=1.0 - settings.weight)
    return rejection(draft, mixed, chance)


def _walk(draft: Draft, probs: Tensor, chance: RandomSource, stands: Callable[[int, Tensor], bool]) -> VerifyResult:
    """Take the first sibling that stands, for as long as one does; then draw from the target."""
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        target = probs[node + 1].double()
        child = next((child for child in draft.children(node) if stands(child, target)), None)
        if child is None:
            return VerifyResult(tuple(path), chance.pick(target))
        path.append(child)


def _sureness(draft: Draft, node: int) -> float:
    """The probability the drafter gave to the node's token."""
    if draft.probs is not None and is_drawn(draft, node):
        return float(draft.probs[node, draft.tokens[node]])
    assert draft.confidence is not None, "a draft judged by its confidence must state it"
    return draft.confidence[node]

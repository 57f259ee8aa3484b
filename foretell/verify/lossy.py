"""Lossy rules, which trade the target's distribution for longer drafts, and the workload presets of `confidence`.

A request uses one of them only if it names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from foretell.errors import RequestError
from foretell.options import nearest, option, strict
from foretell.types import Draft, VerifyResult

from .rejection import draft_distribution, rejection

if TYPE_CHECKING:
    from torch import Tensor

    from .randomness import RandomSource

# Upper threshold of the rule `confidence` by kind of workload.
WORKLOADS = {"code": 0.75, "json": 0.65, "narrative": 0.5}

MIN_CODE_LINES = 2  # one matching line may be a sentence that looks like code
MAX_LINE_CHARS = 200  # prefix of a line that is searched; bounds the time of the patterns on a long line

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
_JSON_REQUEST = re.compile(
    r"\b(as|in|into|to|valid|only|return|output|produce|with) ((an?|the|valid|only|one|single) ){0,3}json\b|"
    r"\bjson (object|array|schema|format|only)\b",
    re.IGNORECASE,
)
_JSON_TEXT = re.compile(r'\s*[\[{]\s*("|\{|\[|\d|\]|\})')


@strict
@dataclass(frozen=True, kw_only=True)
class ThresholdSettings:
    """Thresholds of the lossy rules."""

    upper: float = option(0.9, "confidence: accept a draft token of at least this draft probability unconditionally")
    lower: float = option(0.2, "confidence: reject a draft token of less than this draft probability")
    epsilon: float = option(0.09, "typical: accept a draft token above this target probability")
    delta: float = option(0.3, "typical: accept a draft token above this factor of exp(-entropy of the target)")
    weight: float = option(0.7, "ensemble: weight of the target in the mixture with the draft distribution")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise RequestError(f.name, f"must be between 0 and 1, not {value}")
        if self.lower > self.upper:
            raise RequestError("lower", f"must be at most upper ({self.upper}), not {self.lower}")

    @classmethod
    def for_workload(cls, workload: str) -> ThresholdSettings:
        """Return the settings of the rule `confidence` for one kind of workload."""
        if workload not in WORKLOADS:
            raise RequestError("workload", f"{workload!r} is not known; {nearest(workload, WORKLOADS)}")
        return cls(upper=WORKLOADS[workload])


DEFAULTS = ThresholdSettings()


def confidence(
    draft: Draft, probs: Tensor, random: RandomSource, settings: ThresholdSettings = DEFAULTS
) -> VerifyResult:
    """Accept by the drafter's confidence: from `upper` always, below `lower` never, between them if it is the argmax.

    The argmax is the target's.
    """

    def accepts(node: int, target: Tensor) -> bool:
        draft_confidence = _draft_confidence(draft, node)
        is_argmax = bool(target[draft.tokens[node]] == target.max())
        return draft_confidence >= settings.upper or (draft_confidence >= settings.lower and is_argmax)

    return _accept_while(accepts, draft, probs, random)


def typical(draft: Draft, probs: Tensor, random: RandomSource, settings: ThresholdSettings = DEFAULTS) -> VerifyResult:
    """Typical acceptance of Medusa (Cai et al. 2024): accept if p(x) > min(epsilon, delta * exp(-entropy of p))."""

    def accepts(node: int, target: Tensor) -> bool:
        entropy = -float(target.xlogy(target).sum())
        return float(target[draft.tokens[node]]) > min(settings.epsilon, settings.delta * math.exp(-entropy))

    return _accept_while(accepts, draft, probs, random)


def ensemble(draft: Draft, probs: Tensor, random: RandomSource, settings: ThresholdSettings = DEFAULTS) -> VerifyResult:
    """Sample exactly from weight * target + (1 - weight) * draft at every drafted position (arXiv 2604.07622).

    After the last node of a branch there is no draft distribution to mix in, and the token is the target's own.
    """
    mixed = probs.double().clone()
    for node in range(-1, len(draft)):
        for first in draft.children(node)[:1]:
            row = mixed[node + 1]
            row.mul_(settings.weight).add_(draft_distribution(draft, first, row), alpha=1.0 - settings.weight)
    return rejection(draft, mixed, random)


def _accept_while(
    accepts: Callable[[int, Tensor], bool], draft: Draft, probs: Tensor, random: RandomSource
) -> VerifyResult:
    """Accept the first accepted sibling at each depth; after the last one, sample from the target."""
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        target = probs[node + 1].double()
        child = next((child for child in draft.children(node) if accepts(child, target)), None)
        if child is None:
            return VerifyResult(tuple(path), random.sample(target))
        path.append(child)


def _draft_confidence(draft: Draft, node: int) -> float:
    """Return the probability that the drafter gave to the node's token."""
    if draft.probs is not None and draft.is_sampled(node):
        return float(draft.probs[node, draft.tokens[node]])
    assert draft.confidence is not None, "the rule `confidence` needs a drafter that states its confidence"
    return draft.confidence[node]


def detect_workload(text: str, wants_json: bool) -> str:
    """Classify a request as one of WORKLOADS by its text and whether its response format is JSON.

    The response format decides where it is given. Otherwise, in this order: a code fence, lines that look like code or
    a request for code; JSON or a request for JSON; else narrative. Code goes before JSON, because a program that
    handles JSON is still a program.
    """
    if wants_json:
        return "json"
    is_json = bool(_JSON_TEXT.match(text))
    lines = [line[:MAX_LINE_CHARS] for line in text.splitlines() if line]
    if any(map(_is_fence, lines)) or any(map(_asks_for_code, lines)) or (not is_json and _looks_like_code(lines)):
        return "code"
    return "json" if is_json or any(map(_JSON_REQUEST.search, lines)) else "narrative"


def _is_fence(line: str) -> bool:
    return line.lstrip().startswith(("```", "~~~"))


def _asks_for_code(line: str) -> bool:
    """Return whether a sentence of the line has a verb of making and a word for code, and no word for prose."""
    sentences = (set(re.findall(r"[\w+]+", sentence.lower())) for sentence in re.split(r"[.?!]", line))
    return any(words & _VERBS and words & _CODE and not words & _PROSE for words in sentences)


def _looks_like_code(lines: list[str]) -> bool:
    return sum(1 for line in lines if _CODE_LINE.match(line)) >= MIN_CODE_LINES

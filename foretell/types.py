"""The values that travel between layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .errors import RequestError
from .options import option, strict

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]

TARGET = "target"  # origin of a token that no drafter proposed
DEFAULT_MAX_TOKENS = 256


@strict
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request wants its tokens drawn. The defaults are greedy; `LLM.default_params` gives the model's own."""

    temperature: float = option(0.0, "0 takes the likeliest token; 1 samples from the model's own distribution")
    top_p: float = option(1.0, "keep the likeliest tokens that together reach this probability")
    top_k: int = option(0, "keep this many of the likeliest tokens; 0 keeps all")
    min_p: float = option(0.0, "drop tokens below this share of the likeliest one's probability")
    max_tokens: int | None = option(
        None, f"the most tokens to write (default: {DEFAULT_MAX_TOKENS}, or fewer where the context ends)"
    )
    seed: int | None = option(None, "the same seed gives the same text; drawn and reported where left out")
    stop: tuple[str, ...] = option((), "end the text before this string; may be given several times")
    stop_token_ids: tuple[int, ...] = option((), "end the text at this token; may be given several times")
    ignore_eos: bool = option(False, "go on after the model's end tokens")
    n: int = option(1, "how many texts to write for each prompt")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.top_k == -1:  # vLLM's word for "all"
            object.__setattr__(self, "top_k", 0)
        self._check_distribution()
        self._check_limits()

    def _check_distribution(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise RequestError("temperature", f"must be 0 or a positive number, not {self.temperature}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError("top_p", f"must be above 0 and at most 1, not {self.top_p}")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise RequestError("min_p", f"must be between 0 and 1, not {self.min_p}")
        if not (_is_whole(self.top_k) and self.top_k >= 0):
            raise RequestError("top_k", f"must be 0 (all) or a positive whole number, not {self.top_k}")

    def _check_limits(self) -> None:
        if self.max_tokens is not None and not (_is_whole(self.max_tokens) and self.max_tokens >= 1):
            raise RequestError("max_tokens", f"must be 1 or more, not {self.max_tokens}")
        if not (_is_whole(self.n) and 1 <= self.n <= 128):
            raise RequestError("n", f"must be between 1 and 128, not {self.n}")
        if self.seed is not None and not (_is_whole(self.seed) and -(2**63) <= self.seed < 2**63):
            raise RequestError("seed", f"must be a whole number of at most 64 bits, not {self.seed}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError("stop", "must be strings of at least one character")
        if not all(_is_whole(token) and token >= 0 for token in self.stop_token_ids):
            raise RequestError("stop_token_ids", "must be token ids, 0 or more")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True)
class SpeculationChoice:
    """What one request wants of speculation; None leaves it to the engine."""

    enabled: bool = True
    max_draft: int | None = None


@dataclass(frozen=True)
class Request:
    """One text to be written: everything that decides it, settled before the first step."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    choice: int = 0
    tenant: str = ""
    speculation: SpeculationChoice = SpeculationChoice()


@dataclass(eq=False, slots=True)
class Sequence:
    """A request being written. `tokens` is the truth; everything else can be rebuilt from it."""

    id: int
    request: Request
    tokens: list[int]
    cached: int = 0  # tokens[:cached] have their keys and values in the target's cache
    pages: list[int] = field(default_factory=list)
    published: int = 0  # of the pages, those offered to the prefix index
    finish: FinishReason | None = None

    @property
    def pending(self) -> int:
        """Tokens that the target has still to run."""
        return len(self.tokens) - self.cached

    @property
    def written(self) -> int:
        """Tokens written so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.request.max_tokens - self.written


@dataclass(frozen=True)
class Budget:
    """How much may be guessed for a sequence in this step; 0 nodes is plain decoding."""

    nodes: int = 0
    drafter: str = ""  # the arm of a mix; empty where there is one drafter

    @property
    def depth(self) -> int:
        """The longest branch."""
        return self.nodes


@dataclass(frozen=True)
class Share:
    """One sequence's part of a step, as it was planned: `take` pending tokens and a draft of at most `budget`."""

    seq: Sequence
    take: int
    budget: Budget = Budget()
    start: int = 0  # tokens cached before this step
    length: int = 0  # tokens known before this step

    @classmethod
    def of(cls, seq: Sequence, take: int, budget: Budget = Budget()) -> Share:
        return cls(seq, take, budget, seq.cached, len(seq.tokens))

    @property
    def reaches_end(self) -> bool:
        """Whether this step runs the sequence's last token, and so writes at least one more."""
        return self.start + self.take == self.length


@dataclass(frozen=True)
class Draft:
    """Guessed continuations of one sequence: a tree whose root is the sequence's last token.

    parents[i] is the node before node i, or -1 for the root; parents always come first.
    probs[i] is the distribution node i was drawn from; a node that was not drawn at random needs none.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    source: str = ""
    drawn: tuple[bool, ...] | None = None  # None: no node was drawn at random
    confidence: tuple[float, ...] | None = None
    probs: Tensor | None = None  # [nodes, vocab]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), "each node has a parent"

    @classmethod
    def chain(cls, tokens: list[int] | tuple[int, ...], source: str = "", probs: Tensor | None = None) -> Draft:
        """A draft without branches."""
        drawn = None if probs is None else (True,) * len(tokens)
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), source, drawn, None, probs)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def depths(self) -> list[int]:
        """1 for a node that hangs on the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def cut(self, nodes: int) -> Draft:
        """The first `nodes` nodes; parents come first, so what is left is a tree."""
        if nodes >= len(self):
            return self
        return Draft(
            self.tokens[:nodes],
            self.parents[:nodes],
            self.source,
            self.drawn and self.drawn[:nodes],
            self.confidence and self.confidence[:nodes],
            None if self.probs is None else self.probs[:nodes],
        )


@dataclass(frozen=True)
class Verdict:
    """What the target made of a draft: the accepted nodes, root to leaf, and the token that follows them."""

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True)
class Outcome:
    """What a step taught about one sequence: the same value for drafter, controller and statistics.

    `chosen` is the target's own token after the root and after each node, `kept` the tokens that entered the
    text (an end token or a limit can cut what the verdict accepted), `features` a row for each token that was run.
    """

    share: Share
    draft: Draft = Draft()
    verdict: Verdict | None = None  # None: the prompt goes on, nothing was written
    chosen: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    features: Tensor | None = None

    @property
    def accepted(self) -> int:
        """Guesses that entered the text."""
        return 0 if self.verdict is None else min(len(self.verdict.path), len(self.kept))


@dataclass(frozen=True)
class Delta:
    """What one step added to one text."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    text: str
    origins: tuple[str, ...]  # for each token the drafter that proposed it, or TARGET
    drafted: int = 0  # guesses checked in this step
    finish: FinishReason | None = None

"""Who guesses, what guesses cost, and what they bring at a known acceptance."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.errors import RequestError

from .model_shape import Shape, find_shape
from .steps import AUTO, BITS, Placed, Precision, precision_of

FREE = ("ngram", "suffix", "recycle", "lookahead", "prediction", "auto", "oracle")  # no weights, no steps of their own
HEAD = "eagle"
HEAD_VOCAB = 32_000  # an EAGLE-3 head scores a part of the vocabulary
SELF = "self:"
SOLVED = 1e-6


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens a step yields where each guess stands with this probability, the target's own token included."""
    if acceptance >= 1:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


@dataclass(frozen=True)
class DrafterCost:
    """What drafts: a model with steps of its own, or something that costs the device nothing."""

    name: str
    model: Placed | None = None
    shares_cache: bool = False  # whether it writes into the target's own pages
    part_of_target: bool = False  # whether it is split as the target is, for it has the target's own layers

    def seconds(self, texts: float, length: int, context: float) -> float:
        """On the device, for a chain of so many tokens: one behind the other."""
        return 0.0 if self.model is None else length * self.model.step(texts, 1, context).total

    def beside(self, split: int) -> DrafterCost:
        """With a target that is split over so many devices; a model of its own takes no more of them than it did."""
        if self.model is None:
            return self
        own = split if self.part_of_target else min(self.model.split, split)
        return replace(self, model=replace(self.model, split=own))

    @property
    def weight_bytes(self) -> float:
        return 0.0 if self.model is None else self.model.weight_bytes

    @property
    def token_bytes(self) -> float:
        return 0.0 if self.model is None or self.shares_cache else self.model.token_bytes


def find_guesser(spec: str, target: Placed, dtype: str = AUTO, split: int = 1) -> DrafterCost:
    """Who a user means: a drafter without weights, a head on the target, the target in fewer bits, or a model."""
    if spec == "none":
        raise RequestError("draft", "none is plain decoding, which every plan has beside it; leave it out")
    if spec in FREE:
        return DrafterCost(spec)
    if spec == HEAD:
        shape = head_on(target.shape)
        head = _beside(target, shape, precision_of(dtype, shape, "draft_dtype"), target.split)
        return DrafterCost(spec, head, part_of_target=True)
    if spec.startswith(SELF):
        bits = spec.removeprefix(SELF)
        if bits not in ("int8", "int4"):
            raise RequestError("draft", f"self is written self:int8 or self:int4, not {spec}")
        own = _beside(target, target.shape, Precision(bits, BITS[bits]), target.split)
        return DrafterCost(spec, own, shares_cache=True, part_of_target=True)
    shape = find_shape(spec.removeprefix("model:"), "draft")
    return DrafterCost(spec, _beside(target, shape, precision_of(dtype, shape, "draft_dtype"), split))


def head_on(target: Shape) -> Shape:
    """A draft head as EAGLE-3's: one layer as wide as the target's, which reads its states and its last token."""
    return replace(
        target,
        name=HEAD,
        layers=1,
        vocab=min(HEAD_VOCAB, target.vocab),
        tied=True,  # the embedding is the target's
        window=None,
        windowed=0,
        experts=None,
        latent=None,
        kv_heads=min(target.kv_heads, target.heads),
        bits=None,
    )


def _beside(target: Placed, shape: Shape, precision: Precision, split: int) -> Placed:
    return replace(target, shape=shape, precision=precision, split=split)


@dataclass(frozen=True)
class Round:
    """Seconds of a step by the wall clock, and what it yields."""

    length: int
    drafting: float
    verifying: float  # the target's step on the device
    host: float
    tokens: float  # of one text

    @property
    def seconds(self) -> float:
        return self.drafting + self.verifying + self.host

    @property
    def rate(self) -> float:
        """Tokens a second of one text."""
        return self.tokens / self.seconds


def round_of(
    target: Placed, guesser: DrafterCost, texts: float, context: float, length: int, acceptance: float = 0.0
) -> Round:
    """One step with drafts of so many tokens; none is plain decoding."""
    return Round(
        length=length,
        drafting=guesser.seconds(texts, length, context),
        verifying=target.step(texts, length + 1, context).total,
        host=target.efficiency.host_seconds(texts, guessed=length > 0),
        tokens=expected_tokens(acceptance, length),
    )


def best_round(
    target: Placed, guesser: DrafterCost, texts: float, context: float, most: int, acceptance: float
) -> Round:
    """The length that writes fastest; 0 where guessing does not pay."""
    rounds = (round_of(target, guesser, texts, context, length, acceptance) for length in range(most + 1))
    return max(rounds, key=lambda each: each.rate)


def break_even(plain: Round, guessed: Round) -> float | None:
    """The acceptance from which on a length is no slower than plain decoding; None where no acceptance is enough."""
    needed = guessed.seconds / plain.seconds
    if expected_tokens(1.0, guessed.length) < needed:
        return None
    low, high = 0.0, 1.0
    while high - low > SOLVED:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, guessed.length) < needed else (low, middle)
    return high

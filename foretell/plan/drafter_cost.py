"""Who guesses, what guesses cost, and what they bring at a known acceptance."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.errors import RequestError
from foretell.utils.speculation_math import break_even_acceptance, expected_tokens

from .model_shape import ModelShape, find_model_shape
from .steps import AUTO, BITS, DeployedModel, Precision, precision_of

FREE = ("ngram", "suffix", "recycle", "lookahead", "prediction", "auto", "oracle")  # no weights, no steps of their own
HEAD = "eagle"
HEAD_VOCAB = 32_000  # an EAGLE-3 head scores a part of the vocabulary
SELF = "self:"


@dataclass(frozen=True)
class DrafterCost:
    """What drafts: a model with steps of its own, or something that costs the device nothing."""

    name: str
    model: DeployedModel | None = None
    shares_kv_cache: bool = False  # whether it writes into the target's own pages
    part_of_target: bool = False  # whether it is split as the target is, for it has the target's own layers

    def seconds(self, texts: float, length: int, context: float) -> float:
        """On the device, for a chain of so many tokens: one behind the other."""
        return 0.0 if self.model is None else length * self.model.step(texts, 1, context).total

    def with_target_split(self, split: int) -> DrafterCost:
        """With a target that is split over so many devices; a model of its own takes no more of them than it did."""
        if self.model is None:
            return self
        own = split if self.part_of_target else min(self.model.tensor_parallel, split)
        return replace(self, model=replace(self.model, tensor_parallel=own))

    @property
    def weight_bytes(self) -> float:
        return 0.0 if self.model is None else self.model.weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return 0.0 if self.model is None or self.shares_kv_cache else self.model.kv_bytes_per_token


def find_drafter(spec: str, target: DeployedModel, dtype: str = AUTO, split: int = 1) -> DrafterCost:
    """Who a user means: a drafter without weights, a head on the target, the target in fewer bits, or a model."""
    if spec == "none":
        raise RequestError("draft", "none is plain decoding, which every plan has beside it; leave it out")
    if spec in FREE:
        return DrafterCost(spec)
    if spec == HEAD:
        shape = eagle_head_shape(target.shape)
        head = _beside(target, shape, precision_of(dtype, shape, "draft_dtype"), target.tensor_parallel)
        return DrafterCost(spec, head, part_of_target=True)
    if spec.startswith(SELF):
        bits = spec.removeprefix(SELF)
        if bits not in ("int8", "int4"):
            raise RequestError("draft", f"self is written self:int8 or self:int4, not {spec}")
        own = _beside(target, target.shape, Precision(bits, BITS[bits]), target.tensor_parallel)
        return DrafterCost(spec, own, shares_kv_cache=True, part_of_target=True)
    shape = find_model_shape(spec.removeprefix("model:"), "draft")
    return DrafterCost(spec, _beside(target, shape, precision_of(dtype, shape, "draft_dtype"), split))


def eagle_head_shape(target: ModelShape) -> ModelShape:
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


def _beside(target: DeployedModel, shape: ModelShape, precision: Precision, split: int) -> DeployedModel:
    return replace(target, shape=shape, precision=precision, tensor_parallel=split)


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step by the wall clock, and what it yields."""

    length: int
    draft_seconds: float
    verify_seconds: float  # the target's step on the device
    host_seconds: float
    tokens: float  # of one text

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one text."""
        return self.tokens / self.seconds


def estimate_step(
    target: DeployedModel, guesser: DrafterCost, texts: float, context: float, length: int, acceptance: float = 0.0
) -> StepEstimate:
    """One step with drafts of so many tokens; none is plain decoding."""
    return StepEstimate(
        length=length,
        draft_seconds=guesser.seconds(texts, length, context),
        verify_seconds=target.step(texts, length + 1, context).total,
        host_seconds=target.efficiency.host_seconds(texts, guessed=length > 0),
        tokens=expected_tokens(acceptance, length),
    )


def best_step(
    target: DeployedModel, guesser: DrafterCost, texts: float, context: float, most: int, acceptance: float
) -> StepEstimate:
    """The length that writes fastest; 0 where guessing does not pay."""
    rounds = (estimate_step(target, guesser, texts, context, length, acceptance) for length in range(most + 1))
    return max(rounds, key=lambda each: each.tokens_per_second)


def break_even(plain: StepEstimate, speculative: StepEstimate) -> float | None:
    """Return the acceptance from which on a length is no slower than plain decoding, or None if there is none."""
    return break_even_acceptance(speculative.seconds / plain.seconds, speculative.length)

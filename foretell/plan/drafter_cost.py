"""Drafters in a plan: their cost, and the expected tokens of a step at a given acceptance."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.errors import RequestError
from foretell.utils.speculation_math import break_even_acceptance, expected_tokens

from .model_shape import ModelShape, find_model_shape
from .steps import AUTO, BITS, DeployedModel, Precision, precision_of

FREE = ("ngram", "suffix", "corpus", "recycle", "lookahead", "prediction", "auto", "oracle")  # without weights
HEAD = "eagle"
HEAD_VOCAB = 32_000  # draft vocabulary of an EAGLE-3 head
SELF = "self:"


@dataclass(frozen=True)
class DrafterCost:
    """A drafter: a model that runs on the device, or one without weights that costs the device nothing."""

    name: str
    model: DeployedModel | None = None
    shares_kv_cache: bool = False  # writes into the target's own pages
    part_of_target: bool = False  # is split as the target is, because it consists of the target's layers

    def seconds(self, batch: float, length: int, context: float) -> float:
        """Return the device seconds of a chain, which is drafted token by token."""
        return 0.0 if self.model is None else length * self.model.step(batch, 1, context).total

    def with_target_split(self, split: int) -> DrafterCost:
        """Return the drafter of a target on `split` devices. A draft model is split over no more than before."""
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
    """Return the drafter named by `spec`: one without weights, a head, the target quantized, or a draft model."""
    if spec == "none":
        raise RequestError("draft", "none is plain decoding, which every plan contains; leave it out")
    if spec in FREE:
        return DrafterCost(spec)
    if spec == HEAD:
        shape = eagle_head_shape(target.shape)
        head = _deploy_like(target, shape, precision_of(dtype, shape, "draft_dtype"), target.tensor_parallel)
        return DrafterCost(spec, head, part_of_target=True)
    if spec.startswith(SELF):
        bits = spec.removeprefix(SELF)
        if bits not in ("int8", "int4"):
            raise RequestError("draft", f"must be self:int8 or self:int4, not {spec}")
        own = _deploy_like(target, target.shape, Precision(bits, BITS[bits]), target.tensor_parallel)
        return DrafterCost(spec, own, shares_kv_cache=True, part_of_target=True)
    shape = find_model_shape(spec.removeprefix("model:"), "draft")
    return DrafterCost(spec, _deploy_like(target, shape, precision_of(dtype, shape, "draft_dtype"), split))


def eagle_head_shape(target: ModelShape) -> ModelShape:
    """Return the shape of an EAGLE-3 head: one layer of the target's width over its hidden states and last token."""
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


def _deploy_like(target: DeployedModel, shape: ModelShape, precision: Precision, split: int) -> DeployedModel:
    return replace(target, shape=shape, precision=precision, tensor_parallel=split)


@dataclass(frozen=True)
class StepEstimate:
    """Wall-clock seconds of a step, and its expected tokens."""

    length: int
    draft_seconds: float
    verify_seconds: float  # target step on the device
    host_seconds: float
    tokens: float  # expected, per sequence

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of one sequence."""
        return self.tokens / self.seconds


def estimate_step(
    target: DeployedModel, drafter: DrafterCost, batch: float, context: float, length: int, acceptance: float = 0.0
) -> StepEstimate:
    """Return the estimate of a step with drafts of `length` tokens; 0 is plain decoding."""
    return StepEstimate(
        length=length,
        draft_seconds=drafter.seconds(batch, length, context),
        verify_seconds=target.step(batch, length + 1, context).total,
        host_seconds=target.efficiency.host_seconds(batch, has_drafts=length > 0),
        tokens=expected_tokens(acceptance, length),
    )


def best_step(
    target: DeployedModel, drafter: DrafterCost, batch: float, context: float, max_length: int, acceptance: float
) -> StepEstimate:
    """Return the fastest step over all draft lengths; its length is 0 if speculation does not pay."""
    steps = (estimate_step(target, drafter, batch, context, length, acceptance) for length in range(max_length + 1))
    return max(steps, key=lambda each: each.tokens_per_second)


def break_even(plain: StepEstimate, speculative: StepEstimate) -> float | None:
    """Return the acceptance from which on a length is no slower than plain decoding, or None if there is none."""
    return break_even_acceptance(speculative.seconds / plain.seconds, speculative.length)

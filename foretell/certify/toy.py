"""Toy languages small enough to enumerate all outcomes of a step, and toy drafters for them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.types import Draft, VerifyResult
from foretell.verify.randomness import RandomSource, enumerate_outcomes
from foretell.verify.rules import Rule

Context = tuple[int, ...]
Distribution = dict[Context, float]


@dataclass(frozen=True)
class ToyLanguage:
    """The distributions of target and drafter after every context of up to `depth` tokens."""

    vocab: int
    target: dict[Context, Tensor]
    draft: dict[Context, Tensor]


ToyDrafter = Callable[[ToyLanguage, Context, RandomSource], Draft]
DistributionPair = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def toy_language(kind: str, vocab: int = 3, depth: int = 5, seed: int = 0) -> ToyLanguage:
    """Build a toy language of random distributions; `kind` is one of KINDS."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [c for n in range(depth + 1) for c in itertools.product(range(vocab), repeat=n)]
    rows = {context: KINDS[kind](vocab, generator) for context in contexts}
    return ToyLanguage(vocab, {c: row[0] for c, row in rows.items()}, {c: row[1] for c, row in rows.items()})


def _scale(row: Tensor) -> Tensor:
    return row / row.sum()


def _uneven(vocab: int, generator: torch.Generator) -> Tensor:
    return _scale(torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2 + 0.02)


def _with_zero(row: Tensor, generator: torch.Generator) -> Tensor:
    row = row.clone()
    row[int(torch.randint(len(row), (), generator=generator))] = 0
    return _scale(row)


def _one_hot(row: Tensor) -> Tensor:
    return torch.eye(len(row), dtype=torch.float64)[row.argmax()]


def _random(vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _uneven(vocab, generator), _uneven(vocab, generator)


def _zeros(vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _with_zero(_uneven(vocab, generator), generator), _with_zero(_uneven(vocab, generator), generator)


def _equal(vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    row = _uneven(vocab, generator)
    return row, row.clone()


def _disjoint(vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    even = torch.arange(vocab) % 2 == 0
    target, draft = _random(vocab, generator)
    return _scale(target * even), _scale(draft * ~even)


def _greedy(vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    target, draft = _random(vocab, generator)
    return _one_hot(target), draft


def _greedy_both(vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    target, draft = _random(vocab, generator)
    return _one_hot(target), _one_hot(draft)


KINDS: dict[str, DistributionPair] = {
    "random": _random,
    "zeros": _zeros,
    "equal": _equal,
    "disjoint": _disjoint,
    "greedy": _greedy,
    "greedy both": _greedy_both,
}


class CheckedRandom:
    """A random source that asserts that a rule uses each random number at most once."""

    def __init__(self, random: RandomSource) -> None:
        self.random = random
        self.used: set[int] = set()  # nodes; -1 for the sampled token

    def accepts(self, probability: float, node: int) -> bool:
        assert 0 <= probability <= 1
        assert node not in self.used
        self.used.add(node)
        return self.random.accepts(probability, node)

    def sample(self, weights: Tensor) -> int:
        assert -1 not in self.used
        assert (weights >= 0).all()
        self.used.add(-1)
        return self.random.sample(weights)


def target_rows(language: ToyLanguage, context: Context, draft: Draft) -> Tensor:
    """Return the target's distributions after the root and after each node."""
    contexts = [context]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        contexts.append((*contexts[parent + 1], token))
    return torch.stack([language.target[c] for c in contexts])


Guard = Callable[[RandomSource], RandomSource]


def run_step(
    language: ToyLanguage,
    context: Context,
    make: ToyDrafter,
    rule: Rule,
    random: RandomSource,
    guard: Guard = CheckedRandom,
) -> tuple[Draft, VerifyResult]:
    """Draft and verify once; return the draft and its result."""
    draft = make(language, context, random)
    return draft, rule(draft, target_rows(language, context, draft), guard(random))


def step_distribution(
    language: ToyLanguage, context: Context, make: ToyDrafter, rule: Rule, guard: Guard = CheckedRandom
) -> Distribution:
    """Return the distribution of the output tokens of one step, over the randomness of draft and rule."""
    distribution: Distribution = defaultdict(float)
    for probability, (draft, result) in enumerate_outcomes(
        lambda random: run_step(language, context, make, rule, random, guard)
    ):
        output = (*(draft.tokens[node] for node in result.accepted_path), result.next_token)
        distribution[output] += probability
    return distribution


def output_distribution(
    language: ToyLanguage, make: ToyDrafter, rule: Rule, length: int, guard: Guard = CheckedRandom
) -> Distribution:
    """Return the distribution of the first `length` output tokens over consecutive steps."""
    finished: Distribution = defaultdict(float)
    unfinished: Distribution = defaultdict(float, {(): 1.0})
    while unfinished:
        context = min(unfinished, key=len)
        probability = unfinished.pop(context)
        for new_tokens, step_probability in step_distribution(language, context, make, rule, guard).items():
            output = context + new_tokens
            (unfinished if len(output) < length else finished)[output[:length]] += probability * step_probability
    return finished


def target_distribution(rows: dict[Context, Tensor], vocab: int, length: int) -> Distribution:
    """Return the distribution of the first `length` tokens without drafts, token by token from `rows`."""
    found: Distribution = {(): 1.0}
    for _ in range(length):
        found = {(*c, x): p * float(rows[c][x]) for c, p in found.items() for x in range(vocab)}
    return found


def total_variation(one: Distribution, other: Distribution) -> float:
    """Return the total variation distance of two distributions."""
    return 0.5 * sum(abs(one.get(c, 0.0) - other.get(c, 0.0)) for c in {*one, *other})


def bias(language: ToyLanguage, make: ToyDrafter, rule: Rule, length: int, guard: Guard = CheckedRandom) -> float:
    """Return the total variation between outputs with drafts and the target's own distribution."""
    speculative = output_distribution(language, make, rule, length, guard)
    return total_variation(speculative, target_distribution(language.target, language.vocab, length))


def mean_accepted(language: ToyLanguage, make: ToyDrafter, rule: Rule) -> float:
    """Return the expected number of accepted draft tokens of the first step."""
    outcomes = enumerate_outcomes(lambda random: run_step(language, (), make, rule, random))
    return sum(probability * len(result.accepted_path) for probability, (_, result) in outcomes)


@dataclass
class ToyDraftBuilder:
    """A draft of the toy language under construction, as tokens and parents."""

    language: ToyLanguage
    root: Context
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def context(self, node: int) -> Context:
        """Return the tokens up to a node; -1 is the root."""
        return self.root if node < 0 else (*self.context(self.parents[node]), self.tokens[node])

    def add(self, parent: int, token: int, sampled_from: Tensor | None = None) -> int:
        """Append a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.sampled.append(sampled_from is not None)
        # The row of a node that was not sampled is no distribution: a rule that reads it fails the test.
        self.rows.append(torch.full((self.language.vocab,), 0.5) if sampled_from is None else sampled_from)
        return len(self.tokens) - 1

    def finish(self) -> Draft:
        rows = torch.stack(self.rows) if self.rows else torch.zeros(0, self.language.vocab)
        return Draft(tuple(self.tokens), tuple(self.parents), "toy", tuple(self.sampled), None, rows)


def chain(width: int, stop: Callable[[Tensor, int], bool] = lambda row, token: False) -> ToyDrafter:
    """Draft a sampled chain; `stop` sees a row and the token sampled from it, which stays in the draft."""

    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        builder, node = ToyDraftBuilder(language, context), -1
        while len(builder.tokens) < width:
            row = language.draft[builder.context(node)]
            node = builder.add(node, random.sample(row), row)
            if stop(row, builder.tokens[node]):
                break
        return builder.finish()

    return make


def stop_when_uncertain(width: int) -> ToyDrafter:
    """Draft a sampled chain that ends before a row whose largest probability is at most 0.5; no token decides it."""

    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        builder, node = ToyDraftBuilder(language, context), -1
        while len(builder.tokens) < width and float(language.draft[builder.context(node)].max()) > 0.5:
            row = language.draft[builder.context(node)]
            node = builder.add(node, random.sample(row), row)
        return builder.finish()

    return make


def mixed_chain(sampled: tuple[bool, ...]) -> ToyDrafter:
    """Draft a chain of which some nodes are sampled and the others are the argmax."""

    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        builder, node = ToyDraftBuilder(language, context), -1
        for is_sampled in sampled:
            row = language.draft[builder.context(node)]
            token = random.sample(row) if is_sampled else int(row.argmax())
            node = builder.add(node, token, row if is_sampled else None)
        return builder.finish()

    return make


TreeShape = list["TreeShape"]


def tree(shape: TreeShape, replace: bool) -> ToyDrafter:
    """Draft a tree of siblings sampled with or without replacement; `shape` nests a list for each child."""

    def grow(builder: ToyDraftBuilder, node: int, shape: TreeShape, random: RandomSource) -> None:
        row = builder.language.draft[builder.context(node)]
        children = []
        for _ in shape:
            if row.sum() == 0:
                break
            children.append(builder.add(node, random.sample(row), row))
            row = row if replace else without(row, builder.tokens[-1])
        for child, below in zip(children, shape, strict=False):
            grow(builder, child, below, random)

    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        builder = ToyDraftBuilder(language, context)
        grow(builder, -1, shape, random)
        return builder.finish()

    return make


def top_tree(width: int, depth: int) -> ToyDrafter:
    """Draft the top `width` tokens below each node; none is sampled."""

    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        builder, level = ToyDraftBuilder(language, context), [-1]
        for _ in range(depth):
            best = {node: language.draft[builder.context(node)].topk(width).indices.tolist() for node in level}
            level = [builder.add(node, token) for node in level for token in best[node]]
        return builder.finish()

    return make


def mixed_tree(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
    """Draft the argmax, a sibling sampled without it, one sampled with it, and sampled children."""
    builder = ToyDraftBuilder(language, context)
    row = language.draft[context]
    first = builder.add(-1, int(row.argmax()))
    others = without(row, builder.tokens[first])
    second = builder.add(-1, random.sample(others), others) if others.sum() > 0 else first
    builder.add(-1, random.sample(row), row)
    for node in {first, second}:
        below = language.draft[builder.context(node)]
        builder.add(node, random.sample(below), below)
    return builder.finish()


def without(row: Tensor, token: int) -> Tensor:
    """Return `row` without a token, scaled to sum to 1; all 0 where it was the only one."""
    rest = row.clone()
    rest[token] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest

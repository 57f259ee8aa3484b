"""A batch of chains gets the results of each chain alone, with the same noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretell.sampling import noise
from foretell.types import Draft
from foretell.verify import batched
from foretell.verify.batched import ChainBatch, ChainResults
from foretell.verify.randomness import StepRandom
from foretell.verify.rules import EXACT

BATCHED = {"rejection": batched.rejection, "block": batched.block}
VOCAB = 6

rules = pytest.mark.parametrize("name", EXACT)


def rows(count: int, kind: int) -> Tensor:
    """Distributions: smooth, sharp, with zeros, one-hot, with ties."""
    if kind == 0:
        return torch.randn(count, VOCAB).softmax(-1)
    if kind == 1:
        return torch.randn(count, VOCAB).mul(6).softmax(-1)
    if kind == 2:
        some = torch.rand(count, VOCAB) * (torch.rand(count, VOCAB) < 0.5)
        some[:, 0] += 0.01
        return some / some.sum(-1, keepdim=True)
    if kind == 3:
        return torch.eye(VOCAB)[torch.randint(VOCAB, (count,))]
    return torch.full((count, VOCAB), 1 / VOCAB)


def case(length: int, sampled_share: float) -> tuple[Draft, Tensor]:
    """Return a random draft and the target's rows for it; in one of five the two distributions are equal."""
    target = rows(length + 1, int(torch.randint(5, ())))
    draft_probs = target[:length].clone() if torch.rand(()) < 0.2 else rows(length, int(torch.randint(5, ())))
    sampled = torch.rand(length) < sampled_share
    fixed = torch.randint(VOCAB, (length,))
    tokens = torch.where(sampled, draft_probs.multinomial(1)[:, 0] if length else fixed, fixed)
    if torch.rand(()) < 0.05:
        tokens = torch.randint(VOCAB, (length,))  # also tokens of draft probability 0
    chain = Draft.chain(tokens.tolist())
    return Draft(chain.tokens, chain.parents, "", tuple(sampled.tolist()), None, draft_probs), target


def verify_batch(name: str, drafts: list[Draft], targets: list[Tensor], keys: Tensor) -> ChainResults:
    chains = ChainBatch.of(drafts, torch.cat(targets))
    uniforms = noise.accept_uniforms(keys[0], keys[1], torch.arange(chains.width))
    return BATCHED[name](chains, uniforms, noise.residual_noise(keys[0], keys[1], torch.arange(VOCAB)))


def check(name: str, cases: list[tuple[Draft, Tensor]]) -> None:
    drafts, targets = [draft for draft, _ in cases], [target for _, target in cases]
    keys = torch.randint(0, 10**6, (2, len(cases)))
    batch = verify_batch(name, drafts, targets, keys)
    for i, (draft, target) in enumerate(cases):
        alone = EXACT[name](draft, target, StepRandom(int(keys[0, i]), int(keys[1, i])))
        seen = int(batch.accepted[i]), int(batch.next_tokens[i])
        assert seen == (len(alone.accepted_path), alone.next_token), (draft, target)


@rules
@pytest.mark.parametrize("sampled_share", [1.0, 0.6, 0.0])
def test_each_chain_gets_the_result_it_gets_alone(name: str, sampled_share: float) -> None:
    torch.manual_seed(int(sampled_share * 10))
    for _ in range(12):
        check(name, [case(int(torch.randint(0, 7, ())), sampled_share) for _ in range(60)])


@rules
def test_chains_of_equal_length_and_in_double_precision(name: str) -> None:
    torch.manual_seed(7)
    for length in range(4):
        cases = [case(length, 0.8) for _ in range(40)]
        check(name, cases)
        check(name, [(draft, target.double()) for draft, target in cases])


@rules
def test_a_batch_without_draft_tokens_samples_from_the_target(name: str) -> None:
    torch.manual_seed(8)
    check(name, [case(0, 1.0) for _ in range(50)])
    check(name, [case(0, 1.0)])


@rules
def test_padding_does_not_change_the_results(name: str) -> None:
    torch.manual_seed(9)
    cases = [case(length, 0.7) for length in (3, 1, 0, 2)]
    keys = torch.arange(8).view(2, 4)
    chains = ChainBatch.of([draft for draft, _ in cases], torch.cat([target for _, target in cases]))
    uniforms = noise.accept_uniforms(keys[0], keys[1], torch.arange(3))
    exponentials = noise.residual_noise(*keys, torch.arange(VOCAB))
    assert chains.draft is not None
    corrupted = ChainBatch(chains.tokens.clone(), chains.lengths, chains.target.clone(), chains.draft.clone())
    for i, length in enumerate((3, 1, 0, 2)):
        corrupted.tokens[i, length:] = 4
        corrupted.target[i, length + 1 :] = 0.7
        corrupted.draft[i, length:] = 0.3
    clean, dirty = BATCHED[name](chains, uniforms, exponentials), BATCHED[name](corrupted, uniforms, exponentials)
    assert clean.accepted.equal(dirty.accepted)
    assert clean.next_tokens.equal(dirty.next_tokens)


@rules
def test_verification_does_not_modify_its_inputs(name: str) -> None:
    torch.manual_seed(10)
    draft, target = case(4, 1.0)
    chains = ChainBatch.of([draft], target.double())
    assert chains.draft is not None
    before = chains.target.clone(), chains.draft.clone()
    BATCHED[name](chains, torch.rand(1, 4), torch.rand(1, VOCAB))
    assert chains.target.equal(before[0])
    assert chains.draft.equal(before[1])


def test_weights_are_the_running_products_clipped_to_1_to_the_last_bit() -> None:
    torch.manual_seed(11)
    ratios = torch.exp(torch.randn(500, 9).double() * 2)
    ratios[torch.rand(500, 9) < 0.05] = 0
    ratios[torch.rand(500, 9) < 0.05] = 1e300
    slow, weight = [], torch.ones(500).double()
    for ratio in ratios.unbind(1):
        weight = (weight * ratio).clamp_max(1)
        slow.append(weight)
    assert batched._weights(ratios).equal(torch.stack(slow, 1))


def test_a_tree_is_refused() -> None:
    with pytest.raises(AssertionError, match="tree"):
        ChainBatch.of([Draft((1, 2), (-1, -1))], torch.ones(3, VOCAB))

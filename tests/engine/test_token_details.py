"""Token details are correct, do not depend on the drafter, and do not change the output."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import OracleDrafter
from foretell.engine import token_details as details_module
from foretell.types import Delta, SpeculationChoice
from tests.tiny import PROMPTS, VOCAB, World, add, generate, model_drafter, run, tree_around

WITH_DETAILS = SpeculationChoice(details=True)
SETTINGS: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {5: 2.0}},
]


def generated(drafter: Drafter | None, choice: SpeculationChoice = WITH_DETAILS, **params: object) -> list[list[Delta]]:
    """Return the deltas of each prompt."""
    engine = World().engine(drafter)
    states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, choice, **params)]
    run(engine)
    return [list(state.outbox) for state in states]


def tokens_of(outputs: list[list[Delta]]) -> list[list[int]]:
    return [[token for delta in deltas for token in delta.tokens] for deltas in outputs]


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "typical"])
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_details_never_change_the_output(rule: str, params: dict[str, object]) -> None:
    def outputs(details: bool) -> list[list[int]]:
        choice = SpeculationChoice(rule=rule, details=details)
        return tokens_of(generated(model_drafter(seed=5), choice, **params))

    assert outputs(True) == outputs(False)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_targets_probability_does_not_depend_on_the_drafter(params: dict[str, object]) -> None:
    truth = generate(**params)
    plain = generated(None, **params)
    oracle = OracleDrafter({tuple(p): t for p, t in zip(PROMPTS, truth, strict=True)}, VOCAB, 0.3)
    for drafter in (oracle, tree_around(truth), model_drafter(seed=5)):
        drafted = generated(drafter, **params)
        assert tokens_of(drafted) == tokens_of(plain) == truth
        for one, other in zip(plain, drafted, strict=True):
            assert probabilities(one) == pytest.approx(probabilities(other), abs=1e-5)


def probabilities(deltas: list[Delta]) -> list[float]:
    return [detail.probability for delta in deltas for detail in delta.details or ()]


def test_a_greedy_tokens_probability_is_the_models_own() -> None:
    for deltas in generated(NGramDrafter(1, 3), logprobs=0):
        logprobs = [row.logprob for delta in deltas for row in delta.logprobs or ()]
        assert logprobs and probabilities(deltas) == pytest.approx([math.exp(each) for each in logprobs], abs=1e-5)


def test_rejected_siblings_are_reported() -> None:
    """The tree has a wrong token before each right one; it is rejected and less likely than the accepted one."""
    outputs = generated(tree_around(generate()))
    details = [pair for deltas in outputs for delta in deltas for pair in pairs(delta)]
    drafted = [(token, detail) for token, origin, detail in details if origin != "target"]
    assert len(drafted) > 20
    for token, detail in drafted:
        (rejected,) = detail.rejected
        assert rejected.token == (token + 1) % VOCAB
        assert rejected.confidence is None and rejected.probability < detail.probability
    assert all(detail.confidence is None for *_, detail in details)


def test_a_rejected_chain_is_reported_at_its_first_rejected_token() -> None:
    truth = generate()
    drafter = OracleDrafter({tuple(p): t for p, t in zip(PROMPTS, truth, strict=True)}, VOCAB, 1.0)
    for deltas in generated(drafter):
        for delta in deltas:
            ((token, origin, detail),) = pairs(delta)
            assert origin == "target" and delta.drafter == ("oracle" if delta.num_drafted else "")
            assert [each.token for each in detail.rejected] == ([(token + 1) % VOCAB] if delta.num_drafted else [])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_drafters_confidence_is_the_probability_it_sampled_with(temperature: float) -> None:
    """A draft model equal to the target has the target's probabilities."""
    outputs = generated(model_drafter(seed=0), temperature=temperature)
    rows = [
        detail for deltas in outputs for delta in deltas for _, origin, detail in pairs(delta) if origin != "target"
    ]
    assert len(rows) > 20
    assert [each.confidence for each in rows] == pytest.approx([each.probability for each in rows], abs=1e-4)


def pairs(delta: Delta) -> list[tuple[int, str, details_module.TokenDetail]]:
    assert delta.details is not None
    return list(zip(delta.tokens, delta.origins, delta.details, strict=True))


def test_without_details_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("details were computed")

    monkeypatch.setattr(details_module, "_distributions", never)
    outputs = generated(NGramDrafter(1, 3), SpeculationChoice())
    assert all(delta.details is None for deltas in outputs for delta in deltas)


def test_a_logits_processor_is_not_called_again() -> None:
    """Otherwise one that counts its calls would change the output when details are requested."""

    def output(details: bool) -> tuple[list[list[int]], int]:
        calls = 0

        def lift(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            scores[calls % VOCAB] += 4
            return scores

        choice = SpeculationChoice(details=details)
        return tokens_of(generated(NGramDrafter(1, 3), choice, logits_processors=[lift])), calls

    assert output(True) == output(False)

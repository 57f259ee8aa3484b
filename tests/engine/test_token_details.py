"""What is told of each token: true, the same whoever guesses, and without effect on the text."""

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

ASKED = SpeculationChoice(details=True)
SETTINGS: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {5: 2.0}},
]


def written(drafter: Drafter | None, choice: SpeculationChoice = ASKED, **params: object) -> list[list[Delta]]:
    """For each prompt its deltas."""
    engine = World().engine(drafter)
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt, choice, **params)]
    run(engine)
    return [list(track.outbox) for track in tracks]


def tokens_of(texts: list[list[Delta]]) -> list[list[int]]:
    return [[token for delta in text for token in delta.tokens] for text in texts]


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "typical"])
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_asking_never_changes_the_text(rule: str, params: dict[str, object]) -> None:
    def ask(details: bool) -> list[list[int]]:
        choice = SpeculationChoice(rule=rule, details=details)
        return tokens_of(written(model_drafter(seed=5), choice, **params))

    assert ask(True) == ask(False)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_targets_probability_is_the_same_whoever_guesses(params: dict[str, object]) -> None:
    truth = generate(**params)
    plain = written(None, **params)
    oracle = OracleDrafter({tuple(p): t for p, t in zip(PROMPTS, truth, strict=True)}, VOCAB, 0.3)
    for drafter in (oracle, tree_around(truth), model_drafter(seed=5)):
        guessed = written(drafter, **params)
        assert tokens_of(guessed) == tokens_of(plain) == truth
        for one, other in zip(plain, guessed, strict=True):
            assert chances(one) == pytest.approx(chances(other), abs=1e-5)


def chances(text: list[Delta]) -> list[float]:
    return [detail.probability for delta in text for detail in delta.details or ()]


def test_a_greedy_tokens_probability_is_the_models_own() -> None:
    for text in written(NGramDrafter(1, 3), logprobs=0):
        told = [row.logprob for delta in text for row in delta.logprobs or ()]
        assert told and chances(text) == pytest.approx([math.exp(each) for each in told], abs=1e-5)


def test_what_fell_beside_a_token_is_told() -> None:
    """The tree has a wrong token before each right one: each falls, and is less likely than what stood."""
    texts = written(tree_around(generate()))
    details = [pair for text in texts for delta in text for pair in pairs(delta)]
    guessed = [(token, detail) for token, origin, detail in details if origin != "target"]
    assert len(guessed) > 20
    for token, detail in guessed:
        (fallen,) = detail.rejected
        assert fallen.token == (token + 1) % VOCAB
        assert fallen.confidence is None and fallen.probability < detail.probability
    assert all(detail.confidence is None for *_, detail in details)


def test_a_rejected_chain_is_told_where_it_broke() -> None:
    truth = generate()
    drafter = OracleDrafter({tuple(p): t for p, t in zip(PROMPTS, truth, strict=True)}, VOCAB, 1.0)
    for text in written(drafter):
        for delta in text:
            ((token, origin, detail),) = pairs(delta)
            assert origin == "target" and delta.drafter == ("oracle" if delta.num_drafted else "")
            assert [each.token for each in detail.rejected] == ([(token + 1) % VOCAB] if delta.num_drafted else [])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_drafters_confidence_is_what_it_drew_with(temperature: float) -> None:
    """The target's twin finds its guesses as likely as the target does."""
    texts = written(model_drafter(seed=0), temperature=temperature)
    rows = [detail for text in texts for delta in text for _, origin, detail in pairs(delta) if origin != "target"]
    assert len(rows) > 20
    assert [each.confidence for each in rows] == pytest.approx([each.probability for each in rows], abs=1e-4)


def pairs(delta: Delta) -> list[tuple[int, str, details_module.TokenDetail]]:
    assert delta.details is not None
    return list(zip(delta.tokens, delta.origins, delta.details, strict=True))


def test_who_does_not_ask_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(details_module, "_distributions", never)
    texts = written(NGramDrafter(1, 3), SpeculationChoice())
    assert all(delta.details is None for text in texts for delta in text)


def test_a_callers_function_is_not_called_again() -> None:
    """One that counts its calls would else write another text for who asks."""

    def text(details: bool) -> tuple[list[list[int]], int]:
        calls = 0

        def lift(written: list[int], scores: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            scores[calls % VOCAB] += 4
            return scores

        choice = SpeculationChoice(details=details)
        return tokens_of(written(NGramDrafter(1, 3), choice, logits_processors=[lift])), calls

    assert text(True) == text(False)

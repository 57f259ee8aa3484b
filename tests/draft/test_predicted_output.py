"""The caller's own prediction: followed, lost and found again."""

from __future__ import annotations

import random

import pytest

from foretell.draft.predicted_output import PredictedOutputDrafter
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Request, Sequence

BUDGET = Budget(8)
LINE = 12


def code(lines: int, seed: int = 0) -> list[int]:
    """Lines of words between the same few marks, as in a program: single tokens tell little about a place."""
    rng = random.Random(seed)
    words = [[rng.choice((1, 2, 3, rng.randrange(4, 400))) for _ in range(LINE - 1)] for _ in range(lines)]
    return [token for line in words for token in (*line, 0)]


def sequence(prediction: list[int], written: tuple[int, ...] = (), prompt: tuple[int, ...] = (5, 6)) -> Sequence:
    request = Request("0", prompt, SamplingParams(), 0, 10_000, prediction=tuple(prediction))
    return Sequence(0, request, [*prompt, *written])


def guess(prediction: list[int], written: list[int], nodes: int = 8) -> tuple[int, ...]:
    return PredictedOutputDrafter().propose([sequence(prediction, tuple(written))], [Budget(nodes)])[0].tokens


def steps(prediction: list[int], text: list[int]) -> int:
    """Steps of a target that writes `text`: each takes the guesses that are right, and one token more."""
    drafter, seq, count = PredictedOutputDrafter(), sequence(prediction), 0
    while seq.num_output_tokens < len(text):
        rest = text[seq.num_output_tokens :]
        draft = drafter.propose([seq], [BUDGET])[0].tokens
        right = next((i for i, token in enumerate(draft) if i >= len(rest) or token != rest[i]), len(draft))
        seq.tokens += rest[: right + 1]
        count += 1
    return count


PREDICTED = code(25)
EDITS: dict[str, list[int]] = {
    "nothing": PREDICTED,
    "a replaced word": [*PREDICTED[:100], 777, *PREDICTED[101:]],
    "a word replaced by three": [*PREDICTED[:100], 777, 778, 779, *PREDICTED[101:]],
    "an inserted line": [*PREDICTED[:96], *range(700, 712), *PREDICTED[96:]],
    "a deleted line": [*PREDICTED[:96], *PREDICTED[108:]],
    "three deleted lines": [*PREDICTED[:96], *PREDICTED[132:]],
    "lines that changed places": [*PREDICTED[:60], *PREDICTED[120:180], *PREDICTED[60:120], *PREDICTED[180:]],
    "a new beginning": [*range(800, 810), *PREDICTED],
}


@pytest.mark.parametrize("text", EDITS.values(), ids=EDITS)
def test_one_edit_costs_few_steps(text: list[int]) -> None:
    unforetold = len([token for token in text if token >= 400])
    assert steps(PREDICTED, text) <= len(PREDICTED) / 9 + unforetold + 8


@pytest.mark.parametrize("seed", range(5))
def test_a_text_foretold_to_nine_tenths_takes_a_third_of_the_steps(seed: int) -> None:
    rng = random.Random(seed)
    lines = [PREDICTED[i : i + LINE] for i in range(0, len(PREDICTED), LINE)]
    for row in rng.sample(range(len(lines)), 8):
        place = rng.randrange(LINE - 4)
        lines[row][place : place + rng.choice((1, 3, 4))] = [rng.randrange(400, 900) for _ in range(4)]
    text = [token for line in lines for token in line]
    assert sum(token >= 400 for token in text) >= 0.1 * len(text)
    assert steps(PREDICTED, text) <= 0.35 * len(text)


def test_it_starts_with_the_prediction_and_ends_with_it() -> None:
    assert guess([1, 2, 3, 4], [], 3) == (1, 2, 3)
    assert guess([1, 2, 3, 4], [1, 2, 3]) == (4,)
    assert guess([1, 2, 3, 4], [1, 2, 3, 4]) == ()
    assert guess([1, 2, 3, 4], [1, 2], 0) == ()
    assert guess([], [1, 2]) == ()


def test_the_prompt_is_not_the_text() -> None:
    seq = sequence([1, 2, 3, 4], prompt=(1, 2, 3))
    assert PredictedOutputDrafter().propose([seq], [BUDGET])[0].tokens == (1, 2, 3, 4)
    assert guess([*range(100, 140), 6, 9, 20, 9, 30], [9]) == (), "6 9 is no run of the text, 6 ends the prompt"


def test_a_text_that_departs_gets_nothing_until_it_is_back() -> None:
    departed = [*PREDICTED[:50], *range(500, 540)]
    for length in range(51, len(departed) + 1):
        assert guess(PREDICTED, departed[:length]) == ()
    assert guess(PREDICTED, [*departed, *PREDICTED[200:203]]) == tuple(PREDICTED[203:211])


def test_the_nearest_place_ahead_is_taken_then_the_nearest_behind() -> None:
    predicted = [1, 2, 3, 10, 11, 1, 2, 3, 20, 21, 1, 2, 3, 30, 31]
    assert guess(predicted, [1, 2, 3, 10, 11, 99, 1, 2, 3], 2) == (20, 21)
    assert guess(predicted, [*predicted, 1, 2, 3], 2) == (30, 31)


def test_a_frequent_token_is_believed_only_near_by() -> None:
    predicted = [*range(100, 140), 7, *range(140, 180), 7, *range(180, 200)]
    assert guess(predicted, [100, 101, 7]) == ()
    assert guess(predicted, [*range(100, 130), 7], 2) == (140, 141)
    assert guess(predicted, [100, 101, 150], 2) == (151, 152), "a token that occurs once may be anywhere"


def test_a_chance_find_does_not_lead_astray() -> None:
    predicted = [1, 2, 3, 4, 5, 9, 6, 7, 8, 3, 4, 11, 12]
    assert guess(predicted, [1, 2, 9, 50, 3, 4], 2) == (5, 9), "9 was found ahead, yet 3 4 is sought from where 2 was"


def test_a_kept_pointer_guesses_as_a_fresh_one() -> None:
    rng = random.Random(1)
    for _ in range(60):
        predicted = [rng.randrange(8) for _ in range(60)]
        drafter, seq = PredictedOutputDrafter(4), sequence(predicted)
        while seq.num_output_tokens < 90:
            start = rng.randrange(50)
            seq.tokens += rng.choice(([rng.randrange(8)], predicted[start : start + rng.randrange(1, 9)]))
            if rng.random() < 0.5:
                fresh = PredictedOutputDrafter(4).propose([seq], [BUDGET])
                assert drafter.propose([seq], [BUDGET]) == fresh


def test_it_forgets() -> None:
    drafter, seq = PredictedOutputDrafter(), sequence(PREDICTED)
    drafter.propose([seq], [BUDGET])
    assert drafter.memory > 0
    drafter.forget(seq)
    drafter.forget(seq)
    assert drafter.memory == 0

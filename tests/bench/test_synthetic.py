"""Drafts at a given acceptance rate: expected tokens, per sequence and in lockstep, and the command."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest

from foretell.bench.measure import PLAIN, Batch, BatchResult, MeasureJob, Variant
from foretell.bench.prompt import BenchPrompt
from foretell.bench.synthetic import SyntheticCase, SyntheticSettings, remarks, report_table, run_synthetic
from foretell.bench.synthetic_drafters import SetRateOracle, low_discrepancy, uniforms
from foretell.cli import main as program
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, ScheduledSequence, StepResult, VerifyResult
from foretell.types import Sequence as Text
from foretell.utils.speculation_math import expected_tokens

from .fakes import ignore_progress, items


def test_the_law() -> None:
    assert expected_tokens(0.0, 4) == 1.0 and expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert SyntheticCase(0.8, 4, "sequence").expected(8) == pytest.approx(3.3616)
    assert SyntheticCase(0.8, 4, "batch").expected(8) == pytest.approx(expected_tokens(0.8**8, 4))


@pytest.mark.parametrize("count", [20, 50, 137])
def test_draws_are_even_whenever_they_are_counted(count: int) -> None:
    even = list(itertools.islice(low_discrepancy(), count))
    for share in (0.2, 0.41, 0.8):
        assert sum(each < share for each in even) == pytest.approx(share * count, abs=1.5)
    loose = list(itertools.islice(uniforms(), 5000))
    assert fmean(loose) == pytest.approx(0.5, abs=0.02) and loose[:count] != even


def sequence(number: int, prompt: tuple[int, ...]) -> Text:
    return Text(number, Request(str(number), prompt, SamplingParams(), 0, 1000), list(prompt))


def num_right(oracle: SetRateOracle, sequences: Sequence[Text], length: int) -> list[int]:
    """Return how many draft tokens of each sequence are right, up to the first wrong one."""
    drafts = oracle.propose(list(sequences), [Budget(length)] * len(sequences))
    right = [list(itertools.takewhile(lambda token: token == 7, draft.tokens)) for draft in drafts]
    return [len(each) for each in right]


@pytest.mark.parametrize(("rate", "length"), [(0.5, 2), (0.8, 4), (0.95, 8)])
def test_draft_tokens_are_accepted_at_the_given_rate_for_each_sequence(rate: float, length: int) -> None:
    sequences = [sequence(i, (i,)) for i in range(8)]
    oracle = SetRateOracle(
        {text.request.prompt: [7] * 1000 for text in sequences}, 32, SyntheticCase(rate, length, "sequence"), 8
    )
    counts = [num_right(oracle, sequences, length) for _ in range(100)]
    assert fmean(sum(each) / 8 + 1 for each in counts) == pytest.approx(expected_tokens(rate, length), rel=0.01)
    assert any(len(set(each)) > 1 for each in counts), "each text has its own luck"


def test_in_lockstep_all_keep_what_every_sequence_accepts() -> None:
    sequences = [sequence(i, (i,)) for i in range(4)]
    oracle = SetRateOracle(
        {text.request.prompt: [7] * 9000 for text in sequences}, 32, SyntheticCase(0.8, 4, "batch"), 4
    )
    counts = [num_right(oracle, sequences, 4) for _ in range(2000)]
    assert all(len(set(each)) == 1 for each in counts)
    assert fmean(each[0] + 1 for each in counts) == pytest.approx(expected_tokens(0.8**4, 4), rel=0.04)


def step_result(text: Text, length: int, accepted: int) -> StepResult:
    return StepResult(ScheduledSequence.of(text, 1), Draft.chain([7] * length), VerifyResult(tuple(range(accepted)), 7))


def test_only_complete_drafts_count_and_in_lockstep_only_those_of_all() -> None:
    one, two = sequence(1, (1,)), sequence(2, (2,))
    apart, in_step = (SetRateOracle({}, 32, SyntheticCase(0.8, 4, mode), 2) for mode in ("sequence", "batch"))
    for oracle in (apart, in_step):
        oracle.observe([step_result(one, 4, 3), step_result(two, 3, 3)])
        oracle.observe([step_result(one, 4, 1), step_result(two, 4, 1)])
    assert apart.drafts == {3: 1, 1: 2} and in_step.drafts == {1: 2}


def test_every_round_draws_the_same() -> None:
    text = sequence(1, (5,))
    oracles = [SetRateOracle({(5,): [7] * 1000}, 32, SyntheticCase(0.8, 4, "sequence"), 1) for _ in range(2)]
    first, second = ([num_right(oracle, [text], 4) for _ in range(20)] for oracle in oracles)
    assert first == second


class FakeSynthetic:
    """Writes at a speed that is known, with drafts that are known."""

    def __init__(self, drafts: dict[int, int], stop_after: int = 999) -> None:
        self.drafts, self.left = drafts, stop_after

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        assert all(item.sampling == {"ignore_eos": True} for item in items)
        job = MeasureJob(items[0].id, "code", 0, (1,), SamplingParams())
        return [(job,) * batch for _ in range(batches)]

    def reset(self, variants: Sequence[Variant]) -> None:
        assert PLAIN not in variants

    def generate(self, variant: Variant, batch: Batch) -> BatchResult:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return BatchResult(((1, 2, 3),) * len(batch), 3, 10, 10.0 if variant == PLAIN else 5.0)

    def take_drafts(self, variant: Variant) -> Counter[int]:
        return Counter() if variant == PLAIN else Counter(self.drafts)


ONE = SyntheticSettings(rates=(0.5,), lengths=(2,), batches=(1, 8), min_sequences=1, rounds=2)


def test_a_cell_has_its_law_and_its_ratio() -> None:
    found = run_synthetic(FakeSynthetic({2: 1, 1: 1, 0: 2}), items(code=1), ONE, ignore_progress, {})
    cell = found.cells[0]
    assert (cell.mode, cell.batch, cell.drafts) == ("sequence", 1, 8)
    assert cell.accepted_per_step == pytest.approx(1.75) and cell.off == pytest.approx(0.0)
    assert cell.speedup == pytest.approx(2.0) and cell.speedup_interval == pytest.approx((2.0, 2.0))
    assert found.holds and found.same_text and json.loads(json.dumps(found.as_json()))["within_tolerance"] is True
    assert ["0.5", "2", "8", "lockstep", "1.75"] in [row[:5] for row in report_table(found).rows]
    reported = found.as_json()
    apart, in_step = reported["overall"]
    assert (apart["arm"], in_step["arm"], apart["cells"]) == ("sequence", "batch", 2) and "draws" not in reported[
        "cells"
    ][0]
    assert apart["speedup"] == pytest.approx(2.0) and apart["speedup_interval"] == pytest.approx((2.0, 2.0))
    assert apart["accepted_per_step"] == pytest.approx(1.75) and apart["same_text"] is True


def test_a_rate_off_its_expected_value_is_reported() -> None:
    found = run_synthetic(FakeSynthetic({2: 1, 0: 1}), items(code=1), ONE, ignore_progress, {})
    assert not found.holds
    assert any("OFF THE EXPECTED VALUE by 14.3%" in line and "per sequence" in line for line in remarks(found))
    assert not any("OFF THE EXPECTED VALUE" in line and "lockstep" in line for line in remarks(found)), (
        "too few samples"
    )


def test_a_stop_leaves_the_batch_sizes_that_were_finished() -> None:
    found = run_synthetic(FakeSynthetic({1: 1}, stop_after=11), items(code=1), ONE, ignore_progress, {})
    assert {cell.batch for cell in found.cells} == {1} and isinstance(found.stopped, KeyboardInterrupt)
    assert remarks(found)[-1].startswith("Stopped early")


def test_the_engine_keeps_the_law_at_every_batch_size(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    """Tokens a step within 2% of the law at batch 1, 8 and 32, and never fewer than all in step."""
    out = tmp_path / "synthetic.json"
    words = ["bench", "synthetic", "--model", str(folder), "--acceptance", "0.8", "--lengths", "4", "--rounds", "1"]
    code = program.main([*words, "--max-tokens", "40", "--threads", "1", "--out", str(out)])
    said, _ = capsys.readouterr()
    reported = json.loads(out.read_text())
    assert code == 0 and reported["within_tolerance"] and reported["same_text"]
    cells = {(cell["batch"], cell["mode"]): cell for cell in reported["cells"]}
    assert set(cells) == {(batch, mode) for batch in (1, 8, 32) for mode in ("sequence", "batch")}
    for (batch, mode), cell in cells.items():
        assert cell["drafts"] > 50
        if mode == "sequence":
            assert cell["accepted_per_step"] == pytest.approx((1 - 0.8**5) / (1 - 0.8), rel=0.02)
        elif batch > 1:
            assert 1.0 <= cell["accepted_per_step"] < 1.4 < cells[batch, "sequence"]["accepted_per_step"]
    assert json.loads(said.splitlines()[-1])["bench"] == "synthetic"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"rates": (1.5,)}, "acceptance"),
        ({"lengths": (0,)}, "lengths"),
        ({"batches": (0,)}, "batches"),
        ({"rounds": 0}, "rounds"),
        ({"rates": ()}, "acceptance"),
        ({"lengths": ()}, "lengths"),
        ({"batches": ()}, "batches"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SyntheticSettings(**settings)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("flag", ["--acceptance", "--lengths", "--batch"])
def test_a_list_of_nothing_is_no_list(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as left:
        program.main(["bench", "synthetic", flag, ","])
    assert left.value.code == 2 and "',' is not a list of" in capsys.readouterr().err

"""Drafters by name: built in and of other packages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.config import SpeculationConfig
from foretell.draft import copies_wanted, default_drafters, drafter_names, models_wanted
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.supervisor import isolate
from foretell.errors import RequestError

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_drafter"
PROMPT = "one two three four one two three four one two three four one two"


def named(drafter: str) -> tuple[str, ...]:
    return drafter_names(SpeculationConfig(drafter=drafter))


def test_commas_name_several_drafters_and_auto_the_free_ones() -> None:
    assert named("ngram") == ("ngram",)
    assert named("auto") == named("mix") == ("ngram", "suffix", "recycle")
    assert named("auto, model:x,exit:3") == ("ngram", "suffix", "recycle", "model:x", "exit:3")
    assert named("ngram,ngram") == ("ngram",)
    config = SpeculationConfig(drafter="auto")
    assert default_drafters(config) == ("suffix", "recycle"), "ngram waits for requests that name it"
    assert default_drafters(replace(config, drafter="ngram,auto")) == named("auto")
    assert named("none") == ()
    assert drafter_names(SpeculationConfig(drafter="ngram", max_draft=0)) == ()
    config = SpeculationConfig(drafter="self:int8,model:a/b,self:int4")
    assert (models_wanted(config), copies_wanted(config)) == (("a/b",), ("int8", "int4"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("ngramm", "did you mean 'ngram'"),
        ("ngram:3", "takes no argument"),
        ("self:int5", "self is written self:int8"),
        ("exit:", "exit is written exit:N"),
        ("none,ngram", "none cannot be combined"),
        ("ngram,", "is not known"),
        ("egle", "did you mean 'eagle'"),
    ],
)
def test_wrong_names_raise_errors_that_explain(wrong: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        named(wrong)


@pytest.fixture(scope="module")
def several(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, drafter="ngram,suffix,exit:1", num_speculative_tokens=3, quiet=True)


def test_a_request_may_name_its_drafter(several: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = set()
    for name in ("ngram", "suffix", "exit:1", "none", "auto", None):
        (output,) = several.generate(PROMPT, params, speculation=SpeculationChoice(drafter=name))
        outputs.add(output.outputs[0].token_ids)
        used = set(output.speculation.by_drafter)
        assert used <= ({name} if name in ("ngram", "suffix", "exit:1") else set(several.engine.drafter.drafters))
        assert bool(used) == (name != "none")
    assert len(outputs) == 1


def test_a_prediction_brings_its_own_drafter(several: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompt = "another beginning, which no drafter has seen"
    truth = several.generate(prompt, params, speculation=SpeculationChoice(enabled=False))[0].outputs[0]
    (output,) = several.generate(prompt, params, speculation=SpeculationChoice(prediction=truth.text))
    assert output.outputs[0].token_ids == truth.token_ids
    assert output.speculation.by_drafter["prediction"].drafted > 0


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (
            SpeculationChoice(drafter="model:x"),
            "no drafter 'model:x'; it has ngram, suffix, exit:1, prediction; start it",
        ),
        (SpeculationChoice(drafter="prediction"), "give that as prediction"),
        (SpeculationChoice(drafter="ngram", rule="confidence"), "confidence needs a drafter with probabilities"),
    ],
)
def test_an_unsuitable_drafter_raises_the_reason(several: LLM, choice: SpeculationChoice, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        several.generate(PROMPT, SamplingParams(max_tokens=2), speculation=choice)


def test_an_engine_without_drafters_says_so(tiny_folder: Path) -> None:
    plain = LLM(tiny_folder, drafter="none", quiet=True)
    with pytest.raises(RequestError, match="it was started without one"):
        plain.generate(PROMPT, SamplingParams(max_tokens=2), speculation=SpeculationChoice(drafter="ngram"))


def test_another_packages_drafter_is_found_by_its_entry_point(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    copy = tmp_path / "source"
    copy.mkdir()
    for file in EXAMPLE.iterdir():  # pip builds in position, and the example's folder is to stay as it is
        if file.is_file():
            (copy / file.name).write_text(file.read_text())
    subprocess.run([*install, "--target", str(tmp_path / "site"), str(copy)], check=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    llm = LLM(tiny_folder, drafter="periodic:4", num_speculative_tokens=3, quiet=True)
    plain = LLM(tiny_folder, drafter="none", quiet=True)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params)
    assert output.outputs[0].token_ids == plain.generate(PROMPT, params)[0].outputs[0].token_ids
    assert output.speculation.by_drafter["periodic:4"].drafted > 0
    with pytest.raises(RequestError, match="did you mean 'periodic'"):
        named("periodik:4")


@pytest.mark.parametrize(
    ("old", "new"), [("free", "is_free"), ("cost_share", "relative_cost"), ("taps", "hidden_layers")]
)
def test_an_attribute_of_earlier_versions_is_refused_with_the_new_name(old: str, new: str) -> None:
    kind = type("OldDrafter", (NGramDrafter,), {old: True, "__module__": "elsewhere"})
    for make in (isolate, MixDrafter.of):
        with pytest.raises(RequestError, match=f"OldDrafter sets `{old}`; set `traits = DrafterTraits.{new}=...."):
            make(kind())

"""The Python API."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.build.model_source import choose_kv_cache_dtype, no_progress, open_model
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft.scripted import OracleDrafter, ScriptedDrafter
from foretell.errors import CapacityError, ModelError, RequestError
from foretell.types import TARGET, Budget, Draft, Sequence, StepResult
from tests.folder import write_tiny_folder

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"

FOUR = {"num_speculative_tokens": 4, "quiet": True}


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder), drafter="ngram", num_speculative_tokens=5, quiet=True)


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder), drafter="none", quiet=True)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 4}, {"temperature": 1.2, "top_p": 0.9, "seed": 1}])
def test_the_output_is_the_same_with_and_without_a_drafter(llm: LLM, plain: LLM, params: dict[str, float]) -> None:
    wanted = SamplingParams(max_tokens=40, **params)  # type: ignore[arg-type]
    prompts = [PROMPT, "She sells sea shells", "The"]
    with_drafts, without = llm.generate(prompts, wanted), plain.generate(prompts, wanted)
    for a, b in zip(with_drafts, without, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].text == b.outputs[0].text
        assert b.speculation.steps == b.speculation.tokens == len(b.outputs[0].token_ids)
        assert b.speculation.drafted == 0


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float16", "int8"])
def test_each_type_of_kv_has_pages_for_it_and_changes_no_output(tiny_folder: Path, kv_cache_dtype: str) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "quiet": True}
    prompts, params = [PROMPT, "She sells sea shells"], SamplingParams(max_tokens=30, temperature=0.8, seed=4)
    with_drafts = LLM(str(tiny_folder), drafter=f"ngram,model:{tiny_folder}", **settings)
    without = LLM(str(tiny_folder), drafter="none", **settings)
    found, expected = with_drafts.generate(prompts, params), without.generate(prompts, params)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    opened = open_model(str(tiny_folder), EngineConfig(kv_cache_dtype=kv_cache_dtype), no_progress)
    layers, heads, dim = opened.config.layers, opened.config.kv_heads, opened.config.head_dim
    assert opened.token_bytes == 2 * layers * heads * (dim + 4 if kv_cache_dtype == "int8" else 2 * dim)


def test_another_type_of_kv_is_refused_on_cuda() -> None:
    for wanted, refused in (("int8", True), ("float16", True), ("bfloat16", False), ("auto", False)):
        config = EngineConfig(kv_cache_dtype=wanted)
        with pytest.raises(RequestError, match="CPU only") if refused else nullcontext():
            choose_kv_cache_dtype(config, torch.bfloat16, torch.device("cuda"))


def test_speculation_statistics_are_consistent(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
    stats, choice = output.speculation, output.outputs[0]
    assert stats.drafted > 0
    assert stats.tokens == len(choice.token_ids) == len(choice.speculation.origins) == 60
    assert stats.accepted == sum(origin == "ngram" for origin in stats.origins)
    assert stats.steps == sum(origin == TARGET for origin in stats.origins)
    assert stats.by_drafter["ngram"].drafted == stats.drafted
    assert choice.text == llm.tokenizer.decode(choice.token_ids)
    assert choice.finish_reason == "length"
    assert 0 < output.timings.first_token <= output.timings.total


def test_prompts_may_be_strings_token_ids_or_mappings(plain: LLM) -> None:
    tokens = plain.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=6)
    forms = [PROMPT, tokens, {"prompt": PROMPT}, {"prompt_token_ids": tokens}]
    texts = {plain.generate(form, params)[0].outputs[0].token_ids for form in forms}
    assert len(texts) == 1
    assert len(plain.generate(forms, params)) == 4
    assert plain.generate([], params) == []


def test_a_list_of_params_has_one_per_prompt(plain: LLM) -> None:
    one, two = plain.generate([PROMPT, PROMPT], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5)])
    assert (len(one.outputs[0].token_ids), len(two.outputs[0].token_ids)) == (3, 5)
    with pytest.raises(RequestError, match="there are 1 for 2 prompts"):
        plain.generate([PROMPT, PROMPT], [SamplingParams()])


def test_chat_applies_the_template(plain: LLM) -> None:
    messages = [{"role": "user", "content": "Who sells shells?"}]
    params = SamplingParams(max_tokens=5)
    (answer,) = plain.chat(messages, params)
    assert answer.prompt == "<|im_start|>user\nWho sells shells?<|im_end|>\n<|im_start|>assistant\n"
    both = plain.chat([messages, messages], params)
    assert [output.outputs[0].text for output in both] == [answer.outputs[0].text] * 2


def test_a_stream_adds_up_to_the_full_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=3)
    (full,) = llm.generate(PROMPT, params)
    deltas = list(llm.stream(PROMPT, params))
    assert "".join(delta.text for delta in deltas) == full.outputs[0].text
    assert tuple(token for delta in deltas for token in delta.tokens) == full.outputs[0].token_ids
    assert [origin for delta in deltas for origin in delta.origins] == full.speculation.origins
    assert len(deltas) == full.speculation.steps
    assert sum(delta.num_drafted for delta in deltas) == full.speculation.drafted
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [full.outputs[0].finish_reason]


def test_closing_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream([{"role": "user", "content": "Go on"}], SamplingParams(max_tokens=30))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.busy
    assert llm.engine.runner.pool.num_held == 0


def test_n_choices_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=3)
    (output,) = llm.generate(PROMPT, params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.token_ids for choice in output.outputs}) == 3
    (alone,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=7))
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    assert output.speculation.steps == sum(choice.speculation.steps for choice in output.outputs)


def test_a_random_seed_is_reported_and_can_be_reused(llm: LLM) -> None:
    (first,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0))
    (again,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=first.outputs[0].seed))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_the_models_sampling_defaults_are_used(plain: LLM) -> None:
    defaults = plain.default_params()
    assert (defaults.temperature, defaults.top_k) == (0.9, 40)
    assert plain.default_params(temperature=0.0).top_k == 40
    assert plain.assembly.requests.limits.end_ids == {plain.tokenizer.encode("<|im_end|>")[0]}


def test_speculation_can_be_switched_off_for_a_request(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=20), speculation=SpeculationChoice(enabled=False))
    assert output.speculation.drafted == 0


def test_stop_strings_cut_the_text(llm: LLM, plain: LLM) -> None:
    (full,) = plain.generate(PROMPT, SamplingParams(max_tokens=40))
    stop = full.outputs[0].text[10:13]
    for each in (llm, plain):
        (cut,) = each.generate(PROMPT, SamplingParams(max_tokens=40, stop=stop))
        assert cut.outputs[0].text == full.outputs[0].text[: full.outputs[0].text.index(stop)]
        assert cut.outputs[0].finish_reason == "stop"


def test_an_oracle_measures_the_engine(tiny_folder: Path, plain: LLM) -> None:
    (truth,) = plain.generate(PROMPT, SamplingParams(max_tokens=41, ignore_eos=True))
    outputs = {truth.prompt_token_ids: truth.outputs[0].token_ids}
    llm = LLM(str(tiny_folder), drafter=OracleDrafter(outputs, 320), num_speculative_tokens=4, quiet=True)
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=41, ignore_eos=True))
    assert output.outputs[0].token_ids == truth.outputs[0].token_ids
    assert output.speculation.steps == 1 + 8, "the prompt's step gives one token, each other one five"


WRONG: list[tuple[dict[str, object], str]] = [
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -3}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
]


@pytest.mark.parametrize(("params", "field"), WRONG, ids=str)
def test_invalid_sampling_params_name_the_field(params: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert error.value.field == field


def test_a_request_that_cannot_fit_is_rejected_before_generation(plain: LLM) -> None:
    with pytest.raises(RequestError, match="prompt: is empty"):
        plain.generate("", SamplingParams())
    with pytest.raises(RequestError, match="takes at most 127"):
        plain.generate([[5] * 128], SamplingParams())
    with pytest.raises(RequestError, match="ask for 28 or fewer"):
        plain.generate([[5] * 100], SamplingParams(max_tokens=29))
    with pytest.raises(RequestError, match="token ids outside"):
        plain.generate([[5, 99999]], SamplingParams())
    with pytest.raises(RequestError, match="prompt"):
        plain.generate([PROMPT, [5, 99999]], SamplingParams())
    assert not plain.engine.busy, "a rejected batch leaves no sequence"
    (output,) = plain.generate([[5] * 100], SamplingParams(ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 28, "without max_tokens the context is the limit"


def test_unknown_arguments_suggest_the_closest_known_one(tiny_folder: Path) -> None:
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
        LLM(str(tiny_folder), max_modle_len=5)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="did you mean 'ngram'"):
        LLM(str(tiny_folder), drafter="n-gram")
    with pytest.raises(RequestError, match="did you mean 'num_speculative_tokens'"):
        LLM(str(tiny_folder), speculative_config={"method": "ngram", "num_speculativ_tokens": 3})


def test_vllms_speculative_config_is_accepted(tiny_folder: Path) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
    llm = LLM(str(tiny_folder), speculative_config=config, quiet=True)
    assert (llm.speculation.drafter, llm.speculation.budget, llm.speculation.match_lengths) == ("ngram", 3, (2, 3))
    assert SpeculationConfig(prompt_lookup_max=1).match_lengths == (1, 1)
    assert SpeculationConfig(prompt_lookup_min=5).match_lengths == (5, 5)
    assert SpeculationConfig(max_draft=2, num_speculative_tokens=8).budget == 2


def test_memory_is_planned_before_weights_are_loaded(tiny_folder: Path) -> None:
    with pytest.raises(CapacityError, match="lower kv_memory"):
        LLM(str(tiny_folder), kv_memory=100_000.0, quiet=True)
    with pytest.raises(CapacityError, match="raise kv_memory or set max_model_len"):
        LLM(str(tiny_folder), kv_memory=0.00001, quiet=True)
    with pytest.raises(RequestError, match="max_model_len"):
        LLM(str(tiny_folder), max_model_len=100_000, quiet=True)
    llm = LLM(str(tiny_folder), max_model_len=64, max_num_seqs=1, quiet=True)
    assert llm.assembly.memory.pages == 4


@pytest.mark.weights
def test_the_default_model_generates_the_same_with_and_without_drafts() -> None:
    llm = LLM(quiet=True, kv_memory=0.5)
    messages = [{"role": "user", "content": "Repeat three times: the cat sat on the mat."}]
    for params in (SamplingParams(max_tokens=48), SamplingParams(max_tokens=48, temperature=0.8, seed=11)):
        (drafted,) = llm.chat(messages, params)
        (plain,) = llm.chat(messages, params, speculation=SpeculationChoice(enabled=False))
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
        assert plain.speculation.steps == len(plain.outputs[0].token_ids)
    assert drafted.cached_tokens > 0, "the second request found the first one's prompt"


def test_two_streams_and_a_batch_can_share_an_engine(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=25, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2, 3)]
    wanted = [llm.generate(PROMPT, each)[0].outputs[0].text for each in params]
    one, two = llm.stream(PROMPT, params[0]), llm.stream(PROMPT, params[1])
    texts = ["", ""]
    for turn, (a, b) in enumerate(itertools.zip_longest(one, two)):
        texts[0] += a.text if a else ""
        texts[1] += b.text if b else ""
        if turn == 2:
            assert llm.generate(PROMPT, params[2])[0].outputs[0].text == wanted[2]
    assert texts == wanted[:2]


def test_a_failing_drafter_costs_its_drafts_and_nothing_else(tiny_folder: Path, plain: LLM) -> None:
    def too_long(seq: Sequence, budget: Budget) -> Draft:
        return Draft.chain([5] * (budget.nodes + 9), "long")

    def out_of_range(seq: Sequence, budget: Budget) -> Draft:
        return Draft.chain([10**6], "wild")

    def sampled_without_probs(seq: Sequence, budget: Budget) -> Draft:
        return Draft((5,), (-1,), "nothing", (True,))

    def raises(seq: Sequence, budget: Budget) -> Draft:
        raise ValueError("no idea")

    class Uncut(ScriptedDrafter):
        def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
            return [self.script(*pair) for pair in zip(seqs, budgets, strict=True)]

        def observe(self, results: list[StepResult]) -> None:
            raise RuntimeError("cannot learn")

    (wanted,) = plain.generate(PROMPT, SamplingParams(max_tokens=9))
    for script in (too_long, out_of_range, sampled_without_probs, raises):
        llm = LLM(tiny_folder, drafter=Uncut(script), num_speculative_tokens=8, quiet=True)
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=9))
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert llm.engine.stats.drafter_failures > 0
        assert llm.engine.step() == [], "an idle engine has nothing to do"


def test_prompts_may_be_numpy_or_torch_integers(plain: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    wanted = plain.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    for prompts in ([np.array([5, 6, 7])], np.array([5, 6, 7]), [torch.tensor([5, 6, 7])]):
        assert plain.generate(prompts, params)[0].outputs[0].token_ids == wanted  # type: ignore[arg-type]
    for wrong in ([[1.5]], {"promt": "x"}, {"prompt": "x", "multi_modal_data": 3}, {}):
        with pytest.raises(RequestError, match="prompt"):
            plain.generate(wrong, params)  # type: ignore[arg-type]


WRONG_OPTIONS: list[tuple[dict[str, object], str]] = [
    ({"max_num_seqs": "3"}, "max_num_seqs"),
    ({"prefix_cache": "no"}, "prefix_cache"),
    ({"kv_memory": float("inf")}, "kv_memory"),
    ({"threads": 10**9}, "threads"),
    ({"drafter": 5}, "drafter"),
    ({"device": "meta"}, "device"),
    ({"rule": "mach"}, "rule"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": "4"}}, "num_speculative_tokens"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2.5}}, "num_speculative_tokens"),
    ({"speculative_config": {"method": ["a"]}}, "speculative_config.method"),
    ({"speculative_config": {"method": "ngram"}, "drafter": "none"}, "drafter"),
    ({"num_speculative_tokens": 100}, "num_speculative_tokens"),
]


@pytest.mark.parametrize(("options", "field"), WRONG_OPTIONS, ids=str)
def test_invalid_options_name_the_field(tiny_folder: Path, options: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        LLM(tiny_folder, quiet=True, **options)  # type: ignore[arg-type]
    assert error.value.field == field


def test_option_aliases_of_other_systems_are_accepted(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, block_size=8, enable_prefix_caching=False, quiet=True)
    assert (llm.config.page_size, llm.config.prefix_cache) == (8, False)


def test_many_choices_run_in_one_batch(llm: LLM) -> None:
    before = llm.engine.stats.forwards
    llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=16, ignore_eos=True))
    assert llm.engine.stats.forwards - before <= 10


def test_chat_rejects_unknown_arguments(plain: LLM) -> None:
    with pytest.raises(TypeError):
        plain.chat([{"role": "user", "content": "x"}], temperature=0.5)  # type: ignore[call-arg]


def test_a_draft_model_drafts_for_its_target(tiny_folder: Path, tmp_path: Path, plain: LLM) -> None:
    twin = LLM(tiny_folder, drafter=f"model:{tiny_folder}", num_speculative_tokens=4, quiet=True)
    short = write_tiny_folder(tmp_path / "short", seed=3)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    other = LLM(tiny_folder, drafter=f"model:{short}", num_speculative_tokens=4, quiet=True)
    for params in (
        SamplingParams(max_tokens=50, ignore_eos=True),
        SamplingParams(max_tokens=50, temperature=1.0, seed=2),
    ):
        wanted = plain.generate([PROMPT, "The"], params)
        for llm in (twin, other):
            found = llm.generate([PROMPT, "The"], params)
            assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
            assert found[0].speculation.drafted > 0
            assert llm.engine.stats.drafter_failures == 0
    (output,) = twin.generate(PROMPT, SamplingParams(max_tokens=51, ignore_eos=True))
    assert output.speculation.steps == 11, "an equal draft model is always accepted"
    assert twin.assembly.memory.drafter > 0


def test_suffix_and_prediction_drafters(tiny_folder: Path, plain: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (wanted,) = plain.generate(PROMPT, params)
    suffix = LLM(tiny_folder, drafter="suffix", num_speculative_tokens=8, quiet=True)
    steps = [suffix.generate(PROMPT, params)[0] for _ in range(2)]
    assert all(each.outputs[0].token_ids == wanted.outputs[0].token_ids for each in steps)
    assert steps[1].speculation.steps < steps[0].speculation.steps / 2, "the second time the output is known"
    predicted = LLM(tiny_folder, drafter="prediction", num_speculative_tokens=8, quiet=True)
    choice = SpeculationChoice(prediction=wanted.outputs[0].text)
    (output,) = predicted.generate(PROMPT, params, speculation=choice)
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    ignored = plain.generate(PROMPT, params, speculation=choice)[0]
    assert (ignored.outputs[0].token_ids, ignored.speculation.drafted) == (wanted.outputs[0].token_ids, 0)


def test_early_exit_drafts_with_the_first_layers(tiny_folder: Path, plain: LLM) -> None:
    llm = LLM(tiny_folder, drafter="exit:1", num_speculative_tokens=4, quiet=True)
    for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=1.0, seed=2)):
        wanted, found = plain.generate([PROMPT, "The"], params), llm.generate([PROMPT, "The"], params)
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
        assert found[0].speculation.by_drafter["exit:1"].drafted > 0
    for wrong in ("exit:", "exit:x", "exit:0", "exit:2"):
        with pytest.raises(RequestError, match="exit"):
            LLM(tiny_folder, drafter=wrong, quiet=True)


def test_a_draft_model_with_another_tokenizer_is_translated(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="written model:NAME"):
        LLM(tiny_folder, drafter="model:", quiet=True)
    strange = write_tiny_folder(tmp_path / "strange")
    text = (strange / "tokenizer.json").read_text()
    (strange / "tokenizer.json").write_text(text.replace('"<|im_start|>"', '"<|begin|>"'))
    translated = LLM(tiny_folder, drafter=f"model:{strange}", **FOUR)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert translated.generate(PROMPT, params)[0].outputs[0].token_ids == (
        LLM(tiny_folder, drafter="none", quiet=True).generate(PROMPT, params)[0].outputs[0].token_ids
    )


def test_lossy_rules_are_opt_in_and_reported(tiny_folder: Path, llm: LLM) -> None:
    lossy = LLM(tiny_folder, drafter=f"model:{tiny_folder}", rule="confidence", workload="code", **FOUR)
    (output,) = lossy.generate(PROMPT, SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True))
    assert (output.speculation.rule, output.speculation.lossless) == ("confidence", False)
    wanted = SpeculationChoice(rule="confidence", acceptance_threshold=(0.8, 0.1))
    assert not lossy.generate(PROMPT, SamplingParams(max_tokens=9), speculation=wanted)[0].speculation.lossless
    exact = SpeculationChoice(rule="match")
    assert lossy.generate(PROMPT, SamplingParams(max_tokens=9), speculation=exact)[0].speculation.lossless
    with pytest.raises(RequestError, match="confidence needs a drafter with probabilities"):
        llm.generate(PROMPT, SamplingParams(), speculation=SpeculationChoice(rule="confidence"))
    with pytest.raises(RequestError, match="acceptance_threshold"):
        llm.generate(PROMPT, SamplingParams(), speculation=SpeculationChoice(rule="match", workload="code"))
    with pytest.raises(RequestError):
        LLM(tiny_folder, drafter=f"model:{tiny_folder}", rule="confidence", workload="poetry", quiet=True)


def test_auto_uses_block_only_without_a_seed(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, drafter=f"model:{tiny_folder}", rule="auto", draft_temperature="entropy", **FOUR)
    rules = [
        llm.generate(PROMPT, SamplingParams(max_tokens=4, **each))[0].speculation.rule  # type: ignore[arg-type]
        for each in ({"temperature": 1.0}, {"temperature": 1.0, "seed": 3}, {})
    ]
    assert rules == ["block", "match", "match"]


def test_the_signature_lists_every_option() -> None:
    shown = inspect.signature(LLM).parameters
    declared = {f.name for cls in (EngineConfig, SpeculationConfig) for f in dataclasses.fields(cls)}
    assert set(shown) == declared | {"model", "drafter", "speculative_config", "quiet"}
    assert shown["max_num_seqs"].default == EngineConfig.max_num_seqs
    assert LLM.__doc__ and "inspect.signature(LLM)" in LLM.__doc__


@pytest.mark.parametrize("prompt", [5, None, 1.5, [None]])
def test_a_prompt_of_another_type_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="must be a string"):
        llm.generate(prompt)


@pytest.mark.parametrize("messages", [5, None, [5]])
def test_messages_of_another_type_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages: .*must be"):
        llm.chat(messages)


def test_a_chat_template_replaces_the_models_own(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    for given in (str(file), file.read_text()):
        llm = LLM(tiny_folder, chat_template=given, quiet=True)
        assert llm.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<hi>"
    with pytest.raises(RequestError, match="name a Jinja file"):
        LLM(tiny_folder, chat_template="chatml", quiet=True)


def test_the_generation_config_can_be_replaced_and_overridden(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.2}')

    def defaults(**options: Any) -> dict[str, Any]:
        return LLM(folder, quiet=True, drafter="none", **options).assembly.sampling_defaults

    assert defaults() == {"temperature": 0.6, "top_k": 20}
    assert defaults(generation_config="vllm") == {}
    assert defaults(generation_config=str(other)) == {"temperature": 0.2}
    assert defaults(override_generation_config='{"top_k": 5}') == {"temperature": 0.6, "top_k": 5}
    with pytest.raises(RequestError, match="has no generation_config.json"):
        defaults(generation_config=str(tmp_path))
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        defaults(override_generation_config='{"temprature": 5}')


@pytest.mark.parametrize("kind", ["medusa", "eagle", "distilled"])
def test_a_head_that_does_not_exist_is_one_clear_line(tiny_folder: Path, kind: str) -> None:
    with pytest.raises(ModelError, match="no folder 'notafolder'") as refused:
        LLM(tiny_folder, drafter=f"{kind}:notafolder", quiet=True)
    assert "pickle" not in str(refused.value)


def test_an_unknown_drafter_of_a_request_is_not_offered(llm: LLM) -> None:
    with pytest.raises(RequestError, match="it has ngram, prediction$"):
        llm.generate(PROMPT, speculation=SpeculationChoice(drafter="nope"))
    with pytest.raises(RequestError, match="start it with --drafter suffix"):
        llm.generate(PROMPT, speculation=SpeculationChoice(drafter="suffix"))

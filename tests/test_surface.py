"""Every sampling parameter gives the same output with speculation: one row per field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import OracleDrafter, ScriptedDrafter
from foretell.errors import RequestError
from foretell.structured_output import GrammarSpec
from foretell.types import Budget
from tests.tiny import PROMPTS, VOCAB, World, add, generate, model_drafter, random_tree, run, tree_around

Truth = list[list[int]]
Holds = Callable[[list[int], list[int]], bool]  # (prompt, written) -> whether the setting did what it says


def no_token(*tokens: int) -> Holds:
    return lambda prompt, written: not set(written) & set(tokens)


def twice_at_most(prompt: list[int], written: list[int]) -> bool:
    return max(written.count(token) for token in set(written)) <= 4


def lift_by_history(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
    """A logits processor with history: forbids repeating the last token, and prefers 5 at even positions."""
    if tokens:
        scores[tokens[-1]] = -math.inf
    if len(tokens) % 2 == 0:
        scores[5] += 2.0
    return scores


FIELDS: dict[str, tuple[dict[str, object], Holds]] = {
    "presence_penalty": ({"temperature": 1.0, "presence_penalty": 2.0}, lambda p, w: True),
    "frequency_penalty": ({"temperature": 0.7, "frequency_penalty": 2.0}, twice_at_most),
    "repetition_penalty": ({"temperature": 1.0, "repetition_penalty": 1.8}, lambda p, w: True),
    "all penalties, greedy": (
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        lambda p, w: True,
    ),
    "logit_bias": ({"temperature": 1.0, "logit_bias": {28: -100, "5": 3.0}}, no_token(28)),
    "allowed_token_ids": (
        {"temperature": 1.0, "allowed_token_ids": [3, 4, 5, 28]},
        lambda p, w: set(w) <= {3, 4, 5, 28},
    ),
    "min_tokens": (
        {"temperature": 1.0, "min_tokens": 12, "logit_bias": {0: 5.0}},
        lambda p, w: len(w) >= 12 and 0 not in w[:12],
    ),
    "max_tokens": ({"temperature": 1.0, "max_tokens": 3}, lambda p, w: len(w) <= 3),
    "stop_token_ids": (
        {"temperature": 1.0, "stop_token_ids": [28, 12]},
        lambda p, w: not set(w[:-1]) & {28, 12},
    ),
    "ignore_eos": ({"temperature": 1.0, "ignore_eos": True, "logit_bias": {0: 3.0}}, lambda p, w: len(w) == 24),
    "logits_processors": (
        {"temperature": 1.0, "logits_processors": [lift_by_history]},
        lambda p, w: all(a != b for a, b in zip(w, w[1:], strict=False)),
    ),
    "top_k, top_p and min_p": ({"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02}, lambda p, w: True),
    "n": ({"temperature": 1.0, "n": 2}, lambda p, w: True),
}
DRAFTERS: dict[str, Callable[[Truth], Drafter]] = {
    "ngram": lambda truth: NGramDrafter(1, 3),
    "model": lambda truth: model_drafter(seed=5),
    "oracle": lambda truth: OracleDrafter({tuple(p): t for p, t in zip(PROMPTS, truth, strict=False)}, VOCAB, 0.2),
    "random tree": lambda truth: ScriptedDrafter(random_tree),
    "tree around the text": tree_around,
}


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_works_the_same_with_drafts(field: str, make: Callable[[Truth], Drafter]) -> None:
    params, holds = FIELDS[field]
    plain = generate(**params)
    for prompt, written in zip([p for p in PROMPTS for _ in range(int(str(params.get("n", 1))))], plain, strict=True):
        assert holds(prompt, written)
    assert plain != generate(temperature=params.get("temperature", 0.0)), "the setting changes something"
    assert generate(make(plain), **params) == plain
    few = World(page_size=4, pages=12, max_num_seqs=5)
    assert generate(make(plain), few, **params) == plain


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_logprobs_are_the_models_own_and_the_same_with_drafts(make: Callable[[Truth], Drafter]) -> None:
    truth = generate(temperature=1.0, presence_penalty=1.0)
    rows = []
    for drafter in (None, make(truth)):
        engine = World().engine(drafter)
        tracks = [
            track
            for i, prompt in enumerate(PROMPTS)
            for track in add(engine, str(i), prompt, temperature=1.0, presence_penalty=1.0, logprobs=3)
        ]
        run(engine)
        rows.append([track.logprobs for track in tracks])
        for track, tokens in zip(tracks, truth, strict=True):
            assert [each.token for each in track.logprobs] == tokens
            assert all(len(each.top) == 3 and each.logprob <= each.top[0][1] + 1e-9 for each in track.logprobs)
    for plain, speculative in zip(*rows, strict=True):
        assert [(e.token, e.rank) for e in plain] == [(e.token, e.rank) for e in speculative]
        assert [e.logprob for e in plain] == pytest.approx([e.logprob for e in speculative], abs=1e-4)


def test_prompt_logprobs_cover_the_prompt_and_pass_the_prefix_cache_by() -> None:
    prompt = list(range(1, 30))
    found = []
    for size, warm in ((64, False), (7, True)):
        engine = World(max_step_tokens=max(size, 16)).engine(NGramDrafter(1, 3))
        if warm:
            add(engine, "9", prompt)
            run(engine)
        (track,) = add(engine, "0", prompt, prompt_logprobs=2, temperature=1.0)
        run(engine)
        assert track.cached_prompt_tokens == 0
        assert sorted(track.prompt_logprobs) == list(range(1, 29))
        assert [track.prompt_logprobs[i].token for i in range(1, 29)] == prompt[1:]
        found.append([track.prompt_logprobs[i].logprob for i in range(1, 29)])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder), drafter="ngram", prompt_lookup_min=1, max_draft=5, quiet=True)


OFF = SpeculationChoice(enabled=False)
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


def both(llm: LLM, **params: object) -> str:
    wanted = SamplingParams(**{"max_tokens": 40, "temperature": 0.9, "seed": 3, **params})  # type: ignore[arg-type]
    (speculative,), (plain,) = llm.generate(PROMPT, wanted), llm.generate(PROMPT, wanted, speculation=OFF)
    assert speculative.outputs[0].token_ids == plain.outputs[0].token_ids
    assert speculative.outputs[0].text == plain.outputs[0].text
    assert speculative.outputs[0].finish_reason == plain.outputs[0].finish_reason
    return plain.outputs[0].text


def test_bad_words_are_never_generated(llm: LLM) -> None:
    """A bad word is its usual token sequence, as in vLLM; of one token or several."""
    bias = dict.fromkeys(llm.tokenizer.encode(" shells fox", add_special=False), 4.0)
    assert "shells" in both(llm, logit_bias=bias, ignore_eos=True)
    assert "shells" not in both(llm, logit_bias=bias, ignore_eos=True, bad_words=["shells"])


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    free = both(llm, ignore_eos=True)
    stop = free[4:6]
    assert both(llm, stop=stop, ignore_eos=True) == free[: free.index(stop)]
    assert len(both(llm, stop=stop, ignore_eos=True, min_tokens=30)) > free.index(stop)


def test_a_thought_is_closed_when_its_budget_is_spent(llm: LLM) -> None:
    marks = tuple(llm.tokenizer.encode(mark, add_special=False) for mark in ("<think>", "</think>"))
    prompt = [*llm.tokenizer.encode(PROMPT), *marks[0]]
    params = SamplingParams(max_tokens=40, thinking_budget=6, temperature=1.0, seed=2, ignore_eos=True)
    outputs = [
        llm.generate([prompt], params, speculation=choice)[0].outputs[0] for choice in (SpeculationChoice(), OFF)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert list(outputs[0].token_ids[6 : 6 + len(marks[1])]) == marks[1]
    assert "</think>" in outputs[0].text
    assert outputs[0].text.count("</think>") == 1


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_reasoning_over_its_budget_is_closed_whatever_is_drafted(llm: LLM, budget: int) -> None:
    prompt = llm.tokenizer.encode(PROMPT + "<think>" + "the sea " * 5)
    params = SamplingParams(max_tokens=30, thinking_budget=budget, temperature=1.0, seed=2, ignore_eos=True)
    outputs = [
        llm.generate([prompt], params, speculation=choice)[0].outputs[0] for choice in (SpeculationChoice(), OFF)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text.startswith("</think>")


GRAMMARS = {
    "json schema": GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 120}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        any_whitespace=False,
    ),
    "regex": GrammarSpec.regex(r"(fox|dog){2,4}[0-9]{3}"),
    "choice": GrammarSpec.choice(["The quick brown dog", "She sells shells", "nothing"]),
    "lark": GrammarSpec.lark('start: "x=" NUMBER\nNUMBER: /[0-9]{2,5}/'),
}


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_grammar_holds_with_drafts_under_every_rule(llm: LLM, kind: str, rule: str) -> None:
    import re

    for seed in range(6):
        params = SamplingParams(max_tokens=90, temperature=1.0, seed=seed, structured_outputs=GRAMMARS[kind])
        (speculative,) = llm.generate(PROMPT, params, speculation=SpeculationChoice(rule=rule))
        (plain,) = llm.generate(PROMPT, params, speculation=SpeculationChoice(enabled=False, rule="match"))
        if rule == "match":
            assert speculative.outputs[0].token_ids == plain.outputs[0].token_ids
        for text in (speculative.outputs[0].text, plain.outputs[0].text):
            if kind == "json schema":
                value = json.loads(text)
                assert set(value) == {"name", "age"}
                assert isinstance(value["age"], int)
            elif kind == "regex":
                assert re.fullmatch(r"(fox|dog){2,4}[0-9]{3}", text)
            elif kind == "choice":
                assert text in GRAMMARS[kind].choices
            else:
                assert re.fullmatch(r"x=[0-9]{2,5}", text)
        if kind in ("json schema", "choice"):
            assert speculative.speculation.by_drafter["grammar"].accepted > 0, "forced tokens are drafted for free"


def test_a_grammar_without_allowed_tokens_ends_the_sequence(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=GRAMMARS["choice"], allowed_token_ids=(5,))
    (output,) = llm.generate(PROMPT, params)
    assert output.outputs[0].finish_reason == "error"
    assert not llm.engine.busy


@pytest.mark.parametrize("spec", ["{", '{"type": 3}'])
def test_an_invalid_schema_is_refused_with_the_reason(llm: LLM, spec: str) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.generate(PROMPT, SamplingParams(structured_outputs=GrammarSpec.json_schema(spec)))
    assert not llm.engine.busy


WRONG: list[tuple[dict[str, object], str]] = [
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {5: 1000}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 1000}, "prompt_logprobs"),
    ({"bad_words": [""]}, "bad_words"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"logits_processors": [3]}, "logits_processors"),
]


@pytest.mark.parametrize(("params", "field"), WRONG, ids=str)
def test_wrong_values_are_refused_by_name(params: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert error.value.field == field


def test_tokens_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for field in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(RequestError, match=field):
            llm.generate(PROMPT, SamplingParams(**{field: [10**6]}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="logit_bias"):
        llm.generate(PROMPT, SamplingParams(logit_bias={10**6: 1.0}))


def test_logprobs_have_vllms_shape(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True))
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 5
    for token, row in zip(choice.token_ids, choice.logprobs, strict=True):
        assert row[token].rank == 1
        assert row[token].decoded_token == llm.tokenizer.token_text(token)
        assert 2 <= len(row) <= 3
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_a_failing_logits_processor_ends_only_its_own_sequence(llm: LLM) -> None:
    def fails(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    def misshapen(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        return scores[:3]

    good = SamplingParams(max_tokens=6, ignore_eos=True)
    for bad in (fails, misshapen):
        one, two = llm.generate([PROMPT, PROMPT], [SamplingParams(max_tokens=6, logits_processors=[bad]), good])
        assert one.outputs[0].finish_reason == "error"
        assert two.outputs[0].finish_reason == "length"


def test_a_processor_may_give_a_tensor_of_its_own() -> None:
    kept = torch.linspace(0, 3, VOCAB)

    def own(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        return kept

    params = {"temperature": 1.0, "logits_processors": [own], "min_tokens": 5, "stop_token_ids": [20, 31]}
    truth = generate(**params)
    assert generate(ScriptedDrafter(random_tree), **params) == truth
    assert kept.isfinite().all()


def test_logits_processors_that_mask_all_tokens_end_the_sequence() -> None:
    def nothing(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf)

    assert generate(logits_processors=[nothing], allowed_token_ids=[3, 4]) == [[0]] * len(PROMPTS)


@pytest.mark.parametrize("rule", ["confidence", "ensemble", "typical"])
def test_lossy_rules_keep_what_is_forbidden_out(tiny_folder: Path, rule: str) -> None:
    llm = LLM(tiny_folder, drafter=f"model:{tiny_folder}", rule=rule, quiet=True)
    allowed = (65, 66, 67, 68)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=1, allowed_token_ids=allowed)
        assert set(llm.generate(PROMPT, params)[0].outputs[0].token_ids) <= set(allowed)
        params = SamplingParams(max_tokens=60, temperature=temperature, seed=1, structured_outputs=GRAMMARS["choice"])
        assert llm.generate(PROMPT, params)[0].outputs[0].text in GRAMMARS["choice"].choices


def test_a_greedy_draft_has_a_confidence() -> None:
    engine = World().engine()
    (track,) = add(engine, "0", PROMPTS[1])
    (draft,) = model_drafter(seed=5).propose([track.seq], [Budget(3)])
    assert draft.confidence is not None
    assert all(0 < sure < 0.999 for sure in draft.confidence)


def test_thresholds_without_their_rule_are_refused(llm: LLM) -> None:
    for choice in (SpeculationChoice(acceptance_threshold=(0.8, 0.1)), SpeculationChoice(workload="nonsense")):
        with pytest.raises(RequestError, match="acceptance_threshold"):
            llm.generate(PROMPT, SamplingParams(), speculation=choice)

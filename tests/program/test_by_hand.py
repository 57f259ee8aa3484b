"""A program gives the same outputs as the equivalent LLM calls with the same seeds."""

from __future__ import annotations

from os.path import commonprefix

import pytest

from foretell import LLM, SamplingParams
from foretell import program as fp
from foretell.sampling.noise import derive_seed
from foretell.structured_output import GrammarSpec

PROMPT = "The quick brown fox jumps over the lazy dog. The quick"
SAMPLED = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "ignore_eos": True}


def by_hand(llm: LLM, text: str, **params: object) -> str:
    return llm.generate(text, llm.default_params(**params))[0].outputs[0].text


@fp.function
def story(s: fp.ProgramState) -> None:
    s += PROMPT + fp.gen("one", max_tokens=12, **SAMPLED)
    s += " She sells" + fp.gen("two", max_tokens=9, seed=5, **SAMPLED)
    forks = s.fork(2)
    forks += " sea" + fp.gen("three", max_tokens=7, **SAMPLED)
    forks.join()


@pytest.fixture(params=["engine", "speculating", "endpoint"])
def backend(request: pytest.FixtureRequest) -> fp.Backend:
    """Return each backend: without and with speculation, and over HTTP."""
    found: fp.Backend = request.getfixturevalue(request.param)
    return found


def test_sampled_outputs(backend: fp.Backend, llm: LLM) -> None:
    state = story(backend=backend, seed=11)
    text = PROMPT + (one := by_hand(llm, PROMPT, max_tokens=12, seed=11, **SAMPLED))
    text += " She sells" + (two := by_hand(llm, text + " She sells", max_tokens=9, seed=5, **SAMPLED))
    three = [by_hand(llm, text + " sea", max_tokens=7, seed=derive_seed(11, i), **SAMPLED) for i in (1, 2)]
    assert (state["one"], state["two"], state["three"]) == (one, two, three)
    assert len({one, two, *three}) == 4
    assert [meta["seed"] for meta in state.get_meta_info("three")] == [derive_seed(11, 1), derive_seed(11, 2)]


def test_the_random_seed_is_reported(backend: fp.Backend, llm: LLM) -> None:
    state = story(backend=backend)
    seed = state.get_meta_info("one")["seed"]
    assert state["one"] == by_hand(llm, PROMPT, max_tokens=12, seed=seed, **SAMPLED)


def test_defaults_are_the_models_own(backend: fp.Backend, llm: LLM) -> None:
    """The folder recommends temperature 0.9 and top_k 40."""

    @fp.function
    def short(s: fp.ProgramState) -> None:
        s += PROMPT + fp.gen("x", 12, seed=3)

    assert short(backend=backend)["x"] == by_hand(llm, PROMPT, max_tokens=12, seed=3)


def test_batches(backend: fp.Backend, llm: LLM) -> None:
    @fp.function
    def tell(s: fp.ProgramState, of: str) -> None:
        s += f"The quick brown {of}" + fp.gen("x", max_tokens=10, **SAMPLED)

    states = tell.run_batch([{"of": str(i)} for i in range(6)], backend=backend, seed=4)
    prompts = [f"The quick brown {i}" for i in range(6)]
    expected = [by_hand(llm, text, max_tokens=10, seed=derive_seed(4, i), **SAMPLED) for i, text in enumerate(prompts)]
    assert [state["x"] for state in states] == expected
    assert tell.run_batch([], backend=backend) == []


def test_chats(backend: fp.Backend, llm: LLM) -> None:
    @fp.function
    def ask(s: fp.ProgramState) -> None:
        s += fp.user("Who sells sea shells?")
        s += fp.assistant(fp.gen("x", max_tokens=10, seed=2, **SAMPLED))
        s += fp.user("Where?") + fp.assistant("By" + fp.gen("y", max_tokens=10, seed=2, **SAMPLED))

    state = ask(backend=backend)
    params = SamplingParams(max_tokens=10, seed=2, **SAMPLED)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "Who sells sea shells?"}]
    (first,) = llm.chat(messages, params)
    assert state["x"] == first.outputs[0].text
    messages += [{"role": "assistant", "content": state["x"]}, {"role": "user", "content": "Where?"}]
    prompt = llm.tokenizer.encode(llm.tokenizer.apply_chat_template(messages) + "By", add_special=False)
    assert state["y"] == llm.generate(prompt, params)[0].outputs[0].text
    closed = [*messages, {"role": "assistant", "content": "By" + state["y"]}]
    assert state.text() == llm.tokenizer.apply_chat_template(closed, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("form", "spec"),
    [
        ({"regex": "[ab]{3,5}"}, GrammarSpec.regex("[ab]{3,5}")),
        ({"json_schema": {"enum": ["fox", "dog"]}}, GrammarSpec.json_schema({"enum": ["fox", "dog"]})),
        ({"grammar": 'start: "fox" | "dog"'}, GrammarSpec.lark('start: "fox" | "dog"')),
        ({"grammar": GrammarSpec.choice(["fox", "dog"])}, GrammarSpec.choice(["fox", "dog"])),
        ({"stop": list("abcdefghijklmnop")}, None),
    ],
)
def test_forms(backend: fp.Backend, llm: LLM, form: dict[str, object], spec: GrammarSpec | None) -> None:
    @fp.function
    def formed(s: fp.ProgramState) -> None:
        s += PROMPT + fp.gen("x", max_tokens=12, temperature=0.7, seed=9, **form)

    given: dict[str, object] = form if spec is None else {"structured_outputs": spec}
    state = formed(backend=backend)
    assert state["x"] == by_hand(llm, PROMPT, max_tokens=12, temperature=0.7, seed=9, **given)
    assert state.get_meta_info("x")["finish_reason"] == "stop"


def mean_logprob(llm: LLM, text: str, start: int) -> float:
    """Return the mean log-probability of the tokens from `start` on, from prompt_logprobs."""
    tokens = llm.tokenizer.encode(text)
    (scored,) = llm.generate(tokens, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None
    rows = [scored.prompt_logprobs[place] for place in range(start, len(tokens))]
    found = [row[token].logprob for row, token in zip(rows, tokens[start:], strict=True) if row is not None]
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("text", "choices", "healed"),
    [
        (PROMPT, [" fox", " dog", " sells sea shells"], 0),
        (PROMPT[:-2], ["ck brown", "etly", "z"], 1),  # the tokenizer merges the choice with the prompt
        (PROMPT, ["<|im_end|>", " the"], 0),
    ],
)
def test_choices(backend: fp.Backend, llm: LLM, text: str, choices: list[str], healed: int) -> None:
    @fp.function
    def choose(s: fp.ProgramState) -> None:
        s += text + fp.select("x", choices)

    state = choose(backend=backend)
    rows = [llm.tokenizer.encode(each) for each in (text, *(text + choice for choice in choices))]
    start = len(commonprefix(rows))
    assert (start < len(rows[0])) == bool(healed)
    means = {choice: mean_logprob(llm, text + choice, start) for choice in choices}
    assert state.get_meta_info("x")["mean_logprobs"] == pytest.approx(means, abs=1e-6)
    assert state["x"] == max(choices, key=means.__getitem__)
    assert state.text() == text + state["x"]


def test_choices_in_a_chat_are_the_same_everywhere(backend: fp.Backend, engine: fp.Engine) -> None:
    @fp.function
    def choose(s: fp.ProgramState) -> None:
        s += fp.user("Fox or dog?") + fp.assistant("The" + fp.gen("x", choices=[" fox", " dog"]))

    here, there = choose(backend=engine), choose(backend=backend)
    assert here["x"] == there["x"]
    assert here.get_meta_info("x")["mean_logprobs"] == pytest.approx(there.get_meta_info("x")["mean_logprobs"])

"""Program states: values, text, branches, turns."""

from __future__ import annotations

import pytest

from foretell import program as fp
from foretell.errors import ForetellError
from foretell.program.backend import DefaultBackend

TEN = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}


@fp.function
def fox(s: fp.ProgramState, animal: str) -> None:
    s += f"The quick brown {animal}" + fp.gen("verb", **TEN)
    s += " over the lazy dog." + fp.gen("end", **TEN)


def test_a_state_is_its_text_with_the_values_in_it(engine: fp.Engine) -> None:
    state = fox("fox", backend=engine)
    assert isinstance(state, fp.ProgramState)
    assert state["verb"] and state["end"]
    assert state.text() == "The quick brown fox" + state["verb"] + " over the lazy dog." + state["end"]
    assert "verb" in state and "no" not in state
    assert state.get_meta_info("verb")["completion_tokens"] == 10
    assert state.get_meta_info("verb")["finish_reason"] == "length"
    assert state.error() is None and state.messages() == []


def test_a_call_gives_what_the_program_returns_or_its_state(engine: fp.Engine) -> None:
    @fp.function
    def length(s: fp.ProgramState, text: str = "The") -> int:
        s += text + fp.gen("x", max_tokens=3)
        return len(s["x"])

    assert isinstance(length(backend=engine), int)
    state = length.run("The quick", backend=engine)
    assert state.ret_value == len(state["x"])
    assert length.__name__ == "length"


def test_values_are_waited_for_inside_a_program(engine: fp.Engine) -> None:
    @fp.function
    def twice(s: fp.ProgramState) -> str:
        s += "She sells" + fp.gen("x", **TEN)
        first = s["x"]
        assert s.text() == "She sells" + first
        s += "." + fp.gen("x", **TEN)
        return str(first)

    state = twice.run(backend=engine)
    assert state.text() == f"She sells{state.ret_value}.{state['x']}"


def test_settings_of_a_run_and_arguments_of_the_same_name(engine: fp.Engine) -> None:
    @fp.function
    def plain(s: fp.ProgramState) -> None:
        s += "The" + fp.gen("x")

    @fp.function
    def own(s: fp.ProgramState, max_tokens: int) -> None:
        s += "The" + fp.gen("x", max_tokens=max_tokens + 1)

    assert plain.run(backend=engine, max_tokens=4, ignore_eos=True).get_meta_info("x")["completion_tokens"] == 4
    assert plain.run(backend=engine, ignore_eos=True).get_meta_info("x")["completion_tokens"] == 128
    assert own.run(max_tokens=4, backend=engine, ignore_eos=True).get_meta_info("x")["completion_tokens"] == 5
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        plain.run(backend=engine, nonsense=1)


def test_unknown_names_suggest_the_nearest(engine: fp.Engine) -> None:
    state = fox("dog", backend=engine)
    with pytest.raises(KeyError, match="no 'verbs'; did you mean 'verb'"):
        state["verbs"]


def test_branches_continue_from_the_prompt_independently(engine: fp.Engine) -> None:
    @fp.function
    def split(s: fp.ProgramState) -> list[str]:
        s += "The quick" + fp.gen("start", **TEN)
        forks = s.fork(3)
        forks += " one"
        forks += [" a", " b", " c"]
        forks[1] += " more"
        for branch in forks:
            branch += fp.gen("tail", **TEN)
            assert branch["start"] == s["start"]
        s += " after"
        forks.join()
        return [branch.text() for branch in forks]

    state = split.run(backend=engine)
    begin, tails = "The quick" + state["start"], state["tail"]
    ends = [" one a", " one b more", " one c"]
    assert state.ret_value == [begin + end + tail for end, tail in zip(ends, tails, strict=True)]
    assert state.text() == begin + " after"
    assert [meta["completion_tokens"] for meta in state.get_meta_info("tail")] == [10] * 3


def test_a_second_fork_replaces_the_values_of_a_name(engine: fp.Engine) -> None:
    @fp.function
    def rounds(s: fp.ProgramState) -> list[list[str]]:
        s += "The" + fp.gen("start", **TEN)
        found = []
        for ends in ([" fox", " dog"], [" sea", " shore", " lazy"]):
            forks = s.fork(len(ends))
            forks += ends
            forks += fp.gen("tail", **TEN)
            forks.join()
            assert s["tail"] == [branch["tail"] for branch in forks]
            found.append(s["tail"])
        return found

    state = rounds.run(backend=engine)
    first, second = state.ret_value
    assert len(first) == 2 and len(second) == 3 and first != second[:2] and state["tail"] == second
    assert isinstance(state["start"], str), "what a branch only began with is not gathered"


def test_a_branch_that_did_not_generate_a_name_has_none(engine: fp.Engine) -> None:
    @fp.function
    def once(s: fp.ProgramState) -> None:
        s += "The" + fp.gen("x", **TEN)
        forks = s.fork(2)
        forks[1] += fp.gen("x", **TEN)
        forks.join()

    none, own = once.run(backend=engine)["x"]
    assert none is None and own


def test_a_join_waits_for_unnamed_generations(engine: fp.Engine) -> None:
    written = engine.llm.engine.stats.speculation

    @fp.function
    def nameless(s: fp.ProgramState) -> int:
        s += "The quick"
        before = written.tokens
        forks = s.fork(2)
        forks += fp.gen(**TEN | {"max_tokens": 60})
        forks.join()
        return written.tokens - before

    assert nameless(backend=engine) == 120


def test_branches_of_branches_are_joined_as_lists_of_lists(engine: fp.Engine) -> None:
    @fp.function
    def tree(s: fp.ProgramState) -> None:
        s += "The"
        outer = s.fork(2)
        for i, branch in enumerate(outer):
            inner = branch.fork(2)
            inner += [f" {i}a", f" {i}b"]
            inner += fp.select("leaf", [" fox", " dog"])
            inner.join()
        outer.join()

    leaves = tree.run(backend=engine)["leaf"]
    assert [len(each) for each in leaves] == [2, 2] and set(sum(leaves, [])) <= {" fox", " dog"}


def test_the_number_of_forks_is_fixed(engine: fp.Engine) -> None:
    @fp.function
    def wrong(s: fp.ProgramState, how: str) -> None:
        s += "The"
        if how == "count":
            forks = s.fork(2)
            forks += ["a"]
        elif how == "swap":
            forks = s.fork(2)
            forks[0] = forks[1]
        else:
            s.fork(0)

    for how, reason in {
        "count": "2 branches and got 1",
        "swap": "has fixed branches",
        "none": "1 or more",
    }.items():
        with pytest.raises(fp.ProgramError, match=reason):
            wrong(how, backend=engine)


def test_turns_make_a_chat(engine: fp.Engine) -> None:
    @fp.function
    def ask(s: fp.ProgramState, question: str) -> None:
        s += fp.system("Be brief.") + fp.user(question)
        s += fp.assistant(fp.gen("first", **TEN))
        s += fp.user("Why?") + fp.assistant("Because" + fp.gen("second", **TEN))

    state = ask("Who sells?", backend=engine)
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who sells?"},
        {"role": "assistant", "content": state["first"]},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because" + state["second"]},
    ]
    assert state.text().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho sells?")
    assert state.text().endswith(state["second"] + "<|im_end|>\n")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (["plain", fp.user("x")], "follows text without a role"),
        ([fp.user("x"), "plain"], "is a chat; put text"),
        ([fp.user("x"), fp.gen("y")], "put generations into fp.assistant"),
        ([fp.assistant(fp.gen("y"))], "begin with fp.user"),
        ([fp.gen("y")], "is empty; append some text"),
        ([fp.select("y", ["a", "b"])], "is empty; append some text"),
    ],
)
def test_mixing_plain_text_and_chat_is_refused(engine: fp.Engine, parts: list[str], reason: str) -> None:
    @fp.function
    def mixed(s: fp.ProgramState) -> None:
        for part in parts:
            s += part

    with pytest.raises(fp.ProgramError, match=reason):
        mixed(backend=engine)


def test_only_strings_and_expressions_can_be_appended(engine: fp.Engine) -> None:
    @fp.function
    def wrong(s: fp.ProgramState) -> None:
        s += 3  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="a state takes strings") as caught:
        wrong(backend=engine)
    assert "test_state.py" in caught.value.__notes__[0] and "in wrong" in caught.value.__notes__[0]


def test_without_a_backend_the_error_says_how_to_get_one() -> None:
    with pytest.raises(ForetellError, match=r"fp.set_default_backend\(fp.Engine\(\)\)"):
        DefaultBackend().get()


def test_the_default_backend_is_used(engine: fp.Engine) -> None:
    default = DefaultBackend()
    default.set(engine)
    assert default.get() is engine

"""Expressions: what a state accepts, and what is refused at its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foretell import SpeculationChoice
from foretell import program as fp
from foretell.errors import RequestError
from foretell.program.expressions import BeginRole, EndRole, GenPart, SelectPart, TextPart, as_expression
from foretell.program.settings import GenSettings
from foretell.structured_output import GrammarSpec


def settings(**given: object) -> GenSettings:
    (part,) = fp.gen("x", **given).parts  # type: ignore[arg-type]
    assert isinstance(part, GenPart)
    return part.settings


def test_text_and_generations_are_joined_in_order() -> None:
    joined = "a" + fp.gen("x") + "b" + fp.select("y", ["1", "2"]) + ""
    assert [type(part) for part in joined.parts] == [TextPart, GenPart, TextPart, SelectPart]
    assert as_expression("").parts == ()


def test_a_turn_holds_its_content() -> None:
    turn = fp.assistant("So" + fp.gen("x"))
    assert turn.parts[0] == BeginRole("assistant") and turn.parts[-1] == EndRole() and len(turn.parts) == 4


def test_only_given_settings_are_stored() -> None:
    assert settings().sampling == {}
    assert settings(max_tokens=3, temperature=0).sampling == {"max_tokens": 3, "temperature": 0}
    assert settings(max_new_tokens=3, stop="x").sampling == {"stop": "x", "max_tokens": 3}
    assert settings(regex="a+").grammar == GrammarSpec.regex("a+")
    assert settings(json_schema={"type": "integer"}).grammar == GrammarSpec.json_schema({"type": "integer"})
    assert settings(grammar='start: "a"').grammar == GrammarSpec.lark('start: "a"')
    assert settings(grammar=GrammarSpec.json_object()).grammar == GrammarSpec.json_object()
    assert settings(prediction="abc").speculation == SpeculationChoice(prediction="abc")


def test_settings_of_a_generation_override_those_of_a_run() -> None:
    run = GenSettings.read({"temperature": 0.5, "stop": "a", "regex": "b"})
    found = GenSettings.read({"temperature": 0.0, "seed": 3}).over(run)
    assert found.sampling == {"temperature": 0.0, "stop": "a", "seed": 3} and found.grammar == run.grammar
    assert found.seeded(7).sampling["seed"] == 3 and run.seeded(7).sampling["seed"] == 7


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: fp.gen("x", temperature=-1), "temperature: must be 0"),
        (lambda: fp.gen("x", max_tokens=0), "max_tokens: must be 1"),
        (lambda: fp.gen("x", max_tokens=3, max_new_tokens=3), "an alias of max_tokens"),
        (lambda: fp.gen("x", regex="a", json_schema={}), "json_schema: and regex both constrain"),
        (lambda: fp.gen("x", choices=["a"], temperature=0), "cannot be combined with other settings"),
        (lambda: fp.gen("x", speculation=False), "must be a SpeculationChoice"),
        (lambda: fp.gen(""), "name: must be a string"),
        (lambda: fp.select("x", "abc"), "list of non-empty strings"),
        (lambda: fp.select("x", ["a", ""]), "list of non-empty strings"),
        (lambda: fp.select("x", ["a", "a"]), "no duplicates"),
        (lambda: fp.select("x", []), "at least one string"),
        (lambda: fp.select("x", ["a"], temperature=1), "leave it out"),
        (lambda: fp.user(fp.gen("x")), "put generations into fp.assistant"),
        (lambda: fp.user(fp.user("x")), "cannot contain another"),
        (lambda: fp.RuntimeEndpoint("localhost:8000"), "is not an address such as http"),
    ],
)
def test_invalid_expressions_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        make()


def test_unknown_arguments_get_the_nearest_right_name() -> None:
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        fp.gen("x", temprature=1)


def test_a_generation_inside_an_f_string_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be formatted into a string"):
        f"a {fp.gen('x')}"


def test_a_program_is_a_function_of_a_state() -> None:
    async def later(s: fp.ProgramState) -> None: ...

    for wrong in (lambda: None, later, 3):
        with pytest.raises(TypeError, match="first argument is its state"):
            fp.function(wrong)  # type: ignore[arg-type]


def test_a_backend_is_a_backend() -> None:
    with pytest.raises(TypeError, match="fp.Engine"):
        fp.set_default_backend("http://localhost:8000")  # type: ignore[arg-type]

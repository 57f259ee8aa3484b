"""How a generation is to be drawn: what was said, and nothing else, so that backends can put their defaults below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import RequestError
from foretell.options import nearest
from foretell.sampling_params import DECIDING, SamplingParams
from foretell.structured_output import GrammarSpec
from foretell.types import SpeculationChoice

DEFAULT_MAX_TOKENS = 128  # SGLang's, where neither the generation nor the run says otherwise
OTHER_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # SGLang's
SAMPLING = (*DECIDING, "max_tokens")
FORMS = ("regex", "json_schema", "grammar")
GUESSING = ("speculation", "prediction")
NAMES = (*SAMPLING, *OTHER_NAMES, *FORMS, *GUESSING)


@dataclass(frozen=True)
class Settings:
    """`sampling` has the fields of `SamplingParams` that were given."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    grammar: GrammarSpec | None = None
    speculation: SpeculationChoice | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """From arguments by name; None is as good as left out. What is not known is refused by its name."""
        said = {name: value for name, value in given.items() if value is not None}
        for name in said:
            if name not in NAMES:
                raise TypeError(f"a generation has no argument {name!r}; {nearest(name, NAMES)}")
        for other, name in OTHER_NAMES.items():
            if other in said:
                if name in said:
                    raise RequestError(other, f"is another name of {name}; give one of them")
                said[name] = said.pop(other)
        sampling = {name: value for name, value in said.items() if name in SAMPLING}
        grammar = _grammar({name: value for name, value in said.items() if name in FORMS})
        SamplingParams(**sampling, structured_outputs=grammar)  # a wrong value fails where it was written
        return cls(sampling, grammar, _speculation(said.get("speculation"), said.get("prediction")))

    def over(self, below: Settings) -> Settings:
        """These, and those of `below` for what was not said."""
        return Settings(
            {**below.sampling, **self.sampling},
            self.grammar or below.grammar,
            self.speculation or below.speculation,
        )

    def seeded(self, seed: int | None) -> Settings:
        """With that seed, where none was given."""
        return self if seed is None else replace(self, sampling={"seed": seed, **self.sampling})


def _grammar(given: Mapping[str, Any]) -> GrammarSpec | None:
    if len(given) > 1:
        first, second, *_ = given
        raise RequestError(second, f"and {first} both say what the text must look like; give one")
    if "regex" in given:
        return GrammarSpec.regex(given["regex"])
    if "json_schema" in given:
        return GrammarSpec.json_schema(given["json_schema"])
    grammar = given.get("grammar")
    return GrammarSpec.lark(grammar) if isinstance(grammar, str) else grammar


def _speculation(choice: Any, prediction: str | None) -> SpeculationChoice | None:
    if choice is not None and not isinstance(choice, SpeculationChoice):
        raise RequestError("speculation", f"must be a SpeculationChoice, not {choice!r}")
    if prediction is None:
        return choice
    return replace(choice or SpeculationChoice(), prediction=prediction)

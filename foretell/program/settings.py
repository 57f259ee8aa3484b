"""Settings of a generation: only those given, so that backends can apply their own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import RequestError
from foretell.options import nearest
from foretell.sampling_params import DECIDING, SamplingParams
from foretell.structured_output import GrammarSpec
from foretell.types import SpeculationChoice

DEFAULT_MAX_TOKENS = 128  # SGLang's default
SGLANG_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # to ours
SAMPLING = (*DECIDING, "max_tokens")
GRAMMAR_NAMES = ("regex", "json_schema", "grammar")
SPECULATION_NAMES = ("speculation", "prediction")
NAMES = (*SAMPLING, *SGLANG_NAMES, *GRAMMAR_NAMES, *SPECULATION_NAMES)


@dataclass(frozen=True)
class GenSettings:
    """Settings of one generation. `sampling` has the fields of `SamplingParams` that were given."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    grammar: GrammarSpec | None = None
    speculation: SpeculationChoice | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> GenSettings:
        """Read keyword arguments; None means not given, and an unknown name is a TypeError."""
        values = {name: value for name, value in given.items() if value is not None}
        for name in values:
            if name not in NAMES:
                raise TypeError(f"a generation has no argument {name!r}; {nearest(name, NAMES)}")
        for other, name in SGLANG_NAMES.items():
            if other in values:
                if name in values:
                    raise RequestError(other, f"is an alias of {name}; give one of them")
                values[name] = values.pop(other)
        sampling = {name: value for name, value in values.items() if name in SAMPLING}
        grammar = _grammar({name: value for name, value in values.items() if name in GRAMMAR_NAMES})
        SamplingParams(**sampling, structured_outputs=grammar)  # validates the values at the line of the program
        return cls(sampling, grammar, _speculation(values.get("speculation"), values.get("prediction")))

    def over(self, below: GenSettings) -> GenSettings:
        """Return these settings, completed by those of `below`."""
        return GenSettings(
            {**below.sampling, **self.sampling},
            self.grammar or below.grammar,
            self.speculation or below.speculation,
        )

    def seeded(self, seed: int | None) -> GenSettings:
        """Return the settings with a seed, unless they have one."""
        return self if seed is None else replace(self, sampling={"seed": seed, **self.sampling})


def _grammar(given: Mapping[str, Any]) -> GrammarSpec | None:
    if len(given) > 1:
        first, second, *_ = given
        raise RequestError(second, f"and {first} both constrain the output; give one")
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

"""From what a caller asks to requests in which everything is settled, or a refusal in words."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from foretell.draft.base import Drafter
from foretell.errors import RequestError
from foretell.options import nearest
from foretell.sampling.noise import mix
from foretell.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from foretell.tokenizer import Tokenizer
from foretell.types import BadWords, ReasoningMarkers, Request, SpeculationChoice
from foretell.verify.lossy import ThresholdSettings, detect_workload
from foretell.verify.rules import LOSSLESS, LOSSY

AUTO = "auto"
# The most a request may ask for: tokens a second of one sequence, and seconds.
LARGEST_SLO = {"min_tokens_per_second": 10_000, "deadline": 86_400}
PREDICTION = "prediction"
RULES = (*LOSSLESS, *LOSSY, AUTO)


def check_rule(name: str) -> None:
    """Refuse a rule that does not exist."""
    if name not in RULES:
        raise RequestError("rule", f"{name!r} is not known; {nearest(name, RULES)}")


@dataclass(frozen=True)
class Limits:
    """What the model sets for every request."""

    context: int
    end_ids: frozenset[int]
    vocab: int

    def __post_init__(self) -> None:
        """Drop end ids that the model cannot generate; a tokenizer may have more tokens than the model."""
        object.__setattr__(self, "end_ids", frozenset(filter(self.has, self.end_ids)))

    def has(self, token: int) -> bool:
        """Return whether the vocabulary has this id."""
        return 0 <= token < self.vocab


class RequestBuilder:
    """Settles requests for one engine."""

    lossless, lossy = tuple(LOSSLESS), tuple(LOSSY)  # the rules there are, by what they do to the text

    def __init__(
        self,
        limits: Limits,
        tokenizer: Tokenizer | None,
        drafter: Drafter,
        defaults: SpeculationChoice = SpeculationChoice(rule="match"),
    ) -> None:
        """`defaults` is what a request gets that does not say otherwise."""
        self.limits, self.tokenizer, self.drafter, self.defaults = limits, tokenizer, drafter, defaults
        check_rule(defaults.rule or "match")

    def make(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        speculation: SpeculationChoice = SpeculationChoice(),
        tenant: str = "",
    ) -> list[Request]:
        """One request for each of `n` choices; they differ by their noise alone."""
        self._check_tokens(prompt, params)
        if speculation.rule is None:
            speculation = self._with_defaults(speculation)
        speculation, drafters = settle_drafters(self.drafter, speculation)
        check_pace(speculation, drafters)
        request = Request(
            id=request_id,
            prompt=tuple(prompt),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_tokens=settle_max_tokens(prompt, params, self.limits.context),
            end_ids=self.limits.end_ids,
            tenant=tenant,
            speculation=speculation,
            rule=self._settle_rule(params, speculation, drafters),
            drafters=drafters,
            bad_words=self._banned(params),
            reasoning=self._thinking(params),
            prediction=self._prediction(speculation),
        )
        request = replace(request, speculation=self._settle_thresholds(request))
        return [replace(request, seed=mix(request.seed, i), choice=i) for i in range(params.n)]

    def _with_defaults(self, given: SpeculationChoice) -> SpeculationChoice:
        """What was said, and the engine's own for the rest."""
        ours = self.defaults
        return replace(
            ours,
            enabled=given.enabled,
            drafter=given.drafter,
            max_draft=given.max_draft,
            acceptance_threshold=given.acceptance_threshold or ours.acceptance_threshold,
            workload=given.workload or ours.workload,
            prediction=given.prediction,
            deadline=given.deadline,
            min_tokens_per_second=given.min_tokens_per_second,
            details=given.details,
        )

    def _check_tokens(self, prompt: list[int], params: SamplingParams) -> None:
        named: dict[str, Iterable[int]] = {
            "prompt": prompt,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias or {},
        }
        for field, tokens in named.items():
            if not all(isinstance(token, int) and self.limits.has(token) for token in tokens):
                raise RequestError(field, f"has token ids outside 0..{self.limits.vocab - 1}")
        if len(params.allowed_token_ids or ()) > self.limits.vocab:  # every step looks at each
            raise RequestError("allowed_token_ids", f"must be at most {self.limits.vocab}, each named once")
        for name in ("stop", "bad_words", "thinking_budget"):
            if self.tokenizer is None and getattr(params, name) not in ((), None):
                raise RequestError(name, "needs a tokenizer, and this engine has none")

    def _settle_rule(self, params: SamplingParams, speculation: SpeculationChoice, drafters: tuple[str, ...]) -> str:
        rule = speculation.rule or "match"
        check_rule(rule)
        if rule != AUTO:
            return rule
        # Same tokens for whoever gave a seed; for the others the rule that accepts the most of drawn guesses.
        draws = any(self.drafter.drafters[name].draws for name in drafters)
        return "block" if params.seed is None and params.temperature > 0 and draws else "match"

    def _settle_thresholds(self, request: Request) -> SpeculationChoice:
        choice = request.speculation
        if request.rule != "confidence":
            if choice.workload is not None or choice.acceptance_threshold is not None:
                raise RequestError("acceptance_threshold", "is for the rule confidence; set rule to it")
            return choice
        settings = ThresholdSettings()
        if choice.workload is not None:
            settings = ThresholdSettings.for_workload(self._workload(request))
        upper, lower = choice.acceptance_threshold or (settings.upper, settings.lower)
        settings = replace(settings, upper=upper, lower=lower)
        return replace(choice, acceptance_threshold=(settings.upper, settings.lower))

    def _workload(self, request: Request) -> str:
        workload = request.speculation.workload or AUTO
        if workload != AUTO or self.tokenizer is None:
            return workload
        grammar = request.params.structured_outputs
        wants_json = grammar is not None and grammar.kind.startswith("json")
        return detect_workload(self.tokenizer.decode(request.prompt), wants_json)

    def _banned(self, params: SamplingParams) -> BadWords:
        """Every way the bad words are spelt in tokens: as they are, and behind a space."""
        found: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {}
        if self.tokenizer is None:
            return found
        forms = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        spelt = [tuple(self.tokenizer.encode(form, add_special=False)) for form in forms]
        possible = (tokens for tokens in spelt if tokens and all(map(self.limits.has, tokens)))
        for *before, last in dict.fromkeys(possible):
            runs = found.setdefault(len(before) + 1, {})
            runs[tuple(before)] = (*runs.get(tuple(before), ()), last)
        return found

    def _prediction(self, speculation: SpeculationChoice) -> tuple[int, ...]:
        if speculation.prediction is None:
            return ()
        if not self.drafter.drafters:
            return ()  # an expectation, where nobody guesses
        if speculation.enabled and PREDICTION not in self.drafter.drafters:
            raise RequestError(
                "prediction", f"is for the drafter prediction; this engine guesses by {self.drafter.name}"
            )
        if self.tokenizer is None:
            raise RequestError("prediction", "needs a tokenizer, and this engine has none")
        most = self.limits.context  # more cannot be written, and is not worth reading
        expected = speculation.prediction[: most * self.tokenizer.longest_token]
        return tuple(self.tokenizer.encode(expected, add_special=False)[:most])

    def _thinking(self, params: SamplingParams) -> ReasoningMarkers | None:
        if params.thinking_budget is None or self.tokenizer is None:
            return None
        opens, closes = (tuple(self.tokenizer.encode(mark, add_special=False)) for mark in ("<think>", "</think>"))
        if not all(map(self.limits.has, closes)):
            raise RequestError("thinking_budget", "needs </think>, which this model's vocabulary lacks; leave it out")
        return ReasoningMarkers(opens, closes)


def check_pace(choice: SpeculationChoice, drafters: tuple[str, ...]) -> None:
    """Refuse an SLO outside its range, or for a request without drafters."""
    for name, most in LARGEST_SLO.items():
        value = getattr(choice, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise RequestError(name, f"must be a number above 0 and at most {most}")
        if not drafters:
            raise RequestError(name, "is kept by guessing ahead, and nobody guesses for this request; leave it out")


def settle_drafters(engine: Drafter, choice: SpeculationChoice) -> tuple[SpeculationChoice, tuple[str, ...]]:
    """Who may guess for a request: whom it names, or the engine's own, and `prediction` where it brings one."""
    arms = engine.drafters
    if choice.drafter == "none" or not choice.enabled or choice.max_draft == 0:
        return replace(choice, enabled=False), ()
    if choice.drafter in (None, "auto", "mix"):
        found = _own_drafters(engine, choice)
    else:
        found = tuple(name.strip() for name in str(choice.drafter).split(","))
        for name in found:
            _check_drafter(name, engine, choice)
    if choice.rule == "confidence":
        sure = tuple(name for name in found if arms[name].gives_probability)
        if found and not sure:
            raise RequestError("rule", f"confidence needs a drafter with probabilities; {', '.join(found)} has none")
        found = sure
    return choice, found


def _own_drafters(engine: Drafter, choice: SpeculationChoice) -> tuple[str, ...]:
    found = engine.default_drafters
    if PREDICTION in engine.drafters and choice.prediction is not None:
        return tuple(dict.fromkeys((PREDICTION, *found)))
    return tuple(name for name in found if name != PREDICTION) if len(found) > 1 else found


def _check_drafter(name: str, engine: Drafter, choice: SpeculationChoice) -> None:
    if name not in engine.drafters:
        has = f"it has {', '.join(engine.drafters)}" if engine.drafters else "it was started without one"
        raise RequestError("drafter", f"this engine has no drafter {name!r}; {has}; start it with --drafter {name}")
    if name == PREDICTION and choice.prediction is None:
        raise RequestError("drafter", "prediction copies the text you expect; give that as prediction")


def settle_max_tokens(prompt: list[int], params: SamplingParams, context: int) -> int:
    """How many tokens may be written; what cannot fit is refused before any is made."""
    if not prompt:
        raise RequestError("prompt", "is empty; give it some text")
    room = context - len(prompt)
    if room < 1:
        raise RequestError(
            "prompt", f"has {len(prompt)} tokens; this model takes at most {context - 1} and one new one; shorten it"
        )
    if params.min_tokens > room:
        raise RequestError("min_tokens", f"{params.min_tokens} is more than the {room} tokens left after the prompt")
    if params.max_tokens is None:
        return min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room)
    if params.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"{params.max_tokens} is more than the {room} left after the prompt; ask for {room} or fewer",
        )
    return params.max_tokens

"""Validates what a caller asks for and builds requests in which every setting is resolved."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from foretell.draft.mix import MixDrafter
from foretell.draft.registry import KINDS
from foretell.errors import ContextLengthError, RequestError
from foretell.options import nearest
from foretell.sampling.noise import derive_seed
from foretell.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from foretell.tokenizer import Tokenizer
from foretell.types import BadWords, ReasoningMarkers, Request, SpeculationChoice
from foretell.verify.lossy import ThresholdSettings, detect_workload
from foretell.verify.rules import LOSSLESS, LOSSY

AUTO = "auto"
# Upper bounds of a request's SLO: tokens per second of one sequence, and seconds.
MAX_SLO = {"min_tokens_per_second": 10_000, "deadline": 86_400}
PREDICTION = "prediction"
REFERENCE_READER = "suffix"  # the drafter that copies from a request's reference
RULES = (*LOSSLESS, *LOSSY, AUTO)


def check_rule(name: str) -> None:
    """Raise for an unknown verification rule."""
    if name not in RULES:
        raise RequestError("rule", f"{name!r} is not known; {nearest(name, RULES)}")


@dataclass(frozen=True)
class RequestLimits:
    """Limits that the model sets for every request."""

    context: int  # tokens of prompt and output
    end_ids: frozenset[int]
    vocab: int

    def __post_init__(self) -> None:
        """Drop end ids that the model cannot generate; a tokenizer may have more tokens than the model."""
        object.__setattr__(self, "end_ids", frozenset(filter(self.has, self.end_ids)))

    def has(self, token: int) -> bool:
        """Return whether the vocabulary has this id."""
        return 0 <= token < self.vocab


class RequestBuilder:
    """Builds the requests of one engine."""

    lossless, lossy = tuple(LOSSLESS), tuple(LOSSY)  # names of the verification rules

    def __init__(
        self,
        limits: RequestLimits,
        tokenizer: Tokenizer | None,
        drafter: MixDrafter,
        defaults: SpeculationChoice = SpeculationChoice(rule="match"),
    ) -> None:
        """`defaults` are the speculation settings of a request that has none."""
        self.limits = limits
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.defaults = defaults
        check_rule(defaults.rule or "match")

    def make(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        speculation: SpeculationChoice = SpeculationChoice(),
        tenant: str = "",
    ) -> list[Request]:
        """Build a request for each of the `n` choices; they differ only in their seeds."""
        self._check_tokens(prompt, params)
        if speculation.rule is None:
            speculation = self._with_defaults(speculation)
        speculation, drafters = resolve_drafters(self.drafter, speculation)
        check_slo(speculation, drafters)
        request = Request(
            id=request_id,
            prompt=tuple(prompt),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_tokens=resolve_max_tokens(prompt, params, self.limits.context),
            end_ids=self.limits.end_ids,
            tenant=tenant,
            speculation=speculation,
            rule=self._resolve_rule(params, speculation, drafters),
            drafters=drafters,
            bad_words=self._tokenize_bad_words(params),
            reasoning=self._reasoning_markers(params),
            prediction=self._prediction(speculation),
            reference=self._reference(speculation),
        )
        request = replace(request, speculation=self._resolve_thresholds(request))
        return [replace(request, seed=derive_seed(request.seed, i), choice=i) for i in range(params.n)]

    def _with_defaults(self, given: SpeculationChoice) -> SpeculationChoice:
        """Return the given settings, completed by the engine's defaults."""
        defaults = self.defaults
        return replace(
            defaults,
            enabled=given.enabled,
            drafter=given.drafter,
            max_draft=given.max_draft,
            acceptance_threshold=given.acceptance_threshold or defaults.acceptance_threshold,
            workload=given.workload or defaults.workload,
            prediction=given.prediction,
            prediction_is_inferred=given.prediction_is_inferred,
            reference=given.reference,
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
        if len(params.allowed_token_ids or ()) > self.limits.vocab:  # every step processes each of them
            raise RequestError("allowed_token_ids", f"must be at most {self.limits.vocab}, each named once")
        for name in ("stop", "bad_words", "thinking_budget"):
            if self.tokenizer is None and getattr(params, name) not in ((), None):
                raise RequestError(name, "needs a tokenizer, and this engine has none")

    def _resolve_rule(self, params: SamplingParams, speculation: SpeculationChoice, drafters: tuple[str, ...]) -> str:
        rule = speculation.rule or "match"
        check_rule(rule)
        if rule != AUTO:
            return rule
        # With a seed the tokens must be reproducible; without, use the rule that accepts the most sampled draft tokens.
        samples = any(self.drafter.drafters[name].traits.samples for name in drafters)
        return "block" if params.seed is None and params.temperature > 0 and samples else "match"

    def _resolve_thresholds(self, request: Request) -> SpeculationChoice:
        choice = request.speculation
        if request.rule != "confidence":
            if choice.workload is not None or choice.acceptance_threshold is not None:
                raise RequestError("acceptance_threshold", "needs the rule confidence; set rule to confidence")
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

    def _tokenize_bad_words(self, params: SamplingParams) -> BadWords:
        """Return the token sequences of the bad words, each also with a leading space."""
        found: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {}
        if self.tokenizer is None:
            return found
        spellings = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        tokenized = [tuple(self.tokenizer.encode(text, add_special=False)) for text in spellings]
        possible = (tokens for tokens in tokenized if tokens and all(map(self.limits.has, tokens)))
        for *before, last in dict.fromkeys(possible):
            by_prefix = found.setdefault(len(before) + 1, {})
            by_prefix[tuple(before)] = (*by_prefix.get(tuple(before), ()), last)
        return found

    def _prediction(self, speculation: SpeculationChoice) -> tuple[int, ...]:
        if speculation.prediction is None:
            return ()
        if not self.drafter.drafters:
            return ()  # ignored by an engine without drafters
        if speculation.enabled and PREDICTION not in self.drafter.drafters:
            raise RequestError("prediction", f"needs the drafter prediction; this engine has {self.drafter.name}")
        if self.tokenizer is None:
            raise RequestError("prediction", "needs a tokenizer, and this engine has none")
        max_tokens = self.limits.context  # more cannot be generated
        expected = speculation.prediction[: max_tokens * self.tokenizer.longest_token]
        return tuple(self.tokenizer.encode(expected, add_special=False)[:max_tokens])

    def _reference(self, speculation: SpeculationChoice) -> tuple[int, ...]:
        """Return the tokens of the reference; none if no drafter reads it."""
        if not speculation.reference or not speculation.enabled or self.tokenizer is None:
            return ()
        if REFERENCE_READER not in self.drafter.drafters:
            return ()
        text = speculation.reference[: self.limits.context * self.tokenizer.longest_token]
        return tuple(self.tokenizer.encode(text, add_special=False)[: self.limits.context])

    def _reasoning_markers(self, params: SamplingParams) -> ReasoningMarkers | None:
        if params.thinking_budget is None or self.tokenizer is None:
            return None
        tags = self.tokenizer.reasoning_tags
        start, end = (tuple(self.tokenizer.encode(tag, add_special=False)) for tag in (tags.start, tags.end))
        if not all(map(self.limits.has, end)):
            reason = f"needs {tags.end}, which this model's vocabulary lacks; leave it out"
            raise RequestError("thinking_budget", reason)
        return ReasoningMarkers(start, end)


def check_slo(choice: SpeculationChoice, drafters: tuple[str, ...]) -> None:
    """Raise for an SLO outside its range, or of a request without drafters."""
    for name, maximum in MAX_SLO.items():
        value = getattr(choice, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum:
            raise RequestError(name, f"must be a number above 0 and at most {maximum}")
        if not drafters:
            raise RequestError(name, "needs a drafter, and this request has none; leave it out")


def resolve_drafters(engine: MixDrafter, choice: SpeculationChoice) -> tuple[SpeculationChoice, tuple[str, ...]]:
    """Return the drafters of a request: those it names, or the engine's, and `prediction` if it has one."""
    if choice.drafter == "none" or not choice.enabled or choice.max_draft == 0:
        return replace(choice, enabled=False), ()
    if choice.drafter in (None, "auto", "mix"):
        found = _own_drafters(engine, choice)
    else:
        found = tuple(name.strip() for name in str(choice.drafter).split(","))
        for name in found:
            _check_drafter(name, engine, choice)
    if choice.rule == "confidence":
        confident = tuple(name for name in found if engine.drafters[name].traits.gives_probability)
        if found and not confident:
            raise RequestError("rule", f"confidence needs a drafter with probabilities; {', '.join(found)} has none")
        found = confident
    return choice, found


def _own_drafters(engine: MixDrafter, choice: SpeculationChoice) -> tuple[str, ...]:
    found = engine.default_drafters
    if PREDICTION in engine.drafters and choice.prediction is not None:
        return tuple(dict.fromkeys((PREDICTION, *found)))
    return tuple(name for name in found if name != PREDICTION) if len(found) > 1 else found


def _check_drafter(name: str, engine: MixDrafter, choice: SpeculationChoice) -> None:
    if name not in engine.drafters:
        has = f"it has {', '.join(engine.drafters)}" if engine.drafters else "it was started without one"
        exists = name.partition(":")[0] in KINDS
        hint = f"; start it with --drafter {name}" if exists else ""
        raise RequestError("drafter", f"this engine has no drafter {name!r}; {has}{hint}")
    if name == PREDICTION and choice.prediction is None:
        raise RequestError("drafter", "prediction copies the expected output; give that as prediction")


def resolve_max_tokens(prompt: list[int], params: SamplingParams, context: int) -> int:
    """Return how many tokens may be generated; raise if the request cannot fit into the context."""
    if not prompt:
        raise RequestError("prompt", "is empty; give it some text")
    left = context - len(prompt)
    if left < 1:
        raise ContextLengthError(
            "prompt",
            f"has {len(prompt)} tokens; this model takes at most {context - 1} and one new one; shorten it",
            context,
            f"your messages resulted in {len(prompt)} tokens. Please reduce the length of the messages.",
        )
    if params.min_tokens > left:
        raise RequestError("min_tokens", f"{params.min_tokens} is more than the {left} tokens left after the prompt")
    if params.max_tokens is None:
        return min(max(DEFAULT_MAX_TOKENS, params.min_tokens), left)
    if params.max_tokens > left:
        raise ContextLengthError(
            "max_tokens",
            f"{params.max_tokens} is more than the {left} left after the prompt; ask for {left} or fewer",
            context,
            f"you requested {len(prompt) + params.max_tokens} tokens ({len(prompt)} in the messages, "
            f"{params.max_tokens} in the completion). Please reduce the length of the messages or completion.",
        )
    return params.max_tokens

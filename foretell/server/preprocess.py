"""From what a caller sent to what the engine writes, or a refusal in words. Nothing here waits; it runs in a worker."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from foretell.config import MOST_DRAFTED
from foretell.errors import RequestError
from foretell.sampling_params import DECIDING, SamplingParams
from foretell.server.chat_template import forced_functions, render, tools_of
from foretell.server.choice_state import ChoiceState, ParsedOutput
from foretell.server.config import LONGEST_STOP, ServerConfig
from foretell.server.openai.chat_requests import ChatBody, Tool
from foretell.server.openai.requests import CompletionBody, Generation, Prediction, Speculative
from foretell.server.parsers.reasoning import CLOSES, ReasoningParser, marks_thoughts, starts_thinking
from foretell.server.parsers.tools import READERS, family_of
from foretell.server.parsers.tools.grammar import forced_call, strict_calls, written_calls
from foretell.server.structured import behind_thoughts, grammar_of, or_calls
from foretell.structured_output import GrammarSpec
from foretell.types import SpeculationChoice

if TYPE_CHECKING:
    from foretell.build.engine_builder import Assembly
    from foretell.sampling_params import SamplingParams
    from foretell.types import Request

T = TypeVar("T")

SAME = (*DECIDING, "n", "skip_special_tokens")  # that mean the same in a body and in `SamplingParams`
OPENAI = {"temperature": 1.0}  # where neither the request nor the model says otherwise


def sampling_params(
    body: Generation, defaults: Mapping[str, Any], config: ServerConfig, grammar: GrammarSpec | None, **settled: Any
) -> SamplingParams:
    """The model's own defaults, what the request says, and what was `settled` from it."""
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    params = SamplingParams(**(OPENAI | dict(defaults) | given | settled), structured_outputs=grammar)
    if params.n > config.max_n:
        raise RequestError("n", f"must be at most {config.max_n} here, not {params.n}")
    if len(params.stop) > config.max_stop or any(len(stop) > LONGEST_STOP for stop in params.stop):
        raise RequestError("stop", f"takes at most {config.max_stop} strings of {LONGEST_STOP} characters")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > config.max_logprobs:
            raise RequestError("logprobs", f"must be at most {config.max_logprobs} here, not {getattr(params, name)}")
    if grammar is not None:
        config.check_grammar(grammar)
    return params


def speculation_choice(body: Generation) -> SpeculationChoice:
    """What a request says of speculation, llama.cpp's dotted names included."""
    wanted = body.speculative
    options = wanted if isinstance(wanted, Speculative) else Speculative(enabled=wanted is not False)
    _check_thresholds(options.n_min, options.p_min)
    _check_thresholds(body.speculative_n_min, body.speculative_p_min)
    max_draft = _one_of("max_draft", options.max_draft, options.n_max, body.speculative_n_max)
    if max_draft is not None and not 0 <= max_draft <= MOST_DRAFTED:
        raise RequestError("speculative.max_draft", f"must be between 0 and {MOST_DRAFTED}, not {max_draft}")
    return SpeculationChoice(
        enabled=options.enabled,
        drafter=_one_of("drafter", options.drafter, options.method),
        max_draft=max_draft,
        deadline=options.deadline,
        min_tokens_per_second=options.min_tokens_per_second,
        rule=options.rule,
        acceptance_threshold=_thresholds(options),
        workload=options.workload,
        prediction=None if body.prediction is None else _prediction_text(body.prediction),
        details=bool(body.return_token_details),
    )


def _check_thresholds(n_min: int | None, p_min: float | None) -> None:
    """They say which guesses are worth checking, which is measured here, and change no text."""
    if n_min is not None and not 0 <= n_min <= MOST_DRAFTED:
        raise RequestError("speculative.n_min", f"must be between 0 and {MOST_DRAFTED}, not {n_min}")
    if p_min is not None and not 0 <= p_min <= 1:
        raise RequestError("speculative.p_min", f"must be between 0 and 1, not {p_min}")


def _one_of(name: str, *values: T | None) -> T | None:
    """The one that is given; two that differ are refused."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise RequestError(f"speculative.{name}", "is given twice and differs; give it once")
    return given[0] if given else None


def _thresholds(options: Speculative) -> tuple[float, float] | None:
    upper, lower = options.acceptance_threshold, options.acceptance_threshold_lower
    if upper is None and lower is None:
        return None
    if upper is None or lower is None:
        raise RequestError("speculative.acceptance_threshold", "and acceptance_threshold_lower go together; give both")
    return upper, lower


def _prediction_text(prediction: Prediction) -> str:
    if isinstance(prediction.content, str):
        return prediction.content
    parts = [part.get("text") for part in prediction.content]
    if not all(isinstance(part, str) for part in parts):
        raise RequestError("prediction.content", "must be a text, or parts of type text")
    return "".join(str(part) for part in parts)


COMPLETION_TOKENS = 16  # what OpenAI's /v1/completions writes when not told otherwise
USUAL_TOKEN = 8  # characters; in ordinary text tokens have about 4
ENCODED_AT_ONCE = 64 * 1024  # characters


@dataclass(frozen=True)
class ClientContext:
    """Who asks: the name of the request, whose caches it may share, and the seed it gets if it brings none."""

    name: str
    tenant: str
    seed: int | None = None

    def seed_of(self, prompt: int) -> int | None:
        """Return the seed of a prompt by its index; the first keeps the request's."""
        if self.seed is None or prompt == 0:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed} {prompt}".encode()).digest()[:7])


@dataclass(frozen=True)
class GenerationJob:
    """The texts of one HTTP request, settled."""

    requests: list[Request]
    grammar: GrammarSpec | None = None
    prompts: list[str] = field(default_factory=list)  # as texts, where they are to be echoed
    silent: bool = False  # whether the one token that was written is not to be told
    thoughts: bool | None = None  # None: thoughts are not told apart; else whether the prompt ends inside one
    family: str | None = None  # whose way of calling tools is looked for
    names: frozenset[str] = frozenset()  # of the tools
    one_call: bool = False

    def answers(self) -> list[ChoiceState]:
        """One for each text, in the order of OpenAI's indices."""
        return [ChoiceState(request, i, self._reading(), self.one_call) for i, request in enumerate(self.requests)]

    def _reading(self) -> ParsedOutput:
        thoughts = None if self.thoughts is None else ReasoningParser(self.thoughts)
        return ParsedOutput(thoughts, None if self.family is None else READERS[self.family](self.names))


class RequestPreprocessor:
    """Settles requests for one engine."""

    def __init__(self, assembly: Assembly, config: ServerConfig) -> None:
        self.assembly, self.config = assembly, config
        self.tokenizer = assembly.tokenizer
        self.tokenizer.check_templates()
        self.family = family_of(self.tokenizer.tool_template, config.tool_call_parser)
        self.thinks = config.reasoning_parser == "think" or (
            config.reasoning_parser == "auto" and marks_thoughts(self.tokenizer.chat_template)
        )

    @property
    def context(self) -> int:
        return self.assembly.requests.limits.context

    def chat(self, body: ChatBody, caller: ClientContext) -> GenerationJob:
        """A conversation to be answered."""
        tools = tools_of(body, self.family)
        text = render(self.tokenizer, body, tools or None)
        self.check_length("messages", text)
        prompt = self.tokenizer.encode(text, add_special=False)
        thinking = self.thinks and starts_thinking(text)
        grammar = self._grammar(body, tools, thinking)
        params: dict[str, Any] = {
            "max_tokens": self._chat_limit(body, prompt),
            "logprobs": _chat_logprobs(body),
            "thinking_budget": _either("thinking_budget", body.thinking_budget, body.thinking_token_budget),
        }
        if tools and self.family == "mistral":
            params["skip_special_tokens"] = False  # its mark of a call is one
        return GenerationJob(
            self._requests(body, caller, [prompt], grammar, **params),
            grammar,
            thoughts=thinking if self.thinks else None,
            family=self.family if tools else None,
            names=frozenset(tool.function.name for tool in tools),
            one_call=body.parallel_tool_calls is False,
        )

    def _grammar(self, body: ChatBody, tools: Sequence[Tool], thinking: bool) -> GrammarSpec | None:
        """What the answer must look like. Where the model may call, a call is always one way to answer."""
        grammar, forced = grammar_of(body), forced_functions(body, tools)
        if not tools:
            return behind_thoughts(grammar) if grammar is not None and thinking else grammar
        assert self.family is not None, "tools were let in"
        functions, several = [tool.function for tool in tools], body.parallel_tool_calls is not False
        if not forced and grammar is not None:
            return or_calls(grammar, written_calls(self.family, functions, several), thinking)
        if not forced:
            strict = any(function.strict for function in functions)
            return strict_calls(self.family, functions) if strict else None
        if grammar is not None:
            raise RequestError("tool_choice", "asks for a call, and another field for an answer of another form")
        if thinking:
            raise RequestError("tool_choice", "asks for a call where the template lets the model think first; use auto")
        return forced_call(self.family, forced, several)

    def _chat_limit(self, body: ChatBody, prompt: list[int]) -> int | None:
        """As long as the context lasts, where nothing else is said."""
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return limit if limit is not None else max(1, self.context - len(prompt))

    def completion(self, body: CompletionBody, caller: ClientContext) -> GenerationJob:
        """Prompts to be continued."""
        prompts = self._prompts(body)
        limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if limit == 0 and not body.echo:
            raise RequestError("max_tokens", "0 writes nothing; it goes with echo, to score a prompt")
        grammar = grammar_of(body)
        params = {"max_tokens": max(1, limit) if limit >= 0 else limit, "logprobs": body.logprobs}
        if body.echo:
            params["prompt_logprobs"] = body.logprobs
        return GenerationJob(
            self._requests(body, caller, prompts, grammar, **params),
            grammar,
            prompts=self._echoes(body, prompts) if body.echo else [],
            silent=limit == 0,
        )

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """The tokens of each."""
        many = _many(body)
        if not 1 <= len(many) <= self.config.max_prompts:
            raise RequestError("prompt", f"must be 1 to {self.config.max_prompts} prompts, not {len(many)}")
        for each in many:
            self.check_length("prompt", each)
        return [self.tokenizer.encode(each) if isinstance(each, str) else each for each in many]

    def check_length(self, field: str, prompt: str | list[int]) -> None:
        """Refuse a prompt that cannot fit, before all of it is encoded."""
        most = self.context * (self.tokenizer.longest_token if isinstance(prompt, str) else 1)
        if len(prompt) > most or (isinstance(prompt, str) and self._has_too_many_tokens(prompt)):
            kind = "characters" if isinstance(prompt, str) else "tokens"
            raise RequestError(
                field, f"has {len(prompt)} {kind}; this model takes at most {self.context} tokens; shorten it"
            )

    def _has_too_many_tokens(self, text: str) -> bool:
        """Count the tokens of a text that fits only if its tokens are unusually long, part by part.

        Encoding all of it at once takes about 400 bytes per token. Splitting changes the tokens at the borders of the
        parts, so the text is refused only at twice the context.
        """
        if len(text) <= USUAL_TOKEN * self.context:
            return False
        count = 0
        for start in range(0, len(text), ENCODED_AT_ONCE):
            count += len(self.tokenizer.encode(text[start : start + ENCODED_AT_ONCE], add_special=False))
            if count > 2 * self.context:
                return True
        return False

    def _echoes(self, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
        """The prompts as they were sent; token ids with their marks, as a text would have them."""
        return [
            each if isinstance(each, str) else self.tokenizer.decode(tokens, skip_special=False)
            for each, tokens in zip(_many(body), prompts, strict=True)
        ]

    def _requests(
        self,
        body: Generation,
        caller: ClientContext,
        prompts: list[list[int]],
        grammar: GrammarSpec | None,
        **settled: Any,
    ) -> list[Request]:
        params = sampling_params(body, self.assembly.sampling_defaults, self.config, grammar, **settled)
        choice = speculation_choice(body)
        make = self.assembly.requests.make
        made = [
            make(f"{caller.name}-{i}", prompt, self._seeded(params, body, caller, i), choice, caller.tenant)
            for i, prompt in enumerate(prompts)
        ]
        for group in made:
            self.assembly.engine.check(group[0])
        return [request for group in made for request in group]

    def _seeded(self, params: SamplingParams, body: Generation, caller: ClientContext, prompt: int) -> SamplingParams:
        """Give a prompt a seed of its own where the seed is the server's; `make` derives those of its n choices."""
        return params if body.seed is not None or caller.seed is None else replace(params, seed=caller.seed_of(prompt))

    def reasoning_tokens(self, answers: Sequence[ChoiceState]) -> int:
        """Tokens of thoughts: up to the mark that closes them."""
        return sum(answer.thought_tokens(self._closes) for answer in answers if answer.reasoning)

    @cached_property
    def _closes(self) -> list[int]:
        return self.tokenizer.encode(CLOSES, add_special=False)


def _many(body: CompletionBody) -> list[Any]:
    """OpenAI's four shapes as a list: a text, texts, token ids, lists of them."""
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


def _chat_logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs", "needs logprobs to be true")
        return None
    return body.top_logprobs or 0


def _either(name: str, first: int | None, second: int | None) -> int | None:
    if first is not None and second is not None and first != second:
        raise RequestError(name, "is given twice and differs; give it once")
    return second if first is None else first

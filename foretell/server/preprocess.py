"""Parses an HTTP request into engine requests: chat template, tokenization, sampling parameters, grammar.

The JSON body is parsed in `json_body.py` and its fields are checked by the models in `openai/`, before this.

Everything here is CPU work without awaits; the service runs it in a worker thread. Invalid fields raise RequestError.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foretell.errors import ContextLengthError, RequestError
from foretell.sampling_params import SamplingParams
from foretell.server.chat_grammar import ChatGrammars
from foretell.server.chat_template import apply_chat_template, forced_functions, select_tools
from foretell.server.choice_state import ChoiceState, ParsedOutput
from foretell.server.config import ServerConfig
from foretell.server.generic_tools import knows_tools
from foretell.server.inferred_prediction import infer_prediction
from foretell.server.openai.chat_requests import ChatCompletionRequest, Tool
from foretell.server.openai.requests import CompletionRequest, GenerationRequest
from foretell.server.parsers.reasoning import ReasoningParser, ends_in_reasoning
from foretell.server.parsers.tools import SPECIAL_TOKENS, TOOL_PARSERS, detect_tool_parser
from foretell.server.parsers.tools.grammar import call_format
from foretell.server.parsers.tools.harmony import ENDS as HARMONY_ENDS
from foretell.server.parsers.tools.lark import LarkTokens
from foretell.server.quoted_results import quoted_results
from foretell.server.request_params import given_once, grammar_spec, sampling_params, speculation_choice
from foretell.server.usage import PREDICTION
from foretell.structured_output import GrammarSpec
from foretell.tokenizer.reasoning_tags import REASONING_TAGS, THINK, ReasoningTags, detect_reasoning
from foretell.types import SpeculationChoice

if TYPE_CHECKING:
    from foretell.build.engine_builder import Assembly
    from foretell.tokenizer.fim import FimTokens
    from foretell.types import Request

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions
LONG_TOKEN_CHARS = 8  # characters per token above which a text is unusual; ordinary text has about 4
STRICT = "tools.function.strict"  # a field without effect where calls have no start tag, or their grammar is too large
COUNT_CHUNK_CHARS = 64 * 1024  # characters encoded at a time when the tokens of a long prompt are counted


@dataclass(frozen=True)
class ClientContext:
    """The identity of a request: its id, the tenant whose prefix cache it may share, and the server's seed for it."""

    request_id: str
    tenant: str
    seed: int | None = None  # used for prompts if the request has no seed of its own

    def prompt_seed(self, prompt: int) -> int | None:
        """Return the seed of a prompt by its index; the first keeps the request's."""
        if self.seed is None or prompt == 0:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed} {prompt}".encode()).digest()[:7])


@dataclass(frozen=True)
class GenerationJob:
    """The engine requests of one HTTP request, one for each choice, and how to parse their output."""

    requests: list[Request]
    grammar: GrammarSpec | None = None
    prompts: list[str] = field(default_factory=list)  # prompts to echo, as strings; empty without echo
    prompt_only: bool = False  # max_tokens=0 with echo: the one generated token is not returned
    reasoning_tags: ReasoningTags | None = None  # None: reasoning is not parsed
    starts_in_reasoning: bool = False  # whether the prompt ends inside reasoning
    tool_parser: str | None = None  # name of the parser in TOOL_PARSERS; None: tool calls are not parsed
    tool_names: frozenset[str] = frozenset()
    tool_parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # JSON schemas by tool
    single_tool_call: bool = False
    ignored: tuple[str, ...] = ()  # fields of the request that have no effect with this model

    def choices(self) -> list[ChoiceState]:
        """Return the state of each choice, in the order of OpenAI's indices."""
        return [
            ChoiceState(request, index, self._parsed_output(), self.single_tool_call)
            for index, request in enumerate(self.requests)
        ]

    def _parsed_output(self) -> ParsedOutput:
        tags = self.reasoning_tags
        reasoning = None if tags is None else ReasoningParser(self.starts_in_reasoning, tags)
        if self.tool_parser is None:
            return ParsedOutput(reasoning)
        return ParsedOutput(reasoning, TOOL_PARSERS[self.tool_parser](self.tool_names, self.tool_parameters))


class RequestPreprocessor:
    """Preprocesses the requests for one engine."""

    def __init__(self, assembly: Assembly, config: ServerConfig) -> None:
        self.assembly, self.config = assembly, config
        self.tokenizer = assembly.tokenizer
        self.tokenizer.check_templates()
        self.tool_parser = detect_tool_parser(self.tokenizer.tool_template, config.tool_parser)
        self.reasoning_tags = _reasoning_tags(config, self.tokenizer.chat_template)

    @property
    def parses_reasoning(self) -> bool:
        """Return whether the model's reasoning is returned separately from its content."""
        return self.reasoning_tags is not None

    @cached_property
    def lark_tokens(self) -> LarkTokens:
        """Return the special tokens that grammars may name."""
        pieces = {self.tokenizer.piece(token): token for token in self.tokenizer.special_ids}
        return LarkTokens({piece: token for piece, token in pieces.items() if piece})

    def notices(self) -> Iterator[str]:
        """Yield what the user should know at the start, one line each."""
        if self.tool_parser is not None and not knows_tools(self.tokenizer.tool_template):
            yield (
                "tools: the chat template knows none, so they are described in the system turn and called in the "
                "Hermes format; --tool-call-parser none turns tools off"
            )

    @property
    def max_model_len(self) -> int:
        return self.assembly.requests.limits.context

    @property
    def returns_reasoning(self) -> bool:
        """Return whether reasoning is separated from the answer, between tags or in Harmony's channels."""
        return self.parses_reasoning or self.tool_parser == "harmony"

    def preprocess_chat(self, body: ChatCompletionRequest, client: ClientContext) -> GenerationJob:
        """Apply the chat template, tokenize, and build the engine requests of a chat completion."""
        tools = select_tools(body, self.tool_parser)
        text = apply_chat_template(self.tokenizer, body, tools or None)
        self.check_length("messages", text)
        prompt = self.tokenizer.encode(text, add_special=False)
        tags = self.reasoning_tags
        in_reasoning = tags is not None and ends_in_reasoning(text, tags)
        grammar = self._chat_grammar(body, tools, in_reasoning)
        params: dict[str, Any] = {
            "max_tokens": self._chat_max_tokens(body, prompt),
            "logprobs": _chat_logprobs(body),
            "thinking_budget": given_once("thinking_budget", body.thinking_budget, body.thinking_token_budget),
        }
        tool_parser = self.tool_parser if tools or self.tool_parser == "harmony" else None
        if tool_parser in SPECIAL_TOKENS or (tags is not None and self.lark_tokens.has(tags.start + tags.end)):
            params["skip_special_tokens"] = False
        is_strict = any(tool.function.strict for tool in tools)
        return GenerationJob(
            requests=self._build_requests(
                body, client, [prompt], grammar, _last_user_text(body), self._quoted_results(body, tools), **params
            ),
            grammar=grammar,
            reasoning_tags=tags,
            starts_in_reasoning=in_reasoning,
            tool_parser=tool_parser,
            tool_names=frozenset(tool.function.name for tool in tools),
            tool_parameters={tool.function.name: tool.function.parameters or {} for tool in tools},
            single_tool_call=body.parallel_tool_calls is False,
            ignored=(STRICT,) if is_strict and grammar is None else (),
        )

    def count_chat_tokens(self, body: ChatCompletionRequest) -> int:
        """Return the prompt tokens of a chat, however long it is."""
        tools = select_tools(body, self.tool_parser)
        return self._count_tokens(apply_chat_template(self.tokenizer, body, tools or None))

    def _chat_grammar(
        self, body: ChatCompletionRequest, tools: Sequence[Tool], in_reasoning: bool
    ) -> GrammarSpec | None:
        """Return the grammar of the output. With tools, a tool call is always allowed besides the requested format."""
        grammar, forced = grammar_spec(body), forced_functions(body, tools)
        is_harmony = self.tool_parser == "harmony"
        grammars = ChatGrammars(self.lark_tokens, self.reasoning_tags, in_reasoning, is_harmony)
        if not tools:
            return None if grammar is None else grammars.answer(grammar)
        assert self.tool_parser is not None, "select_tools refuses tools without a parser"
        functions = [tool.function for tool in tools]
        if forced and grammar is not None:
            raise RequestError("tool_choice", "requires a tool call, but another field requires a different format")
        # Nothing but the grammar would end a list of forced calls, so that one is enough unless more are asked for.
        parallel = body.parallel_tool_calls is True if forced else body.parallel_tool_calls is not False
        form = call_format(self.tool_parser, self.tokenizer.tool_template, parallel)
        if forced:
            return grammars.calls(form, forced, parallel)
        if grammar is not None:
            return grammars.answer_or_calls(grammar, form, functions, parallel)
        if not any(function.strict for function in functions):
            return None
        strict = grammars.strict(form, functions)
        return None if strict is None or strict.size > self.config.max_schema_bytes else strict

    def _chat_max_tokens(self, body: ChatCompletionRequest, prompt: list[int]) -> int:
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return self.output_limit(len(prompt), streamed=bool(body.stream)) if limit is None else limit

    def output_limit(self, prompt_tokens: int, *, streamed: bool) -> int:
        """Return the limit of an output whose request has none: the rest of the context.

        A response that is not streamed is bounded: its client waits for the end and would give up.
        """
        rest = max(1, self.max_model_len - prompt_tokens)
        return rest if streamed else min(rest, self.config.unstreamed_max_tokens)

    def preprocess_completion(self, body: CompletionRequest, client: ClientContext) -> GenerationJob:
        """Tokenize the prompts and build the engine requests of a text completion."""
        texts = self._checked_prompts(body)
        limit = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if limit == 0 and not body.echo:
            raise RequestError("max_tokens", "0 generates nothing; use it with echo, to score a prompt")
        grammar = grammar_spec(body)
        params: dict[str, Any] = {"max_tokens": max(1, limit) if limit >= 0 else limit, "logprobs": body.logprobs}
        if body.suffix is None:
            prompts = [self.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
        else:
            self.check_length("suffix", body.suffix)
            prompts = [self.fim_prompt("suffix", before, body.suffix) for before in texts]
            params["stop_token_ids"] = (*(body.stop_token_ids or ()), *self.fim_tokens("suffix").ends)
        if body.echo:
            params["prompt_logprobs"] = body.logprobs
        return GenerationJob(
            requests=self._build_requests(
                body, client, prompts, grammar, body.prompt if isinstance(body.prompt, str) else "", **params
            ),
            grammar=grammar,
            prompts=self._prompt_texts(body, prompts) if body.echo else [],
            prompt_only=limit == 0,
        )

    def fim_tokens(self, field: str) -> FimTokens:
        """Return the model's fill-in-the-middle tokens; refuse the request for it in `field` if there are none."""
        if self.tokenizer.fim is None:
            raise RequestError(
                field,
                "needs fill-in-the-middle tokens, which this model's vocabulary lacks; serve a model that was trained "
                "for it, or put the text before the gap into prompt",
            )
        return self.tokenizer.fim

    def fim_prompt(
        self, field: str, before: str | list[int], after: str, files: Sequence[tuple[str, str]] = (), room: int = 0
    ) -> list[int]:
        """Return the prompt of a gap. The first other files are dropped if they and `room` exceed the context."""
        fim, encode = self.fim_tokens(field), self.tokenizer.encode_plain
        bos = [token for token in self.tokenizer.encode("")[:1] if token == self.tokenizer.bos_id]
        start = encode(before) if isinstance(before, str) else before
        found = fim.prompt(start, encode(after), bos)
        left, chosen = self.max_model_len - len(found) - max(1, room), fim.files(files, encode)
        while chosen and sum(map(len, chosen)) > left:
            chosen.pop(0)
        context = [token for tokens in chosen for token in tokens]
        return fim.prompt(start, encode(after), bos, context) if context else found

    def _checked_prompts(self, body: CompletionRequest) -> list[str | list[int]]:
        """Return the prompts, of which each may fit into the context."""
        prompts: list[str | list[int]] = _prompt_list(body)
        if not 1 <= len(prompts) <= self.config.max_prompts:
            raise RequestError("prompt", f"must be 1 to {self.config.max_prompts} prompts, not {len(prompts)}")
        for prompt in prompts:
            self.check_length("prompt", prompt)
        return prompts

    def check_length(self, field: str, prompt: str | list[int]) -> None:
        """Reject a prompt that cannot fit into the context, before all of it is encoded."""
        limit = self.max_model_len * (self.tokenizer.longest_token if isinstance(prompt, str) else 1)
        if len(prompt) > limit or (isinstance(prompt, str) and self._has_too_many_tokens(prompt)):
            size = f"{len(prompt)} {'characters' if isinstance(prompt, str) else 'tokens'}"
            raise ContextLengthError(
                field,
                f"has {size}; this model takes at most {self.max_model_len} tokens; shorten it",
                self.max_model_len,
                f"your {field} has {size}. Please reduce its length.",
            )

    def _has_too_many_tokens(self, text: str) -> bool:
        """Return whether a text that fits only if its tokens are unusually long has none such.

        Splitting changes the tokens at the chunk borders, so the text is rejected only at twice the context.
        """
        if len(text) <= LONG_TOKEN_CHARS * self.max_model_len:
            return False
        return self._count_tokens(text, 2 * self.max_model_len) > 2 * self.max_model_len

    def _count_tokens(self, text: str, enough: float = math.inf) -> int:
        """Return the number of tokens; a long text is counted chunk by chunk, up to the one that exceeds `enough`.

        Encoding all of it at once takes about 400 bytes per token. A chunk border can cost a token.
        """
        whole = len(text) <= LONG_TOKEN_CHARS * self.max_model_len
        size, count = len(text) if whole else COUNT_CHUNK_CHARS, 0
        for start in range(0, len(text), size or 1):
            count += len(self.tokenizer.encode(text[start : start + size], add_special=False))
            if count > enough:
                break
        return count

    def _prompt_texts(self, body: CompletionRequest, prompts: list[list[int]]) -> list[str]:
        """Return the prompts as they were sent; token ids are decoded with their special tokens."""
        return [
            prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens, skip_special=False)
            for prompt, tokens in zip(_prompt_list(body), prompts, strict=True)
        ]

    def _build_requests(
        self,
        body: GenerationRequest,
        client: ClientContext,
        prompts: list[list[int]],
        grammar: GrammarSpec | None,
        source: str,
        reference: str | None = None,
        **overrides: Any,
    ) -> list[Request]:
        """Build the n requests of each prompt. `overrides` are sampling parameters derived from the request.

        `source` is the text that may ask to rewrite a part of it, `reference` what the output may quote besides it.
        """
        params = sampling_params(body, self.assembly.sampling_defaults, self.config, grammar, **overrides)
        speculation = replace(self._with_prediction(speculation_choice(body), source), reference=reference)
        make = self.assembly.requests.make
        groups = [
            make(
                f"{client.request_id}-{i}",
                prompt,
                self._clamped(_with_prompt_seed(params, body, client, i), prompt),
                speculation,
                client.tenant,
            )
            for i, prompt in enumerate(prompts)
        ]
        for group in groups:
            self.assembly.engine.check(group[0])
        return [request for group in groups for request in group]

    def _with_prediction(self, speculation: SpeculationChoice, source: str) -> SpeculationChoice:
        """Add the text that the request asks to rewrite as prediction, unless it has one or names its drafters."""
        wanted = self.config.infer_prediction and speculation.enabled and speculation.drafter is None
        if not wanted or speculation.prediction is not None or PREDICTION not in self.assembly.engine.drafter.drafters:
            return speculation
        found = infer_prediction(source)
        return speculation if found is None else replace(speculation, prediction=found, prediction_is_inferred=True)

    def _quoted_results(self, body: ChatCompletionRequest, tools: Sequence[Tool]) -> str | None:
        """Return the results of tools as a call would quote them, if drafts may be inferred."""
        return quoted_results(body.messages, self.tool_parser) if tools and self.config.infer_prediction else None

    def _clamped(self, params: SamplingParams, prompt: list[int]) -> SamplingParams:
        """Limit max_tokens to what the context and the KV cache have left: many clients always ask for thousands."""
        pool = self.assembly.engine.runner.pool
        left = min(self.max_model_len, pool.count * pool.page_size) - len(prompt)
        if self.config.strict_max_tokens or params.max_tokens is None or not 0 < left < params.max_tokens:
            return params
        return replace(params, max_tokens=max(left, params.min_tokens))

    def count_reasoning_tokens(self, choices: Sequence[ChoiceState]) -> int:
        """Return the number of reasoning tokens, each up to and including the tag that ends it."""
        return sum(choice.reasoning_tokens(self._end_tag) for choice in choices if choice.reasoning)

    @cached_property
    def _end_tag(self) -> list[int]:
        end = HARMONY_ENDS[0] if self.tool_parser == "harmony" else (self.reasoning_tags or THINK).end
        return self.tokenizer.encode(end, add_special=False)


def _reasoning_tags(config: ServerConfig, template: str | None) -> ReasoningTags | None:
    """Return the configured reasoning tags, or those of the chat template; None if reasoning is not parsed."""
    name = detect_reasoning(template) if config.reasoning_format == "auto" else config.reasoning_format
    return REASONING_TAGS.get(name or "none")


def _with_prompt_seed(
    params: SamplingParams, body: GenerationRequest, client: ClientContext, prompt: int
) -> SamplingParams:
    """Set a seed per prompt if the seed is the server's; the request builder derives those of the n choices."""
    if body.seed is not None or client.seed is None:
        return params
    return replace(params, seed=client.prompt_seed(prompt))


def _prompt_list(body: CompletionRequest) -> list[Any]:
    """Return OpenAI's four shapes of `prompt` (string, strings, token ids, lists of token ids) as a list of prompts."""
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


def _last_user_text(body: ChatCompletionRequest) -> str:
    """Return the text of the last user message; empty after a tool's result, which is answered freely."""
    last = body.messages[-1]
    if last.role != "user" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(str(part.get("text") or "") for part in last.content)


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs", "needs logprobs to be true")
        return None
    return body.top_logprobs or 0

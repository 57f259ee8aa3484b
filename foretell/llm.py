"""Writing texts from Python, in the shapes users of vLLM know."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from foretell.build.engine_builder import Assembly, build_engine
from foretell.build.model_source import say_nothing, say_on_stderr
from foretell.engine.sequence_state import SequenceState

from .config import EngineConfig, SpeculationConfig
from .draft.base import Drafter
from .draft.isolated import isolated
from .engine.stats import Speculation
from .errors import RequestError
from .options import known_as, nearest
from .outputs import CompletionOutput, Logprob, RequestOutput, RequestTimings
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer
from .types import Delta, Request, SpeculationChoice, TokenLogprob

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model with a drafter: `generate`, `chat` and `stream` give the model's own text, sooner."""

    def __init__(
        self,
        model: str | os.PathLike[str] = EngineConfig.model,
        *,
        drafter: str | Drafter | None = None,
        speculative_config: Mapping[str, Any] | str | None = None,
        quiet: bool = False,
        **options: Any,
    ) -> None:
        self.config, self.speculation, given = _configs(model, drafter, speculative_config, options)
        say = say_nothing if quiet else say_on_stderr
        self.assembly: Assembly = build_engine(self.config, self.speculation, given, say)
        self.engine = self.assembly.engine
        self.tokenizer = self.assembly.tokenizer
        self._ids = itertools.count()

    def close(self) -> None:
        """End the processes of a model that is split over ranks; else there is nothing to do."""
        self.assembly.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The sampling the model's makers recommend, with `overrides` on top."""
        return SamplingParams(**(self.assembly.sampling_defaults | overrides))

    def measure(self) -> None:
        """Find out now what steps and drafts cost here, in a few seconds, rather than from the first requests."""
        self.assembly.profiler.run()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: SpeculationChoice = SpeculationChoice(),
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, token ids or {"prompt_token_ids": ...}. A list is one batch."""
        many = _as_list(prompts)
        return self._run([self._encode(prompt) for prompt in many], sampling_params, speculation, many)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: SpeculationChoice = SpeculationChoice(),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several as one batch."""
        one = isinstance(messages, Mapping) or (bool(messages) and isinstance(messages[0], Mapping))
        many: Sequence[Any] = [messages] if one else list(messages)
        texts = [self.tokenizer.apply_chat_template(each, **(chat_template_kwargs or {})) for each in many]
        tokens = [self.tokenizer.encode(text, add_special=False) for text in texts]
        return self._run(tokens, sampling_params, speculation, texts)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: SpeculationChoice = SpeculationChoice(),
    ) -> Iterator[Delta]:
        """As `generate` for one prompt, or `chat` for one conversation, step by step. Closing it ends the request."""
        chat = not isinstance(prompt, str | Mapping) and bool(prompt) and isinstance(prompt[0], Mapping)
        tokens = self.tokenizer.encode_chat(prompt) if chat else self._encode(prompt)  # type: ignore[arg-type]
        requests = self._requests(tokens, sampling_params, speculation)
        return self._stream(requests)

    def _stream(self, requests: list[Request]) -> Iterator[Delta]:
        tracks = [self._add(request) for request in requests]
        try:
            while any(track.seq.finish_reason is None or track.outbox for track in tracks):
                while not any(track.outbox for track in tracks):  # another caller's steps may have filled it
                    self.engine.step()
                for track in tracks:
                    while track.outbox:
                        yield track.outbox.popleft()
        finally:
            self.engine.abort(requests[0].id)

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        speculation: SpeculationChoice,
        texts: Sequence[Any],
    ) -> list[RequestOutput]:
        each = _one_each(params, len(prompts))
        requests = [self._requests(*pair, speculation) for pair in zip(prompts, each, strict=True)]
        tracks: list[list[SequenceState]] = []
        try:
            tracks += [[self._add(request) for request in group] for group in requests]
            while any(track.seq.finish_reason is None for group in tracks for track in group):
                self.engine.step()
        finally:
            for group in requests:  # where all went well there is nothing left to abort
                self.engine.abort(group[0].id)
        return [_output(group, text, self.tokenizer) for group, text in zip(tracks, texts, strict=True)]

    def _requests(
        self, prompt: list[int], params: SamplingParams | None, speculation: SpeculationChoice
    ) -> list[Request]:
        params = self.default_params() if params is None else params
        return self.assembly.requests.make(str(next(self._ids)), prompt, params, speculation)

    def _add(self, request: Request) -> SequenceState:
        wanted = request.params.structured_outputs
        return self.engine.add(request, None if wanted is None else self.assembly.grammars.compile(wanted))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping):
            return self._encode_mapping(prompt)
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("prompt", "is empty; give it some text")
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError("prompt", "must be a text or token ids") from None

    def _encode_mapping(self, prompt: Mapping[str, Any]) -> list[int]:
        known = ("prompt", "prompt_token_ids")
        for name in prompt:
            if name not in known:
                raise RequestError("prompt", f"has no part {name!r}; {nearest(name, known)}")
        if not prompt:
            raise RequestError("prompt", "is empty; give it some text")
        return self._encode(prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"])


def _configs(
    model: str | os.PathLike[str],
    drafter: str | Drafter | None,
    speculative: Mapping[str, Any] | str | None,
    options: dict[str, Any],
) -> tuple[EngineConfig, SpeculationConfig, Drafter | None]:
    engine_names = {f.name for f in fields(EngineConfig)} - {"model"}
    guess_names = {f.name for f in fields(SpeculationConfig)}
    options = {known_as(name, EngineConfig): value for name, value in options.items()}
    for name in options:
        if name not in engine_names | guess_names:
            known = sorted(engine_names | guess_names | {"model", "speculative_config", "quiet"})
            raise TypeError(f"LLM has no argument {name!r}; {nearest(name, known)}")
    guesses = {name: value for name, value in options.items() if name in guess_names}
    if isinstance(drafter, str):
        guesses["drafter"] = drafter
    elif drafter is not None and not isinstance(drafter, Drafter):
        raise RequestError("drafter", f"must be a name or a Drafter, not {drafter!r}")
    engine = EngineConfig(
        model=os.fspath(model), **{name: value for name, value in options.items() if name in engine_names}
    )
    speculation = (
        SpeculationConfig(**guesses)
        if speculative is None
        else SpeculationConfig.from_vllm(speculative if isinstance(speculative, str) else dict(speculative), **guesses)
    )
    return engine, speculation, isolated(drafter) if isinstance(drafter, Drafter) else None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (len(prompts) and _is_token(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_token(value: Any) -> bool:
    """Whole numbers of any library count."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"there are {len(params)} for {count} prompts; give one, or one each")
    return params


def _output(tracks: list[SequenceState], prompt: Any, tokenizer: Tokenizer) -> RequestOutput:
    request = tracks[0].seq.request
    return RequestOutput(
        request.id,
        prompt if isinstance(prompt, str) else None,
        request.prompt,
        tuple(_completion(track, tokenizer) for track in tracks),
        Speculation.total(track.speculation for track in tracks),
        _timings(tracks),
        tracks[0].cached_prompt_tokens,
        _prompt_logprobs(tracks[0], tokenizer),
    )


def _completion(track: SequenceState, tokenizer: Tokenizer) -> CompletionOutput:
    seq = track.seq
    assert seq.finish_reason is not None, "outputs are made of finished texts"
    wanted = seq.request.params.logprobs is not None
    return CompletionOutput(
        index=seq.request.choice,
        text=track.writer.text,
        token_ids=tuple(seq.tokens[len(seq.request.prompt) :]),
        finish_reason=seq.finish_reason,
        seed=seq.request.seed,
        speculation=track.speculation,
        logprobs=[_named(each, tokenizer) for each in track.logprobs] if wanted else None,
    )


def _prompt_logprobs(track: SequenceState, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
    """One for each token of the prompt; nothing foretells the first."""
    if track.seq.request.params.prompt_logprobs is None:
        return None
    found = track.prompt_logprobs
    return [None, *(_named(found[place], tokenizer) for place in range(1, len(track.seq.request.prompt)))]


def _named(found: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """vLLM's shape: the likeliest tokens by rank, and the token itself wherever it stands."""
    ranked = {
        token: Logprob(logprob, rank, tokenizer.token_text(token)) for rank, (token, logprob) in enumerate(found.top, 1)
    }
    return ranked | {found.token: Logprob(found.logprob, found.rank, tokenizer.token_text(found.token))}


def _timings(tracks: list[SequenceState]) -> RequestTimings:
    clocks = [track.timings for track in tracks]
    added = clocks[0].added
    started = min(clock.started or added for clock in clocks)
    first = min(clock.first_token or added for clock in clocks)
    return RequestTimings(started - added, first - added, max(clock.finished or added for clock in clocks) - added)

"""The Python API, in the shapes of vLLM's `LLM`."""

from __future__ import annotations

import inspect
import itertools
import operator
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from time import perf_counter
from typing import Any

from foretell.build.engine_builder import Assembly, build_engine
from foretell.build.model_source import no_progress, print_progress
from foretell.engine.sequence_state import SequenceState

from .config import EngineConfig, SpeculationConfig
from .draft.base import Drafter
from .draft.mix import MixDrafter
from .draft.supervisor import isolate
from .engine.stats import SpeculationStats
from .errors import RequestError
from .options import nearest, resolve_alias
from .outputs import CompletionOutput, Logprob, RequestOutput, RequestTimings
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer
from .types import Delta, Request, SpeculationChoice, TokenLogprob
from .vllm_config import speculation_from_vllm

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model with a drafter. `generate`, `chat` and `stream` return the model's own output, faster.

    ```python
    from foretell import LLM, SamplingParams

    llm = LLM("smollm2-135m", drafter="auto", max_model_len=4096)
    (output,) = llm.generate("Why is the sky blue?", SamplingParams(max_tokens=64))
    print(output.outputs[0].text)
    ```

    `model` is a built-in name, a folder, a .gguf file or a Hugging Face id. `drafter` is a name, as in
    `foretell generate --drafter`, or a `Drafter` object. `speculative_config` takes vLLM's dictionary or JSON. `quiet`
    prints no progress. The other options are the flags of `foretell generate --help-all` under "model" and
    "speculation", with underscores: `inspect.signature(LLM)` and `help(LLM)` list them with their defaults. Unknown
    ones raise TypeError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = EngineConfig.model,
        *,
        drafter: str | Drafter | None = None,
        speculative_config: Mapping[str, Any] | str | None = None,
        quiet: bool = False,
        **options: Any,
    ) -> None:
        self.config, self.speculation, custom_drafter = _configs(model, drafter, speculative_config, options)
        progress = no_progress if quiet else print_progress
        self.assembly: Assembly = build_engine(self.config, self.speculation, custom_drafter, progress)
        self.engine = self.assembly.engine
        self.tokenizer = self.assembly.tokenizer
        self._ids = itertools.count()
        self._interrupted = False

    def close(self) -> None:
        """End the worker processes of a tensor-parallel model; a no-op for others."""
        self.assembly.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Return the sampling parameters of the model's generation config, with `overrides`."""
        return SamplingParams(**(self.assembly.sampling_defaults | overrides))

    def measure(self) -> None:
        """Measure the costs of steps and drafts now, in a few seconds, instead of during the first requests."""
        self.assembly.profiler.run()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: SpeculationChoice = SpeculationChoice(),
    ) -> list[RequestOutput]:
        """Continue each prompt: a string, token ids or {"prompt_token_ids": ...}. A list is one batch."""
        many = _as_list(prompts, "prompts", "a string, token ids, or a list of them")
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
        one = isinstance(messages, Mapping) or _is_conversation(messages)
        many: list[Any] = (
            [messages] if one else _as_list(messages, "messages", "a list of messages, or a list of such lists")
        )
        prompts = [self.tokenizer.apply_chat_template(each, **(chat_template_kwargs or {})) for each in many]
        tokens = [self.tokenizer.encode(prompt, add_special=False) for prompt in prompts]
        return self._run(tokens, sampling_params, speculation, prompts)

    def interrupt(self) -> None:
        """End a running `generate` or `chat` after its current step; outputs cut short have the finish reason "abort".

        A signal handler or another thread may call this.
        """
        self._interrupted = True

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: SpeculationChoice = SpeculationChoice(),
    ) -> Generator[Delta, None, None]:
        """Generate for one prompt, or answer one conversation, step by step. Closing it aborts the request."""
        chat = _is_conversation(prompt)
        tokens = self.tokenizer.encode_chat(prompt) if chat else self._encode(prompt)  # type: ignore[arg-type]
        requests = self._requests(tokens, sampling_params, speculation)
        return self._stream(requests)

    def _stream(self, requests: list[Request]) -> Generator[Delta, None, None]:
        states = [self._add(request) for request in requests]
        try:
            while any(state.seq.finish_reason is None or state.outbox for state in states):
                while not any(state.outbox for state in states):  # steps of another caller may have filled it
                    self.engine.step()
                for state in states:
                    while state.outbox:
                        yield state.outbox.popleft()
        finally:
            self.engine.abort(requests[0].id)

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        speculation: SpeculationChoice,
        originals: Sequence[Any],
    ) -> list[RequestOutput]:
        each = _one_each(params, len(prompts))
        requests = [self._requests(*pair, speculation) for pair in zip(prompts, each, strict=True)]
        states: list[list[SequenceState]] = []
        self._interrupted = False
        try:
            states += [[self._add(request) for request in group] for group in requests]
            while not self._interrupted and any(state.seq.finish_reason is None for group in states for state in group):
                self.engine.step()
        finally:
            for group in requests:  # a no-op for finished requests
                self.engine.abort(group[0].id)
        return [_output(group, prompt, self.tokenizer) for group, prompt in zip(states, originals, strict=True)]

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
            raise RequestError("prompt", "must be a string or token ids") from None

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
    speculation_names = {f.name for f in fields(SpeculationConfig)}
    options = {resolve_alias(name, EngineConfig): value for name, value in options.items()}
    for name in options:
        if name not in engine_names | speculation_names:
            known = sorted(engine_names | speculation_names | {"model", "speculative_config", "quiet"})
            raise TypeError(f"LLM has no argument {name!r}; {nearest(name, known)}")
    given = {name: value for name, value in options.items() if name in speculation_names}
    if isinstance(drafter, str):
        given["drafter"] = drafter
    elif drafter is not None and not isinstance(drafter, Drafter):
        raise RequestError("drafter", f"must be a name or a Drafter, not {drafter!r}")
    engine = EngineConfig(
        model=os.fspath(model), **{name: value for name, value in options.items() if name in engine_names}
    )
    speculation = (
        SpeculationConfig(**given)
        if speculative is None
        else speculation_from_vllm(speculative if isinstance(speculative, str) else dict(speculative), **given)
    )
    if not isinstance(drafter, Drafter):
        return engine, speculation, None
    return engine, speculation, drafter if isinstance(drafter, MixDrafter) else isolate(drafter)


def _signature() -> inspect.Signature:
    """Return the signature of LLM with all options, from their declarations."""
    given = [
        each for name, each in inspect.signature(LLM.__init__).parameters.items() if name not in ("self", "options")
    ]
    known = {each.name for each in given}
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for cls in (EngineConfig, SpeculationConfig)
        for f in fields(cls)
        if f.name not in known
    ]
    return inspect.Signature([*given, *options])


LLM.__signature__ = _signature()  # type: ignore[attr-defined]


def _is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def _as_list(prompts: Any, field: str, accepted: str) -> list[Any]:
    """Return prompts as a list; one prompt becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        found = list(prompts)
    except TypeError:
        raise RequestError(field, f"must be {accepted}, not {prompts!r}") from None
    return [prompts] if found and _is_token(found[0]) else found


def _is_token(value: Any) -> bool:
    """Return whether a value is a token id; integers of any library count."""
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


def _output(states: list[SequenceState], prompt: Any, tokenizer: Tokenizer) -> RequestOutput:
    request = states[0].seq.request
    return RequestOutput(
        request.id,
        prompt if isinstance(prompt, str) else None,
        request.prompt,
        tuple(_completion(state, tokenizer) for state in states),
        SpeculationStats.total(state.speculation for state in states),
        _timings(states),
        states[0].cached_prompt_tokens,
        _prompt_logprobs(states[0], tokenizer),
    )


def _completion(state: SequenceState, tokenizer: Tokenizer) -> CompletionOutput:
    seq = state.seq
    assert seq.finish_reason is not None, "outputs are made of finished sequences"
    wanted = seq.request.params.logprobs is not None
    return CompletionOutput(
        index=seq.request.choice,
        text=state.detokenizer.text,
        token_ids=tuple(seq.tokens[len(seq.request.prompt) :]),
        finish_reason=seq.finish_reason,
        seed=seq.request.seed,
        speculation=state.speculation,
        logprobs=[_named(each, tokenizer) for each in state.logprobs] if wanted else None,
    )


def _prompt_logprobs(state: SequenceState, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
    """Return the logprobs of each prompt token; None for the first, which nothing predicts."""
    if state.seq.request.params.prompt_logprobs is None:
        return None
    found = state.prompt_logprobs
    if len(found) < len(state.seq.request.prompt) - 1:
        return None  # interrupted before the end of the prefill
    return [None, *(_named(found[position], tokenizer) for position in range(1, len(state.seq.request.prompt)))]


def _named(found: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return vLLM's shape: the most likely tokens by rank, and the token itself with its rank."""
    ranked = {
        token: Logprob(logprob, rank, tokenizer.token_text(token)) for rank, (token, logprob) in enumerate(found.top, 1)
    }
    return ranked | {found.token: Logprob(found.logprob, found.rank, tokenizer.token_text(found.token))}


def _timings(states: list[SequenceState]) -> RequestTimings:
    timings = [state.timings for state in states]
    added = timings[0].added
    started = min(each.started or added for each in timings)
    first = min(each.first_token or added for each in timings)
    finished = max(each.finished or perf_counter() for each in timings)  # without a time: aborted just now
    return RequestTimings(started - added, first - added, finished - added)

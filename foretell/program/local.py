"""Backend with an engine in this process, which batches the generations of all programs."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from foretell.config import EngineConfig
from foretell.errors import ForetellError
from foretell.sampling_params import LogitsProcessor, SamplingParams
from foretell.types import SpeculationChoice

from .backend import GenOutput, OnText, ProgramBackend
from .prompt_state import PromptState
from .settings import DEFAULT_MAX_TOKENS, GenSettings

if TYPE_CHECKING:
    from foretell.engine.async_engine import AsyncEngine
    from foretell.engine.sequence_state import SequenceState

# The server's defaults below those of the model, so that a program samples alike on both backends.
DEFAULTS = {"temperature": 1.0, "max_tokens": DEFAULT_MAX_TOKENS}
NO_SPECULATION = SpeculationChoice(enabled=False)


class LocalEngine(ProgramBackend):
    """A model with a drafter and the options of `LLM`. `llm` runs in its own thread: read it, do not call it."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        model_path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """`model_path` is SGLang's name for `model`."""
        from foretell.llm import LLM  # imports torch, which programs for a server do not need

        self.llm = LLM(model or model_path or EngineConfig.model, **options)
        super().__init__("engine-loop")
        self._ids = itertools.count()
        self._engine = self.thread.run(self._start())

    async def _start(self) -> AsyncEngine:
        from foretell.engine.async_engine import AsyncEngine

        engine = AsyncEngine(self.llm.engine, max_sequences=sys.maxsize)
        engine.start()
        return engine

    def close(self) -> None:
        if not self.thread.closed:
            self.thread.run(self._engine.stop())
        super().close()

    async def encode(self, prompt: PromptState) -> list[int]:
        prompt.check_generable()
        tokenizer = self.llm.tokenizer
        if not prompt.is_chat:
            return tokenizer.encode(prompt.text)
        before = tokenizer.apply_chat_template([message.as_json() for message in prompt.messages])
        return tokenizer.encode(before + prompt.text, add_special=False)

    async def render(self, prompt: PromptState) -> str:
        messages = [message.as_json() for message in prompt.messages]
        return self.llm.tokenizer.apply_chat_template(messages, add_generation_prompt=False)

    async def generate(self, prompt: PromptState, settings: GenSettings, on_text: OnText | None) -> GenOutput:
        defaults = DEFAULTS | self.llm.assembly.sampling_defaults
        params = SamplingParams(**{**defaults, **settings.sampling}, structured_outputs=settings.grammar)
        choice = settings.speculation or SpeculationChoice()
        state = await self._run(await self.encode(prompt), params, choice, on_text)
        return GenOutput(state.detokenizer.text, _meta(state))

    async def score(self, prompt: list[int], continuation: list[int]) -> list[float]:
        params = SamplingParams(
            max_tokens=len(continuation), ignore_eos=True, logprobs=0, logits_processors=(_force(continuation),)
        )
        state = await self._run(prompt, params, NO_SPECULATION, None)
        return [each.logprob for each in state.logprobs]

    async def _run(
        self, prompt: list[int], params: SamplingParams, choice: SpeculationChoice, on_text: OnText | None
    ) -> SequenceState:
        assembly, wanted = self.llm.assembly, params.structured_outputs
        requests = assembly.requests.make(f"program-{next(self._ids)}", prompt, params, choice)
        grammar = None if wanted is None else await asyncio.to_thread(assembly.grammars.compile, wanted)
        stream = self._engine.submit(requests, grammar, wants_deltas=on_text is not None)
        async with aclosing(stream.items()) as items:
            async for item in items:
                if on_text is not None and item.delta.text:
                    on_text(item.delta.text)
        if item.delta.finish_reason == "error":
            raise ForetellError(f"the generation failed: {item.state.error}")
        return item.state


def _force(tokens: list[int]) -> LogitsProcessor:
    """Return a logits processor that forces these tokens; log-probabilities are taken before it."""

    def force(output: list[int], scores: Any) -> Any:
        token = tokens[len(output)]
        score = scores[token].clone()
        scores.fill_(-float("inf"))
        scores[token] = score
        return scores

    return force


def _meta(state: SequenceState) -> dict[str, Any]:
    return {
        "finish_reason": state.seq.finish_reason,
        "prompt_tokens": len(state.seq.request.prompt),
        "cached_tokens": state.cached_prompt_tokens,
        "completion_tokens": state.seq.num_output_tokens,
        "seed": state.seq.request.seed,
        "drafted": state.speculation.drafted,
        "accepted": state.speculation.accepted,
    }

"""An engine in this process: generations of all programs are one batch in it."""

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

from .backend import Backend, Tell, Written
from .prompt_state import Script
from .settings import DEFAULT_MAX_TOKENS, Settings

if TYPE_CHECKING:
    from foretell.engine.async_engine import AsyncEngine
    from foretell.engine.sequence_state import SequenceState

# What the server has below the model's own recommendation, so that a program draws alike on both.
DEFAULTS = {"temperature": 1.0, "max_tokens": DEFAULT_MAX_TOKENS}
PLAIN = SpeculationChoice(enabled=False)


class Engine(Backend):
    """A model with a drafter, as `LLM` takes them. `llm` runs in a thread of its own: read it, do not call it."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        model_path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """`model_path` is SGLang's name of `model`."""
        from foretell.llm import LLM  # brings torch, which a program that runs on a server can do without

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

    async def encode(self, script: Script) -> list[int]:
        script.check_writable()
        tokenizer = self.llm.tokenizer
        if not script.is_chat:
            return tokenizer.encode(script.text)
        before = tokenizer.render_chat([message.as_json() for message in script.messages])
        return tokenizer.encode(before + script.text, add_special=False)

    async def render(self, script: Script) -> str:
        messages = [message.as_json() for message in script.messages]
        return self.llm.tokenizer.render_chat(messages, add_generation_prompt=False)

    async def write(self, script: Script, settings: Settings, tell: Tell | None) -> Written:
        defaults = DEFAULTS | self.llm.assembly.sampling_defaults
        params = SamplingParams(**{**defaults, **settings.sampling}, structured_outputs=settings.grammar)
        choice = settings.speculation or SpeculationChoice()
        track = await self._run(await self.encode(script), params, choice, tell)
        return Written(track.detokenizer.text, _meta(track))

    async def score(self, prompt: list[int], continuation: list[int]) -> list[float]:
        params = SamplingParams(
            max_tokens=len(continuation), ignore_eos=True, logprobs=0, logits_processors=(_force(continuation),)
        )
        track = await self._run(prompt, params, PLAIN, None)
        return [each.logprob for each in track.logprobs]

    async def _run(
        self, prompt: list[int], params: SamplingParams, choice: SpeculationChoice, tell: Tell | None
    ) -> SequenceState:
        assembly, wanted = self.llm.assembly, params.structured_outputs
        requests = assembly.requests.make(f"program-{next(self._ids)}", prompt, params, choice)
        grammar = None if wanted is None else await asyncio.to_thread(assembly.grammars.compile, wanted)
        stream = self._engine.submit(requests, grammar, wants_deltas=tell is not None)
        async with aclosing(stream.items()) as pieces:
            async for piece in pieces:
                if tell is not None and piece.delta.text:
                    tell(piece.delta.text)
        if piece.delta.finish_reason == "error":
            raise ForetellError(f"the text could not go on: {piece.state.error}")
        return piece.state


def _force(tokens: list[int]) -> LogitsProcessor:
    """Lets nothing but these tokens be written; log-probabilities are taken before it."""

    def force(written: list[int], scores: Any) -> Any:
        only = tokens[len(written)]
        kept = scores[only].clone()
        scores.fill_(-float("inf"))
        scores[only] = kept
        return scores

    return force


def _meta(track: SequenceState) -> dict[str, Any]:
    return {
        "finish_reason": track.seq.finish_reason,
        "prompt_tokens": len(track.seq.request.prompt),
        "cached_tokens": track.cached_prompt_tokens,
        "completion_tokens": track.seq.num_output_tokens,
        "seed": track.seq.request.seed,
        "drafted": track.speculation.drafted,
        "accepted": track.speculation.accepted,
    }

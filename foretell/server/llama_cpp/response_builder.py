"""Builds responses in the shape of llama.cpp's /completion: complete, and as events that end with the whole record."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from foretell.server import usage
from foretell.server.sse import sse_event
from foretell.server.token_details import LogprobFormatter

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem
    from foretell.server.choice_state import ChoiceState
    from foretell.server.llama_cpp.requests import LlamaRequest
    from foretell.server.preprocess import GenerationJob
    from foretell.tokenizer import Tokenizer

STOP_TYPES = {"stop": "eos", "length": "limit"}


class LlamaResponseBuilder:
    """Builds the response to one request with one sequence as its output arrives."""

    def __init__(self, job: GenerationJob, body: LlamaRequest, model: str, tokenizer: Tokenizer) -> None:
        self.body, self.model, self.tokenizer = body, model, tokenizer
        (self.choice,) = self.choices = job.choices()
        self._started: float | None = None
        self._num_sent = 0  # output tokens in events so far; those without text yet wait for it, or for the end

    def add(self, item: StreamItem) -> bytes:
        """Add an item; return its event, and the last one if the output ends with it."""
        self.choice.add(item)
        if self.body.n_predict == 0:  # the prompt is prefilled into the cache; the one output token is not returned
            self.choice.tokens, self.choice.logprobs, self.choice.content = [], [], ""
        text, tokens = item.delta.text if self.choice.tokens else "", self.choice.tokens[self._num_sent :]
        self._started = self._started or perf_counter()
        if self.choice.finish is None and self._is_late():
            self.choice.finish = "length"
        event = b""
        if text or (tokens and self.finished):
            part = {"index": 0, "content": text, "tokens": tokens, "stop": False}
            event = sse_event({**part, **self._probabilities(self._num_sent)})
            self._num_sent = len(self.choice.tokens)
        return event + (sse_event(self._filtered({**self.response(), "content": ""})) if self.finished else b"")

    @property
    def finished(self) -> bool:
        return self.choice.finish is not None

    def _is_late(self) -> bool:
        """Return whether the time of the request is over; an editor can use the lines so far."""
        limit = self.body.t_max_predict_ms or 0
        return limit > 0 and "\n" in self.choice.text and (perf_counter() - (self._started or 0.0)) * 1000 > limit

    def _probabilities(self, start: int = 0) -> dict[str, Any]:
        """Return the logprobs of the output tokens from `start`, if the request asks for them."""
        if not self.body.n_probs:
            return {}
        return {"completion_probabilities": LogprobFormatter(self.tokenizer).with_ids(self.choice.logprobs[start:])}

    def complete(self) -> dict[str, Any]:
        """Return the complete response with the requested fields."""
        return self._filtered(self.response())

    def response(self) -> dict[str, Any]:
        """Return all fields of the complete response."""
        choice: ChoiceState = self.choice
        counts = usage.usage([choice])
        stop_type = STOP_TYPES.get(choice.finish or "", "none")
        word = self._stop_word()
        return {
            "index": 0,
            "content": choice.content,
            "tokens": choice.tokens if self.body.return_tokens else [],
            **({} if self.body.stream else self._probabilities()),
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": counts["completion_tokens"],
            "tokens_evaluated": counts["prompt_tokens"],
            "tokens_cached": counts["prompt_tokens_details"]["cached_tokens"],
            "prompt": self.tokenizer.decode(choice.request.prompt, skip_special=False),
            "truncated": False,
            "has_new_line": "\n" in choice.text,
            "stop_type": "word" if word else stop_type,
            "stopping_word": word,
            "generation_settings": self._settings(),
            "timings": usage.timings([choice]),
            "speculation": usage.speculation([choice]),
        }

    def _stop_word(self) -> str:
        """Return the stop string that ended the output, as far as the text tells; empty if it ended otherwise."""
        if self.choice.finish != "stop" or not self.body.stop:
            return ""
        text = self.tokenizer.decode(self.choice.tokens)
        return next((word for word in self.body.stop if word in text[len(self.choice.content) :]), "")

    def _settings(self) -> dict[str, Any]:
        params, request = self.choice.request.params, self.choice.request
        return {
            "n_predict": request.max_tokens,
            "seed": request.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(params.stop),
            "ignore_eos": params.ignore_eos,
            "n_probs": self.body.n_probs or 0,
            "stream": bool(self.body.stream),
        }

    def _filtered(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the request names; one inside another has its path as name."""
        if not self.body.response_fields:
            return response
        found: dict[str, Any] = {}
        for path in self.body.response_fields:
            value: Any = response
            for name in path.split("/"):
                value = value.get(name, KeyError) if isinstance(value, dict) else KeyError
            if value is not KeyError:
                found[path] = value
        return found

"""On-policy training data: the target regenerates the answers, so drafters learn its distribution, not the data set's.

Answers are cached in the run's folder and reused only if target, settings and prompt are the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from foretell.build.model_source import ModelSource
from foretell.errors import RequestError
from foretell.llm import LLM
from foretell.models.decoder import Decoder
from foretell.models.hf_config import eos_token_ids
from foretell.runner.memory_plan import device_memory
from foretell.sampling.noise import derive_seed
from foretell.sampling_params import SamplingParams
from foretell.tokenizer import Tokenizer

from .data import TrainPrompt
from .sampler import AnswerRequest, Sampler
from .token_dataset import ANSWERS_FILE, Document, Fingerprint, load_documents, load_fingerprint, save_documents

ENGINE_SAVE_EVERY = 64  # answers between two saves, and requests per batch of the engine
SAMPLER_SAVE_EVERY = 1 << 14  # answers between two saves
SAMPLER_SLOTS = 1024  # sequences the sampler decodes at once, at most
SAMPLER_MEMORY = 0.5  # fraction of free GPU memory for the sampler's KV caches
MIN_ANSWER_TOKENS = 4  # shorter answers are not trained on
INDEX_STRIDE = 1 << 20  # above the chunks of any document, so that sorting by index keeps the order of the prompts
HIGH_TEMPERATURE = 1.0  # temperature of half of the sampled answers


@dataclass(frozen=True)
class RegenerateSettings:
    """Sampling of the answers. Field names are part of the fingerprint in answers.npz."""

    max_tokens: int
    context: int
    greedy: float
    temperature: float
    seed: int

    def temperature_of(self, index: int) -> float:
        """Choose the temperature of a prompt by its index: greedy, the configured one, or 1.0."""
        draw = random.Random(f"{self.seed} {index} temperature").random()
        if draw < self.greedy or self.temperature == 0:
            return 0.0
        return self.temperature if draw < (1 + self.greedy) / 2 else HIGH_TEMPERATURE


@dataclass
class AnswerCache:
    """The answers file of a run's folder."""

    folder: Path
    fingerprint: Fingerprint
    log: Callable[[str], None]
    reports: bool = True  # log how many answers are reused
    _others: list[Document] = field(default_factory=list)  # of prompts outside the current call, kept in the file

    @property
    def path(self) -> Path:
        return self.folder / ANSWERS_FILE

    @cached_property
    def _documents(self) -> dict[int, Document]:
        """Return the file's documents by index; none if another target or other settings generated them."""
        if not self.path.is_file():
            return {}
        documents, fingerprint = load_documents(self.path), load_fingerprint(self.path)
        if fingerprint == self.fingerprint:
            return {each.index: each for each in documents}
        reason = "an older version wrote it, without a fingerprint"
        if fingerprint is not None:
            names = [name for name, value in self.fingerprint.items() if fingerprint.get(name) != value]
            reason = f"{', '.join(names)} changed" if names else "other settings"
        old = self.path.with_name("answers.old.npz")
        self.path.replace(old)
        self.log(f"{self.path}: none of {len(documents)} answers reused ({reason}); they are now in {old.name}")
        return {}

    def lookup(self, requests: Sequence[AnswerRequest], end: int) -> dict[int, Document]:
        """Return the cached answers of these requests by index; documents with index >= `end` stay in the file."""
        self._others = [each for index, each in self._documents.items() if index >= end]
        known = [(each, self._documents[each.index]) for each in requests if each.index in self._documents]
        hits = {request.index: document for request, document in known if _is_answer(document, request)}
        if known and self.reports:
            changed = f", {len(known) - len(hits)} not: their prompts differ" if len(hits) < len(known) else ""
            self.log(f"{self.path}: {len(hits)} of {len(requests)} answers reused{changed}")
        return hits

    def save(self, documents: Sequence[Document]) -> None:
        save_documents([*documents, *self._others], self.path, self.fingerprint)


def _is_answer(document: Document, request: AnswerRequest) -> bool:
    """Return whether a document has this prompt and was sampled at this temperature."""
    same_prompt = document.prompt == request.prompt
    return same_prompt and np.float32(document.temperature) == np.float32(request.temperature)


def regenerate(
    prompts: list[TrainPrompt],
    target: ModelSource,
    load: Callable[[], Decoder],
    engine: Callable[[], LLM],
    settings: RegenerateSettings,
    cache: AnswerCache,
    on_answer: Callable[[int, int], None],
) -> list[Document]:
    """Return a document for each prompt that fits the context, in order, with the target's answers.

    On a GPU the bulk sampler generates them, on a CPU the engine.
    """
    ready, requests = split_prompts(prompts, target.tokenizer, settings)
    found = {each.index: each for each in ready} | cache.lookup(requests, end=len(prompts) * INDEX_STRIDE)
    missing = [request for request in requests if request.index not in found]
    if missing:
        on_gpu = target.device.type == "cuda"
        if on_gpu:
            answers, save_every = _by_sampler(load(), target, missing, settings), SAMPLER_SAVE_EVERY
        else:
            answers, save_every = _by_engine(engine(), missing, settings), ENGINE_SAVE_EVERY
        try:
            for count, (request, tokens) in enumerate(answers, start=1):
                found[request.index] = _document(request, tokens)
                on_answer(count, len(missing))
                if count % save_every == 0:
                    cache.save(_sorted_by_index(found))
        finally:  # an interrupted run keeps its answers
            if found:
                cache.save(_sorted_by_index(found))
    return _sorted_by_index(found)


def _sorted_by_index(found: dict[int, Document]) -> list[Document]:
    return [found[index] for index in sorted(found)]


def _document(request: AnswerRequest, answer: list[int]) -> Document:
    tokens = np.array([*request.prompt, *answer], np.int64)
    return Document(tokens, len(request.prompt), request.temperature, index=request.index)


def split_prompts(
    prompts: list[TrainPrompt], tokenizer: Tokenizer, settings: RegenerateSettings
) -> tuple[list[Document], list[AnswerRequest]]:
    """Return documents that are complete already, and requests for the rest; too long prompts are dropped."""
    documents: list[Document] = []
    requests: list[AnswerRequest] = []
    for number, prompt in enumerate(prompts):
        tokens = encode_prompt(prompt, tokenizer)
        if prompt.is_document:
            documents += _chunks(tokens, settings.context, number)
        elif len(tokens) < settings.context - MIN_ANSWER_TOKENS:
            index = number * INDEX_STRIDE
            if prompt.answer_tokens:
                full = np.array([*tokens, *prompt.answer_tokens][: settings.context], np.int64)
                documents.append(Document(full, len(tokens), index=index))
            else:
                temperature = settings.temperature_of(number)
                requests.append(AnswerRequest(index, tokens, temperature, settings.max_tokens))
    return documents, requests


def _chunks(tokens: list[int], context: int, number: int) -> Iterator[Document]:
    """Cut plain text into documents of `context` tokens; the loss covers all but the first token."""
    for i, start in enumerate(range(0, len(tokens), context)):
        chunk = np.array(tokens[start : start + context], np.int64)
        if len(chunk) > MIN_ANSWER_TOKENS:
            yield Document(chunk, 1, index=number * INDEX_STRIDE + i)


def encode_prompt(prompt: TrainPrompt, tokenizer: Tokenizer) -> list[int]:
    """Tokenize a prompt as the target would receive it: chats by the chat template, if there is one."""
    if prompt.tokens:
        return list(prompt.tokens)
    if prompt.text:
        return tokenizer.encode(prompt.text)
    if prompt.request is not None:
        return _encode_logged(prompt.request, tokenizer)
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n\n".join(str(each["content"]) for each in prompt.messages))
    tools = list(prompt.tools) or None
    return tokenizer.encode_chat(list(prompt.messages), tools=tools)


def _encode_logged(request: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Tokenize a chat from a server's log with the server's own functions: its answer follows exactly this prompt."""
    from pydantic import ValidationError  # a dependency of the server, which other runs do not need

    from foretell.server.chat_template import apply_chat_template, select_tools
    from foretell.server.openai.chat_requests import ChatCompletionRequest

    try:
        body = ChatCompletionRequest.model_validate(request)
    except ValidationError as error:
        reason = error.errors()[0]
        where = ".".join(map(str, reason["loc"]))
        raise RequestError("from_log", f"has an invalid chat request: {where}: {reason['msg']}") from None
    tools = select_tools(body, tool_parser="as logged")
    return tokenizer.encode(apply_chat_template(tokenizer, body, tools or None), add_special=False)


def _by_engine(
    llm: LLM, requests: list[AnswerRequest], settings: RegenerateSettings
) -> Iterator[tuple[AnswerRequest, list[int]]]:
    """Generate answers with the engine, which speculates; they do not depend on the batch."""
    for start in range(0, len(requests), ENGINE_SAVE_EVERY):
        batch = requests[start : start + ENGINE_SAVE_EVERY]
        params = [
            SamplingParams(
                temperature=request.temperature,
                top_p=1.0,
                top_k=-1,
                max_tokens=min(request.max_tokens, settings.context - len(request.prompt)),
                seed=derive_seed(settings.seed, request.index) % (1 << 63),
            )
            for request in batch
        ]
        outputs = llm.generate([request.prompt for request in batch], params)
        for request, output in zip(batch, outputs, strict=True):
            yield request, list(output.outputs[0].token_ids)


def _by_sampler(
    model: Decoder, target: ModelSource, requests: list[AnswerRequest], settings: RegenerateSettings
) -> Iterator[tuple[AnswerRequest, list[int]]]:
    """Generate answers with the bulk sampler, which is many times faster for millions of tokens."""
    memory = device_memory(target.device) * SAMPLER_MEMORY
    slots = min(SAMPLER_SLOTS, len(requests), int(memory / (settings.context * target.token_bytes)))
    ends = target.tokenizer.end_ids | eos_token_ids(target.checkpoint)
    sampler = Sampler(model, max(1, slots), settings.context, ends, settings.seed)
    yield from sampler.generate(requests)

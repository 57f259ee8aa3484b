"""The target's own answers: drafters learn what it says, not what a data set says."""

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
from foretell.models.hf_config import end_ids
from foretell.runner.memory_plan import device_memory
from foretell.sampling.noise import mix
from foretell.sampling_params import SamplingParams
from foretell.tokenizer import Tokenizer

from .data import TrainPrompt
from .sampler import GenerationRequest, Sampler
from .token_dataset import (
    ANSWERS_FILE,
    Document,
    Fingerprint,
    load_documents,
    load_fingerprint,
    save_documents,
)


@dataclass
class AnswerCache:
    """The answers file of one run."""

    folder: Path
    fingerprint: Fingerprint
    log: Callable[[str], None]
    reports: bool = True  # whether to say how many answers are reused
    _others: list[Document] = field(default_factory=list)  # of prompts this call is not about, kept in the file

    @property
    def path(self) -> Path:
        return self.folder / ANSWERS_FILE

    @cached_property
    def _found(self) -> dict[int, Document]:
        """The file's documents by index; none where another target or other settings wrote them."""
        if not self.path.is_file():
            return {}
        documents, before = load_documents(self.path), load_fingerprint(self.path)
        if before == self.fingerprint:
            return {each.index: each for each in documents}
        reason = "an older version wrote it, without a fingerprint"
        if before is not None:
            names = [name for name, value in self.fingerprint.items() if before.get(name) != value]
            reason = f"{', '.join(names)} not the same" if names else "other settings"
        aside = self.path.with_name("answers.old.npz")
        self.path.replace(aside)
        self.log(f"{self.path}: none of {len(documents)} answers is reused ({reason}); they are now in {aside.name}")
        return {}

    def lookup(self, wishes: Sequence[GenerationRequest], beyond: int) -> dict[int, Document]:
        """Return the documents that answer these prompts; those of indices from `beyond` on stay in the file."""
        self._others = [each for index, each in self._found.items() if index >= beyond]
        known = [(wish, self._found[wish.index]) for wish in wishes if wish.index in self._found]
        same = {wish.index: document for wish, document in known if _answers(document, wish)}
        if known and self.reports:
            changed = f", {len(known) - len(same)} not: their prompts differ" if len(same) < len(known) else ""
            self.log(f"{self.path}: {len(same)} of {len(wishes)} answers reused{changed}")
        return same

    def save(self, documents: Sequence[Document]) -> None:
        save_documents([*documents, *self._others], self.path, self.fingerprint)


def _answers(document: Document, wish: GenerationRequest) -> bool:
    """Return whether a document begins with this prompt and was sampled at this temperature."""
    same = document.prompt == wish.prompt
    return same and np.float32(document.temperature) == np.float32(wish.temperature)


PIECE = 64  # asks the engine answers between two savings
SAVE = 1 << 14  # answers of the sampler between two
SLOTS = 1024  # texts the sampler writes at once
MEMORY = 0.5  # of what is free may be the sampler's caches
MIN_ANSWER_TOKENS = 4  # tokens of an answer from which something can be learnt
STRIDE = 1 << 20  # more pieces than a text has: documents stay in the order of their asks
WARM = 1.0  # the temperature of half of the answers that are drawn


@dataclass(frozen=True)
class RegenerateSettings:
    """How answers are written."""

    max_tokens: int
    context: int
    greedy: float
    temperature: float
    seed: int

    def temperature_of(self, index: int) -> float:
        """Greedy, as asked, or as the model itself would draw: by the ask's number alone."""
        draw = random.Random(f"{self.seed} {index} temperature").random()
        if draw < self.greedy or self.temperature == 0:
            return 0.0
        return self.temperature if draw < (1 + self.greedy) / 2 else WARM


def regenerate(
    asks: list[TrainPrompt],
    target: ModelSource,
    load: Callable[[], Decoder],
    engine: Callable[[], LLM],
    writing: RegenerateSettings,
    kept: AnswerCache,
    tell: Callable[[int, int], None],
) -> list[Document]:
    """Return a document for each ask that has room for one, in their order; answers in `kept` are reused."""
    ready, wishes = split_prompts(asks, target.tokenizer, writing)
    found = {each.index: each for each in ready} | kept.lookup(wishes, beyond=len(asks) * STRIDE)
    missing = [wish for wish in wishes if wish.index not in found]
    if missing:
        fast = target.device.type == "cuda"
        writer = _on_device(load(), target, missing, writing) if fast else _by_engine(engine(), missing, writing)
        every = SAVE if fast else PIECE
        for count, (wish, tokens) in enumerate(writer, start=1):
            found[wish.index] = _document(wish, tokens)
            tell(count, len(missing))
            if count % every == 0:
                kept.save(_in_order(found))
    documents = _in_order(found)
    if missing:
        kept.save(documents)
    return documents


def _in_order(found: dict[int, Document]) -> list[Document]:
    return [found[index] for index in sorted(found)]


def _document(wish: GenerationRequest, tokens: list[int]) -> Document:
    whole = np.array([*wish.prompt, *tokens], np.int64)
    return Document(whole, len(wish.prompt), wish.temperature, index=wish.index)


def split_prompts(
    asks: list[TrainPrompt], tokenizer: Tokenizer, writing: RegenerateSettings
) -> tuple[list[Document], list[GenerationRequest]]:
    """What is to be read as it stands, and what the target is to answer; a prompt that leaves no room is left out."""
    documents: list[Document] = []
    wishes: list[GenerationRequest] = []
    for index, ask in enumerate(asks):
        prompt = encode_prompt(ask, tokenizer)
        if ask.is_document:
            documents += _pieces(prompt, writing.context, index)
        elif len(prompt) < writing.context - MIN_ANSWER_TOKENS:
            if ask.answer_tokens:
                tokens = np.array([*prompt, *ask.answer_tokens][: writing.context], np.int64)
                documents.append(Document(tokens, len(prompt), index=index * STRIDE))
            else:
                wishes.append(
                    GenerationRequest(index * STRIDE, prompt, writing.temperature_of(index), writing.max_tokens)
                )
    return documents, wishes


def _pieces(tokens: list[int], context: int, index: int) -> Iterator[Document]:
    for number, start in enumerate(range(0, len(tokens), context)):
        piece = np.array(tokens[start : start + context], np.int64)
        if len(piece) > MIN_ANSWER_TOKENS:
            yield Document(piece, 1, index=index * STRIDE + number)


def encode_prompt(ask: TrainPrompt, tokenizer: Tokenizer) -> list[int]:
    """As it would reach the target: a chat by its template, where it has one."""
    if ask.tokens:
        return list(ask.tokens)
    if ask.text:
        return tokenizer.encode(ask.text)
    if ask.request is not None:
        return _encode_logged(ask.request, tokenizer)
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n\n".join(str(each["content"]) for each in ask.messages))
    tools = list(ask.tools) or None
    return tokenizer.encode_chat(list(ask.messages), tools=tools)


def _encode_logged(request: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Encode a chat from a server's log by the server's own functions: its answer follows exactly this prompt."""
    from pydantic import ValidationError  # of the server, which not every run needs

    from foretell.server.chat_messages import render, tools_of
    from foretell.server.openai.chat_requests import ChatBody

    try:
        body = ChatBody.model_validate(request)
    except ValidationError as error:
        reason = error.errors()[0]
        where = ".".join(map(str, reason["loc"]))
        raise RequestError("from_log", f"has a chat that no server takes: {where}: {reason['msg']}") from None
    tools = tools_of(body, family="as logged")
    return tokenizer.encode(render(tokenizer, body, tools or None), add_special=False)


def _by_engine(
    llm: LLM, wishes: list[GenerationRequest], writing: RegenerateSettings
) -> Iterator[tuple[GenerationRequest, list[int]]]:
    """Through the engine, as it serves: with guesses, and the same text with other company."""
    for start in range(0, len(wishes), PIECE):
        piece = wishes[start : start + PIECE]
        params = [
            SamplingParams(
                temperature=wish.temperature,
                top_p=1.0,
                top_k=-1,
                max_tokens=min(wish.max_tokens, writing.context - len(wish.prompt)),
                seed=mix(writing.seed, wish.index) % (1 << 63),
            )
            for wish in piece
        ]
        outputs = llm.generate([wish.prompt for wish in piece], params)
        for wish, output in zip(piece, outputs, strict=True):
            yield wish, list(output.outputs[0].token_ids)


def _on_device(
    model: Decoder, target: ModelSource, wishes: list[GenerationRequest], writing: RegenerateSettings
) -> Iterator[tuple[GenerationRequest, list[int]]]:
    """Through the sampler, which is many times faster where millions of tokens are wanted."""
    slots = min(SLOTS, len(wishes), int(device_memory(target.device) * MEMORY / (writing.context * target.token_bytes)))
    ends = target.tokenizer.end_ids | end_ids(target.checkpoint)
    sampler = Sampler(model, max(1, slots), writing.context, ends, writing.seed)
    yield from sampler.generate(wishes)

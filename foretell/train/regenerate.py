"""The target's own answers: drafters learn what it says, not what a data set says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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

from .data import Ask
from .kept_answers import KeptAnswers
from .sampler import Sampler, Wish
from .token_dataset import Document

PIECE = 64  # asks the engine answers between two savings
SAVE = 1 << 14  # answers of the sampler between two
SLOTS = 1024  # texts the sampler writes at once
MEMORY = 0.5  # of what is free may be the sampler's caches
SHORTEST = 4  # tokens of an answer from which something can be learnt
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


def documents_of(
    asks: list[Ask],
    target: ModelSource,
    load: Callable[[], Decoder],
    engine: Callable[[], LLM],
    writing: RegenerateSettings,
    kept: KeptAnswers,
    tell: Callable[[int, int], None],
) -> list[Document]:
    """Return a document for each ask that has room for one, in their order; answers in `kept` are reused."""
    ready, wishes = sort_asks(asks, target.tokenizer, writing)
    found = {each.index: each for each in ready} | kept.matching(wishes, beyond=len(asks) * STRIDE)
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


def _document(wish: Wish, tokens: list[int]) -> Document:
    whole = np.array([*wish.prompt, *tokens], np.int64)
    return Document(whole, len(wish.prompt), wish.temperature, index=wish.index)


def sort_asks(asks: list[Ask], tokenizer: Tokenizer, writing: RegenerateSettings) -> tuple[list[Document], list[Wish]]:
    """What is to be read as it stands, and what the target is to answer; a prompt that leaves no room is left out."""
    documents: list[Document] = []
    wishes: list[Wish] = []
    for index, ask in enumerate(asks):
        prompt = encode_ask(ask, tokenizer)
        if ask.whole:
            documents += _pieces(prompt, writing.context, index)
        elif len(prompt) < writing.context - SHORTEST:
            if ask.answer:
                tokens = np.array([*prompt, *ask.answer][: writing.context], np.int64)
                documents.append(Document(tokens, len(prompt), index=index * STRIDE))
            else:
                wishes.append(Wish(index * STRIDE, prompt, writing.temperature_of(index), writing.max_tokens))
    return documents, wishes


def _pieces(tokens: list[int], context: int, index: int) -> Iterator[Document]:
    for number, start in enumerate(range(0, len(tokens), context)):
        piece = np.array(tokens[start : start + context], np.int64)
        if len(piece) > SHORTEST:
            yield Document(piece, 1, index=index * STRIDE + number)


def encode_ask(ask: Ask, tokenizer: Tokenizer) -> list[int]:
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


def _by_engine(llm: LLM, wishes: list[Wish], writing: RegenerateSettings) -> Iterator[tuple[Wish, list[int]]]:
    """Through the engine, as it serves: with guesses, and the same text with other company."""
    for start in range(0, len(wishes), PIECE):
        piece = wishes[start : start + PIECE]
        params = [
            SamplingParams(
                temperature=wish.temperature,
                top_p=1.0,
                top_k=-1,
                max_tokens=min(wish.most, writing.context - len(wish.prompt)),
                seed=derive_seed(writing.seed, wish.index) % (1 << 63),
            )
            for wish in piece
        ]
        outputs = llm.generate([wish.prompt for wish in piece], params)
        for wish, output in zip(piece, outputs, strict=True):
            yield wish, list(output.outputs[0].token_ids)


def _on_device(
    model: Decoder, target: ModelSource, wishes: list[Wish], writing: RegenerateSettings
) -> Iterator[tuple[Wish, list[int]]]:
    """Through the sampler, which is many times faster where millions of tokens are wanted."""
    slots = min(SLOTS, len(wishes), int(device_memory(target.device) * MEMORY / (writing.context * target.token_bytes)))
    ends = target.tokenizer.end_ids | eos_token_ids(target.checkpoint)
    sampler = Sampler(model, max(1, slots), writing.context, ends, writing.seed)
    yield from sampler.write(wishes)

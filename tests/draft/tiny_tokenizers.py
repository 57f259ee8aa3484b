"""Two tokenizers of 32 tokens each that spell the same letters, and drafters that translate between them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from foretell.draft.cross_tokenizer.drafter import CrossTokenizerDrafter
from foretell.draft.cross_tokenizer.vocab_map import VocabMap, VocabSide
from foretell.runner.model_runner import ModelRunner
from foretell.tokenizer import Tokenizer
from tests.tiny import CONTEXT, VOCAB, tiny_decoder

# GPT-2's letters: Ġ is the space; Ã and © are the two bytes of é.
LETTERS = [*"abcdefghijklmno", "Ġ", "Ã", "©"]
TARGET_WORDS = ["ab", "cd", "Ġa", "Ġb", "abc", "ef", "no", "Ġc", "mn", "kl"]
DRAFT_WORDS = ["ab", "bc", "Ġa", "Ġb", "de", "ef", "no", "Ġno", "Ġk"]


@cache
def target_tokens() -> Tokenizer:
    """Ends with </s>; token 0, as the tiny world has it."""
    return spelled(["</s>", "<turn>", *LETTERS, *TARGET_WORDS], {"eos_token": "</s>"}, 2)


@cache
def draft_tokens() -> Tokenizer:
    """Begins with <bos>, ends with <end>, and calls the target's end a mark of its own."""
    words = ["<bos>", "<end>", "</s>", *reversed(LETTERS), *DRAFT_WORDS]
    return spelled(words, {"bos_token": "<bos>", "eos_token": "<end>"}, 3)


def spelled(pieces: list[str], named: dict[str, str], specials: int) -> Tokenizer:
    """A byte-level tokenizer with these pieces, the first of which are special; `named` says which have roles."""
    vocab = {piece: token for token, piece in enumerate(pieces)}
    merges = [(piece[:cut], piece[cut:]) for piece in pieces[specials:] for cut in range(1, len(piece))]
    known = [(left, right) for left, right in merges if left in vocab and right in vocab]
    backend = Backend(models.BPE(vocab=vocab, merges=known))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(pieces[:specials])
    if bos := named.get("bos_token"):
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return Tokenizer.from_files({"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(named)})


@cache
def tiny_vocabularies() -> VocabMap:
    """Alike enough for tokens."""
    return VocabMap.of(VocabSide(target_tokens(), VOCAB), VocabSide(draft_tokens(), VOCAB))


def token_translator(seed: int = 5, pages: int = 256, device: str = "cpu", **settings: object) -> CrossTokenizerDrafter:
    """Asks a tiny model; sampled text goes by tokens and greedy text by strings."""
    runner = ModelRunner(tiny_decoder(seed).to(device), pages, 4, CONTEXT)
    return CrossTokenizerDrafter(runner, tiny_vocabularies(), **settings)  # type: ignore[arg-type]


def string_translator(seed: int = 5, pages: int = 256, **settings: object) -> CrossTokenizerDrafter:
    """The same as if the tokenizers were less alike: all text goes by strings."""
    runner = ModelRunner(tiny_decoder(seed), pages, 4, CONTEXT)
    return CrossTokenizerDrafter(runner, replace(tiny_vocabularies(), agreement=0.5), **settings)  # type: ignore[arg-type]

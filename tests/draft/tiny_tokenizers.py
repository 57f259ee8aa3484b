"""Two tokenizers of 32 tokens each with the same letters, and drafters that translate between them."""

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
    """Return the target's tokenizer; it ends with </s>, token 0."""
    return spelled(["</s>", "<turn>", *LETTERS, *TARGET_WORDS], {"eos_token": "</s>"}, 2)


@cache
def draft_tokens() -> Tokenizer:
    """Return the draft's tokenizer; it starts with <bos>, ends with <end>, and has </s> as another special token."""
    words = ["<bos>", "<end>", "</s>", *reversed(LETTERS), *DRAFT_WORDS]
    return spelled(words, {"bos_token": "<bos>", "eos_token": "<end>"}, 3)


def spelled(pieces: list[str], named: dict[str, str], specials: int) -> Tokenizer:
    """Return a byte-level tokenizer with these pieces, the first of which are special; `named` gives their roles."""
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
    """Return a vocabulary map that drafts by tokens."""
    return VocabMap.of(VocabSide(target_tokens(), VOCAB), VocabSide(draft_tokens(), VOCAB))


def token_translator(seed: int = 5, pages: int = 256, device: str = "cpu", **settings: object) -> CrossTokenizerDrafter:
    """Return a drafter that drafts by tokens for sampled requests and by strings for greedy ones."""
    runner = ModelRunner(tiny_decoder(seed).to(device), pages, 4, CONTEXT)
    return CrossTokenizerDrafter(runner, tiny_vocabularies(), **settings)  # type: ignore[arg-type]


def string_translator(seed: int = 5, pages: int = 256, **settings: object) -> CrossTokenizerDrafter:
    """Return a drafter that always drafts by strings."""
    runner = ModelRunner(tiny_decoder(seed), pages, 4, CONTEXT)
    return CrossTokenizerDrafter(runner, replace(tiny_vocabularies(), agreement=0.5), **settings)  # type: ignore[arg-type]

"""Strings that tokenizers get wrong, and tiny tokenizers of both kinds."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from foretell.tokenizer import StreamDecoder, Tokenizer

TEXTS = [
    "",
    " ",
    "a",
    " a",
    "   a  b   c ",
    "Once upon a time, there was a little girl who didn't like 3 of the 12 bears.",
    "I'm you'LL we've it's THEY'D",
    "12345 3.14159 1,000,000 0x1F ٣٤٥ Ⅷ ½ ²",
    "def f(x: int) -> int:\n    return x ** 2\t# square\n\n\nprint(f(3))\n",
    "line\r\nline\r\n\r\n\ttabbed\t\tand\r more",
    "\n\n\n\n   \t\t  \n ",
    " " * 40 + "x" + "\t" * 35 + "y" + "\n" * 33,
    "https://example.com/a/b?c=d&e=%20f#g user@example.org C:\\path\\to",
    "👨‍👩‍👧‍👦 🇩🇪🇫🇷🇯🇵 ☕️ 🏳️‍🌈 👍🏽 🦜",
    "世界 こんにちは 안녕하세요 你好，世界！",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "e\u0301 é a\u0308\u0323 Z\u0351\u036b\u0343 ﬁ Å",
    "\x00\x01\x7f\u200b\ufeff\u00a0x \ufffd",
    "𝕳𝖊𝖑𝖑𝖔 \U0010ffff \U000e0041",
    "▁▁x ▁y Ġz",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b<|endoftext|> c <repo_name>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos> <unk> <pad> <mask> [multimodal]",
    "<table><tr> <td>x</td></tr></table> <unused7> <0x0A> <0xFF>",
    "<s> x</s>y <s>[INST] z [/INST]",
]

# What Python can hold but UTF-8 cannot, half surrogate pairs, is refused at the door.
unicode_texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


@cache
def byte_level_json() -> str:
    """A tokenizer.json of the GPT-2 kind."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens(["<think>", AddedToken("  wide  ", normalized=False), "«é»"])
    return str(backend.to_str())


@cache
def metaspace_json() -> str:
    """A tokenizer.json of the Llama 2 kind."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", *bytes_]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator([line for text in TEXTS for line in text.split()], trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    parsed: dict[str, Any] = json.loads(backend.to_str())
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["content"] not in bytes_]
    return json.dumps(parsed)


CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


@cache
def tiny(kind: str) -> Tokenizer:
    """A trained tokenizer: "byte-level" or "metaspace"."""
    text = byte_level_json() if kind == "byte-level" else metaspace_json()
    return Tokenizer.from_files({"tokenizer.json": text, "tokenizer_config.json": json.dumps(CONFIG)})


def pieces_of(stream: StreamDecoder, tokens: list[int], cuts: list[int]) -> list[str]:
    """What the stream says when the tokens come in cut at these places; the flush is last."""
    places = sorted({min(cut, len(tokens)) for cut in cuts} | {0, len(tokens)})
    pairs = zip(places, places[1:], strict=False)
    return [stream.push(tokens[start:end]) for start, end in pairs] + [stream.flush()]

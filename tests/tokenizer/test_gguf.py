"""Tokenizers built from GGUF metadata, against the tokenizer.json they were converted from."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from foretell.errors import ModelError, UnsupportedModelError
from foretell.tokenizer import Tokenizer
from foretell.tokenizer.fim import FimTokens
from foretell.tokenizer.gguf_vocab import KNOWN, fim_ids
from tests.tokenizer.examples import TEXTS, byte_level_json, metaspace_json, tiny, unicode_texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KEY = "tokenizer.ggml."


def vocabulary(text: str) -> tuple[list[str], list[int]]:
    """The tokens of a tokenizer.json in order, and their types as a converter gives them."""
    backend = Backend.from_str(text)
    tokens = [backend.id_to_token(i) or "" for i in range(backend.get_vocab_size())]
    added = backend.get_added_tokens_decoder()
    types = [(CONTROL if added[i].special else USER_DEFINED) if i in added else NORMAL for i in range(len(tokens))]
    return tokens, [BYTE if t.startswith("<0x") else types[i] for i, t in enumerate(tokens)]


def byte_level_metadata(**more: Any) -> dict[str, Any]:
    """The tiny byte-level tokenizer as llama.cpp's converter would write it."""
    tokens, types = vocabulary(byte_level_json())
    merges = [" ".join(pair) for pair in json.loads(byte_level_json())["model"]["merges"]]
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges}
    fields |= {"bos_token_id": 0, "eos_token_id": 1}
    return {KEY + name: value for name, value in (fields | more).items()}


def sentence_piece_metadata(**more: Any) -> dict[str, Any]:
    """The tiny metaspace tokenizer in the same way: no merges, but scores that fall with the rank."""
    tokens, types = vocabulary(metaspace_json())
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [-float(i) for i in range(len(tokens))],
    }
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {KEY + name: value for name, value in (fields | more).items()}


def test_byte_level_ids_are_those_of_the_original() -> None:
    built, original = Tokenizer.from_gguf(byte_level_metadata()), tiny("byte-level")
    for text in TEXTS:
        assert built.encode(text) == original.encode(text)
        assert built.decode(built.encode(text)) == original.decode(original.encode(text))
    assert (built.vocab_size, built.special_ids) == (original.vocab_size, original.special_ids)


@settings(deadline=None, max_examples=300)
@given(text=unicode_texts)
def test_sentence_piece_ids_are_those_of_the_original(text: str) -> None:
    built, original = Tokenizer.from_gguf(sentence_piece_metadata()), tiny("metaspace")
    assert built.encode(text) == original.encode(text)
    assert built.decode(built.encode(text)) == original.decode(original.encode(text))


@cache
def gemma4() -> tuple[Tokenizer, Any]:
    """A tokenizer of Gemma 4's kind from a GGUF file, and transformers' own."""
    model = json.loads(metaspace_json())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    stated = {"model": "gemma4", "merges": merges, "add_space_prefix": False, "add_bos_token": True}
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    theirs = GemmaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], **names)
    return Tokenizer.from_gguf(sentence_piece_metadata(**stated)), theirs


@settings(deadline=None, max_examples=300)
@given(text=unicode_texts)
def test_gemma4_states_its_merges(text: str) -> None:
    built, theirs = gemma4()
    ids = built.encode(text, add_special=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert built.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert built.encode(text) == [built.bos_id, *ids]


def test_a_gemma4_file_without_merges_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges"):
        Tokenizer.from_gguf(sentence_piece_metadata(model="gemma4"))


def test_fill_in_the_middle_tokens_are_read_by_role() -> None:
    newer = {"fim_pre": 5, "fim_suf": 6, "fim_mid": 7, "fim_pad": 8, "fim_rep": 9, "fim_sep": 10}
    older = {"prefix": 5, "suffix": 6, "middle": 7}

    def named(ids: dict[str, int], **more: int) -> dict[str, int]:
        return fim_ids({f"{KEY}{name}_token_id": token for name, token in (ids | more).items()}, 11)

    roles = {"prefix": 5, "suffix": 6, "middle": 7, "pad": 8, "repo": 9, "separator": 10}
    assert named(newer) == roles and named(older) == {role: roles[role] for role in older}
    assert named(newer, prefix=0, suffix=0, middle=0) == roles, "the newer name counts"
    assert named(older, fim_pre=11, fim_suf=-1) == named(older), "ids outside the vocabulary mean none"
    assert named({}) == {}
    ids = {f"{name}_token_id": token for name, token in newer.items()}
    assert Tokenizer.from_gguf(byte_level_metadata(**ids)).fim == FimTokens(**roles)
    assert Tokenizer.from_gguf(byte_level_metadata()).fim is None


def test_the_space_in_front_is_left_out_where_the_file_says_so() -> None:
    built = Tokenizer.from_gguf(sentence_piece_metadata(add_space_prefix=False))
    assert built.token_text(built.encode("once", add_special=False)[0])[0] == "o"
    assert built.decode(built.encode(" once")) == " once"


def test_runs_of_spaces_are_tokens_where_the_vocabulary_has_them() -> None:
    # As in Gemma's files: user-defined, written with plain spaces, with a score that says nothing.
    metadata = sentence_piece_metadata(add_space_prefix=False)
    metadata[KEY + "tokens"] = [token if token != "▁▁" else "unlike" for token in metadata[KEY + "tokens"]]
    first = len(metadata[KEY + "tokens"])
    metadata[KEY + "tokens"] += [" " * n for n in (2, 3, 4)]
    metadata[KEY + "token_type"] += [USER_DEFINED] * 3
    metadata[KEY + "scores"] += [-1000.0] * 3
    built = Tokenizer.from_gguf(metadata)
    for n in (2, 3, 4):
        tokens = built.encode("a" + " " * n + "b", add_special=False)
        assert tokens[1] == first + n - 2
        assert built.token_bytes(tokens[1]) == b" " * n


@pytest.mark.parametrize(("metadata", "usual"), [(byte_level_metadata, False), (sentence_piece_metadata, True)])
def test_bos_and_eos_are_added_as_the_file_says(metadata: Any, usual: bool) -> None:
    plain = Tokenizer.from_gguf(metadata()).encode("a b", add_special=False)
    bos, eos = metadata()[KEY + "bos_token_id"], metadata()[KEY + "eos_token_id"]
    assert Tokenizer.from_gguf(metadata()).encode("a b") == ([bos] if usual else []) + plain
    for add_bos, add_eos in ((True, True), (True, False), (False, True), (False, False)):
        built = Tokenizer.from_gguf(metadata(add_bos_token=add_bos, add_eos_token=add_eos))
        assert built.encode("a b") == [bos] * add_bos + plain + [eos] * add_eos


def test_a_colon_in_the_name_of_bos_means_nothing() -> None:
    metadata = byte_level_metadata(add_bos_token=True)
    metadata[KEY + "tokens"][0] = "<bos:1>"
    assert Tokenizer.from_gguf(metadata).encode("<bos:1>") == [0, 0]


def test_special_and_user_defined_tokens_are_whole_in_text() -> None:
    built = Tokenizer.from_gguf(byte_level_metadata())
    tokens = built.encode("x<|im_start|>y<think>z  wide  ")
    names = [built.token_text(token) for token in tokens]
    assert names == ["x", "<|im_start|>", "y", "<think>", "z", "  wide  "]
    assert built.decode(tokens) == "xy<think>z  wide  "


def test_unused_tokens_mean_nothing() -> None:
    metadata = byte_level_metadata()
    metadata[KEY + "tokens"] += ["[PAD1]"]
    metadata[KEY + "token_type"] += [UNUSED]
    built = Tokenizer.from_gguf(metadata)
    assert built.vocab_size == len(metadata[KEY + "tokens"])
    assert built.decode([built.vocab_size - 1]) == ""
    assert built.decode(built.encode("[PAD1]")) == "[PAD1]"


def test_what_ends_a_turn_in_the_template_ends_a_text() -> None:
    template = {"tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>"}
    built = Tokenizer.from_gguf(byte_level_metadata() | template)
    assert built.end_ids == {1, *built.encode("<|im_end|>")}
    assert Tokenizer.from_gguf(byte_level_metadata(eot_token_id=2, padding_token_id=2**32 - 1)).end_ids == {1, 2}


def words(pre: Any, text: str) -> list[str]:
    return [word for word, _ in pre.pre_tokenize_str(text)]


def test_words_are_cut_as_the_families_cut_them() -> None:
    gpt2 = GPT2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer.pre_tokenizer
    qwen2 = Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer.pre_tokenizer
    smollm = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    for text in TEXTS:
        assert words(KNOWN["gpt-2"].pre_tokenizer(), text) == words(gpt2, text)
        assert words(KNOWN["qwen2"].pre_tokenizer(), text) == words(qwen2, text)
        assert words(KNOWN["smollm"].pre_tokenizer(), text) == words(smollm, text)


def test_numbers_and_case_part_words_as_the_patterns_say() -> None:
    cut = {name: words(pre.pre_tokenizer(), "It'S fooBar 12345") for name, pre in KNOWN.items()}
    assert cut["llama-bpe"] == ["It", "'S", "ĠfooBar", "Ġ", "123", "45"]
    assert cut["qwen2"] == ["It", "'S", "ĠfooBar", "Ġ", "1", "2", "3", "4", "5"]
    assert cut["gpt-2"] == ["It", "'", "S", "ĠfooBar", "Ġ12345"]
    assert cut["smollm"] == ["It", "'", "S", "ĠfooBar", "Ġ", "1", "2", "3", "4", "5"]
    assert cut["gpt-4o"] == ["It'S", "Ġfoo", "Bar", "Ġ", "123", "45"]
    assert cut["tekken"] == ["It", "'S", "Ġfoo", "Bar", "Ġ", "1", "2", "3", "4", "5"]
    assert cut["deepseek-v3"] == ["It", "'S", "ĠfooBar", "Ġ", "123", "45"]
    assert len(words(KNOWN["deepseek-v3"].pre_tokenizer(), "x世界 yかな")) == 4


def test_families_that_compose_text_do() -> None:
    assert isinstance(KNOWN["qwen2"].normalizer(), normalizers.NFC)
    assert KNOWN["smollm"].normalizer() is None


def test_llama_3_takes_whole_words_whatever_the_merges_say() -> None:
    metadata = byte_level_metadata(pre="llama-bpe")
    metadata[KEY + "tokens"] += ["Ġqqq"]
    metadata[KEY + "token_type"] += [NORMAL]
    built = Tokenizer.from_gguf(metadata)
    assert built.encode(" qqq", add_special=False) == [built.vocab_size - 1]
    assert built.encode("a")[0] == built.bos_id


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", "plamo2", "no_vocab"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=kind):
        Tokenizer.from_gguf({KEY + "model": kind})


def test_an_unknown_way_to_split_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'qwen3'.*did you mean 'qwen"):
        Tokenizer.from_gguf(byte_level_metadata(pre="qwen3"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"merges": ["q zzzz"]}, "merges 'q zzzz'"),
        ({"token_type": [1, 2]}, "tokens without a type"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token twice"),
    ],
)
def test_broken_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(byte_level_metadata(**change))


def test_every_token_of_sentence_piece_has_a_score() -> None:
    with pytest.raises(ModelError, match=r"lacks tokenizer.ggml.scores or part of it"):
        Tokenizer.from_gguf(sentence_piece_metadata(scores=[0.0]))

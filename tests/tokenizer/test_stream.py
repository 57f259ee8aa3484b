"""The law of the stream: however tokens are cut, the pieces together are the decoding of them all."""

from __future__ import annotations

import json
import time
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from foretell.tokenizer import StreamDecoder, Tokenizer
from tests.tokenizer.examples import TEXTS, pieces_of, tiny

OTHERS = {
    "metaspace-decoder": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(prefix="b"),
    "suffix": decoders.BPEDecoder(suffix="c"),
    "bytes-first": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "stripped-twice": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "replaced": decoders.Sequence([decoders.Replace("a", ""), decoders.Replace("▁", "  ")]),
    "none": None,
}


@cache
def other(kind: str) -> Tokenizer:
    """A tokenizer with a decoder of another kind over a small vocabulary."""
    pieces = ["▁", "a", "▁b", "bc", "▁a▁c", "c", "<s>", " ", "  ▁", "é", "<0x41>"]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.add_special_tokens(["<s>"])
    if OTHERS[kind] is not None:
        backend.decoder = OTHERS[kind]
    return Tokenizer.from_files({"tokenizer.json": backend.to_str()})


def check_law(tokenizer: Tokenizer, tokens: list[int], cuts: list[int], skip: bool) -> None:
    pieces = pieces_of(StreamDecoder(tokenizer, skip_special=skip), tokens, cuts)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special=skip)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@settings(deadline=None, max_examples=500)
@given(data=st.data(), cuts=st.lists(st.integers(0, 30)), skip=st.booleans())
def test_pieces_join_to_the_decoding_of_all(kind: str, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokenizer = tiny(kind)
    # Three past the end: ids that a padded model has and the tokenizer does not.
    anything = st.integers(0, tokenizer.vocab_size + 2)
    single_bytes = st.integers(0, 270)
    check_law(tokenizer, data.draw(st.lists(anything | single_bytes, max_size=30)), cuts, skip)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 24)))
@example(data=b"\xf0\x9f\xa6\x9c\xed\xa0\x80\xf4\x90\x80\x80\xc0\xaf", cuts=list(range(24)))
@example(data=b"A\xe2\x96", cuts=[1, 2])
def test_any_bytes_come_out_as_decode_has_them(kind: str, data: bytes, cuts: list[int]) -> None:
    tokenizer = tiny(kind)
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    # SentencePiece's own byte tokens come first; letters of the vocabulary must not stand in for them.
    by_byte |= {bytes([i]): 3 + i for i in range(256)} if kind == "metaspace" else {}
    check_law(tokenizer, [by_byte[bytes([byte])] for byte in data], cuts, True)


@pytest.mark.parametrize("kind", OTHERS)
@settings(deadline=None, max_examples=100)
@given(tokens=st.lists(st.integers(0, 11), max_size=12), cuts=st.lists(st.integers(0, 12)), skip=st.booleans())
def test_other_decoders_keep_the_law(kind: str, tokens: list[int], cuts: list[int], skip: bool) -> None:
    check_law(other(kind), tokens, cuts, skip)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_no_piece_ends_in_half_a_character(kind: str) -> None:
    tokenizer = tiny(kind)
    for text in TEXTS:
        if "\ufffd" not in text:
            stream = StreamDecoder(tokenizer)
            assert not any("\ufffd" in stream.push([token]) for token in tokenizer.encode(text))


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = tiny("byte-level")
    stream = StreamDecoder(tokenizer)
    assert [stream.push([token]) for token in tokenizer.encode("\U0010ffff")] == ["", "", "", "\U0010ffff"]
    half = tokenizer.encode("\U0010ffff")[:2]
    assert stream.push(half) == ""
    assert stream.push(tokenizer.encode("a")) == "\ufffda"
    assert stream.push(half) + stream.flush() == "\ufffd"


def test_a_run_of_bytes_is_certain_when_it_ends_or_breaks() -> None:
    stream = StreamDecoder(tiny("metaspace"))
    byte = {value: 3 + value for value in range(256)}
    assert [stream.push([byte[0x41]]), stream.push([byte[0x42]])] == ["", ""]
    assert stream.push(tiny("metaspace").encode("c", add_special=False)).startswith("AB")
    assert [stream.push([byte[0x41]]), stream.push([byte[0xFF]])] == ["", "\ufffd\ufffd"]
    assert stream.push([byte[0x41]]) == "\ufffd"


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@settings(deadline=None, max_examples=200)
@given(before=st.sampled_from(TEXTS), after=st.sampled_from(TEXTS))
def test_context_is_not_repeated_and_not_forgotten(kind: str, before: str, after: str) -> None:
    tokenizer = tiny(kind)
    context, tokens = tokenizer.encode(before), tokenizer.encode(after, add_special=False)
    stream = StreamDecoder(tokenizer, context=context)
    text = "".join(pieces_of(stream, tokens, [1, 2]))
    assert tokenizer.decode(context) + text == tokenizer.decode(context + tokens)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_a_character_begun_in_the_context_is_finished(kind: str) -> None:
    tokenizer = tiny(kind)
    *begun, last = tokenizer.encode("x\U0010ffff")
    stream = StreamDecoder(tokenizer, context=begun)
    assert stream.push([last]) + stream.flush() == "\U0010ffff"


def test_a_broken_run_in_the_context_stays_broken() -> None:
    tokenizer = tiny("metaspace")
    stream = StreamDecoder(tokenizer, context=[3 + 0xE2, 3 + 0xFF])
    assert stream.push([3 + 0x41]) == "\ufffd"


def test_only_the_start_of_a_text_loses_its_space() -> None:
    tokenizer = tiny("metaspace")
    tokens = tokenizer.encode("once", add_special=False)
    assert StreamDecoder(tokenizer).push(tokens) == "once"
    assert StreamDecoder(tokenizer, context=[3 + 0x41]).push(tokens) == " once"
    assert StreamDecoder(tokenizer, context=[tokenizer.bos_id or 0]).push(tokens) == "once"


def token_for(tokenizer: Tokenizer, text: bytes) -> int:
    """The first token that stands for these bytes."""
    return next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == text)


@pytest.mark.parametrize("text", [b"a", b"A", b"\xff", b"\xe2", b"<s>"])
@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_a_push_costs_the_same_however_much_came_before(kind: str, text: bytes) -> None:
    tokenizer = tiny(kind)
    tokens = [token_for(tokenizer, text)] * 50
    stream = StreamDecoder(tokenizer)
    spent = [timed(stream, tokens) for _ in range(400)]
    assert min(spent[-40:]) < 20 * min(spent[:40])


def timed(stream: StreamDecoder, tokens: list[int]) -> float:
    """Seconds to push the tokens one by one."""
    start = time.perf_counter()
    for token in tokens:
        stream.push([token])
    return time.perf_counter() - start


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_a_push_takes_microseconds(kind: str) -> None:
    tokenizer = tiny(kind)
    tokens = tokenizer.encode(" ".join(TEXTS))
    best = min(timed(StreamDecoder(tokenizer), tokens) for _ in range(5)) / len(tokens)
    assert best < 15e-6, json.dumps({"seconds_a_push": best})

"""What is written under a grammar's masks is of the grammar, and looking ahead changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from foretell.sampling.grammar_matcher import GrammarError, GrammarMatcher
from foretell.structured_output import GrammarSpec
from foretell.types import Draft
from tests.sampling.grammars import (
    CHOICES,
    EXAMPLES,
    allowed,
    compiler,
    follow,
    matcher,
    path_to,
    pick,
    random_tree,
    text_of,
    tokenizer,
    write,
)

KINDS = ["byte-level", "metaspace"]
everywhere = pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in EXAMPLES])


def starts(kind: str, name: str, count: int, rng: random.Random) -> list[list[int]]:
    """Return unfinished prefixes of random outputs."""
    outputs = [write(tokenizer(kind), matcher(kind, name), rng, longest=60) for _ in range(count)]
    return [text[: rng.randrange(len(text))] for text in outputs]


def advanced(make: Callable[[], GrammarMatcher], start: list[int]) -> GrammarMatcher:
    follower = make()
    follower.advance(start)
    return follower


@everywhere
def test_output_under_the_masks_matches_the_grammar(kind: str, name: str) -> None:
    rng = random.Random(name)
    for _ in range(20):
        follower = matcher(kind, name)
        tokens = write(tokenizer(kind), follower, rng)
        assert follower.finished
        assert EXAMPLES[name].is_valid(text_of(tokenizer(kind), tokens))


@everywhere
def test_the_mask_of_a_node_is_that_of_a_fresh_matcher_on_its_path(kind: str, name: str) -> None:
    rng, make = random.Random(name), partial(matcher, kind, name)
    for start in starts(kind, name, 12, rng):
        draft = random_tree(tokenizer(kind), make, start, rng)
        masks = advanced(make, start).masks(draft)
        for node in range(-1, len(draft)):
            twin = follow(make, start, path_to(list(draft.tokens), list(draft.parents), node))
            expected = torch.ones_like(masks[0]) if twin is None or twin.finished else twin.masks()[0]
            assert torch.equal(masks[node + 1], expected)


@everywhere
def test_looking_ahead_changes_nothing(kind: str, name: str) -> None:
    rng, make = random.Random(name), partial(matcher, kind, name)
    looking, plain = make(), make()
    tokens: list[int] = []
    while not plain.finished and len(tokens) < 40:
        draft = random_tree(tokenizer(kind), make, tokens, rng)
        looking.masks(draft)
        looking.forced_tokens(rng.randrange(1, 9))
        looking.count_allowed(draft.tokens)
        assert torch.equal(looking.masks(), plain.masks())
        tokens.append(pick(tokenizer(kind), plain.masks()[0], rng))
        looking.advance(tokens[-1:])
        plain.advance(tokens[-1:])
    assert looking.finished == plain.finished


@everywhere
def test_forced_tokens_are_the_only_ones_allowed(kind: str, name: str) -> None:
    rng, make = random.Random(name), partial(matcher, kind, name)
    for start in starts(kind, name, 12, rng):
        follower = advanced(make, start)
        forced = follower.forced_tokens(9)
        assert forced[:2] == follower.forced_tokens(2)
        for token in forced:
            assert allowed(follower) == [token]
            follower.advance([token])


@everywhere
def test_a_chain_is_allowed_as_far_as_the_masks_say(kind: str, name: str) -> None:
    rng, make = random.Random(name), partial(matcher, kind, name)
    for start in starts(kind, name, 12, rng):
        tokens = write(tokenizer(kind), advanced(make, start), rng, longest=rng.randrange(8))
        tokens += rng.choices(range(tokenizer(kind).vocab_size), k=2)
        follower = advanced(make, start)
        legal = [follow(make, start, tokens[:count]) is not None for count in range(len(tokens) + 1)]
        assert follower.count_allowed(tokens) == sum(legal) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_most_of_a_one_line_object_is_forced(kind: str) -> None:
    follower = matcher(kind, "one-line person")
    assert text_of(tokenizer(kind), follower.forced_tokens(99)).startswith('{"name"')


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if "s>" not in choice])
def test_a_choice_can_be_written_as_the_model_would_write_it(choice: str) -> None:
    tokens = tokenizer("byte-level").encode(choice, add_special=False)
    ends = tokenizer("byte-level").end_ids
    assert matcher("byte-level", "choice").count_allowed([*tokens, *ends]) == len(tokens) + 1


def test_forced_text_has_one_spelling() -> None:
    reader = tokenizer("byte-level")
    follower = compiler("byte-level").compile(GrammarSpec.choice(["name"])).matcher([2])
    letters = [token for token in range(reader.vocab_size) if reader.token_bytes(token) in (b"n", b"na", b"nam")]
    assert follower.forced_tokens(9) == [*reader.encode("name", add_special=False), 2]
    assert follower.count_allowed(letters) == 0 and not follower.masks()[0, letters].any()


def test_of_tokens_with_the_same_bytes_only_the_usual_one_is_allowed() -> None:
    reader = tokenizer("metaspace")
    fallback, usual = (token for token in range(reader.vocab_size) if reader.token_bytes(token) == b"e")
    follower = compiler("metaspace").compile(GrammarSpec.regex("e+x")).matcher([2])
    assert usual in allowed(follower) and fallback not in allowed(follower)
    assert follower.count_allowed([usual]) == 1 and follower.count_allowed([fallback]) == 0


def test_text_after_a_sentencepiece_prompt_gets_no_leading_space() -> None:
    reader = tokenizer("metaspace")
    forced = compiler("metaspace").compile(GrammarSpec.choice(["ounceal"])).matcher(reader.end_ids).forced_tokens(99)
    assert [*reader.encode("\x03", add_special=False), *forced[:-1]] == reader.encode("\x03ounceal", add_special=False)
    assert [reader.token_bytes(token) for token in forced[:-1]] == [b"o", b"un", b"ce", b"al"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_special_token_is_written_as_text(kind: str) -> None:
    reader = tokenizer(kind)
    tokens = write(reader, compiler(kind).compile(GrammarSpec.choice(["</s>"])).matcher({2}), random.Random(0))
    assert text_of(reader, tokens[:-1]) == "</s>"
    assert not reader.special_ids & set(tokens[:-1])


@everywhere
def test_ids_beyond_the_tokenizers_are_never_allowed(kind: str, name: str) -> None:
    follower, size = matcher(kind, name), tokenizer(kind).vocab_size
    for token in write(tokenizer(kind), matcher(kind, name), random.Random(name), longest=30):
        assert not follower.masks()[:, size:].any()
        follower.advance([token])


def test_every_end_token_is_allowed_exactly_where_the_text_may_stop() -> None:
    ends, x = [1, 2, 400], tokenizer("byte-level").encode("x", add_special=False)
    follower = compiler("byte-level").compile(GrammarSpec.regex("xx?")).matcher(ends)
    assert not follower.masks()[0, ends].any()
    follower.advance(x)
    assert follower.masks()[0, ends].all() and follower.masks()[0, x].all()
    follower.advance(x)
    assert allowed(follower) == ends
    assert follower.advance([2, 5, 6]) == 1 and follower.finished
    assert follower.forced_tokens(3) == [] and follower.count_allowed([2]) == 0


def test_text_that_is_an_end_token_waits_until_the_text_may_stop() -> None:
    (x,) = tokenizer("byte-level").encode("x", add_special=False)
    follower = compiler("byte-level").compile(GrammarSpec.regex("y?x+")).matcher([x])
    masks = follower.masks(Draft.chain([x, x]))
    assert not masks[0, x] and masks[1:].all()
    assert follower.count_allowed([x]) == 0


def test_without_end_tokens_the_text_ends_with_the_grammar() -> None:
    x = tokenizer("byte-level").encode("x", add_special=False)
    grammar = compiler("byte-level").compile(GrammarSpec.regex("xx"))
    follower = grammar.matcher(())
    assert follower.masks(Draft.chain(x * 3))[2:].all()
    assert follower.advance(x * 3) == 2 and follower.finished


def test_a_lone_end_token_is_forced_too() -> None:
    grammar = compiler("byte-level").compile(GrammarSpec.regex("xyz"))
    tokens = tokenizer("byte-level").encode("xyz", add_special=False)
    assert grammar.matcher([2]).forced_tokens(9) == [*tokens, 2]
    assert grammar.matcher([2]).forced_tokens(len(tokens)) == tokens
    assert grammar.matcher([1, 2]).forced_tokens(9) == tokens


def test_a_token_that_is_not_allowed_is_an_error_that_stays() -> None:
    follower = matcher("byte-level", "regex")
    with pytest.raises(GrammarError, match="^the grammar cannot continue: .*$"):
        follower.advance(tokenizer("byte-level").encode("no", add_special=False))
    with pytest.raises(GrammarError):
        follower.masks()


def test_an_end_token_before_the_end_is_an_error() -> None:
    with pytest.raises(GrammarError, match="may not end here"):
        matcher("byte-level", "regex").advance([*tokenizer("byte-level").end_ids])


def test_a_stop_token_that_the_text_cannot_do_without_is_an_error() -> None:
    (x,) = tokenizer("byte-level").encode("x", add_special=False)
    with pytest.raises(GrammarError, match="stop tokens"):
        compiler("byte-level").compile(GrammarSpec.regex("xx")).matcher([x]).masks()

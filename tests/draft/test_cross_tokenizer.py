"""Drafts by a model with another tokenizer: what it reads, what it guesses, and that the text stays the target's."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretell.build.draft_compat import look_up
from foretell.build.model_source import no_progress
from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.cross_tokenizer.alignment import MAX_SEGMENT, AlignedText, TextEncoder
from foretell.draft.cross_tokenizer.drafter import CrossTokenizerDrafter
from foretell.draft.cross_tokenizer.vocab_map import VocabMap, VocabSide
from foretell.draft.mix import MixDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.hub import open_checkpoint, resolve
from foretell.models.load import load_model
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.tokenizer import Tokenizer
from foretell.types import Budget, Draft, Request, ScheduledSequence, Sequence
from tests.draft.tiny_tokenizers import (
    LETTERS,
    draft_tokens,
    spelled,
    string_translator,
    target_tokens,
    tiny_vocabularies,
    token_translator,
)
from tests.tiny import CONTEXT, PROMPTS, VOCAB, World, add, run, tiny_decoder
from tests.tokenizer.examples import tiny

TRANSLATORS: dict[str, Callable[..., CrossTokenizerDrafter]] = {
    "tokens": token_translator,
    "strings": string_translator,
}
by_each_way = pytest.mark.parametrize("make", TRANSLATORS.values(), ids=TRANSLATORS)  # where text is sampled


def pair(target: Tokenizer, draft: Tokenizer) -> VocabMap:
    return VocabMap.of(VocabSide(target, target.vocab_size), VocabSide(draft, draft.vocab_size))


def retelling(vocabularies: VocabMap) -> AlignedText:
    return AlignedText(vocabularies, TextEncoder(vocabularies.draft), TextEncoder(vocabularies.target).adds_space)


def retold(vocabularies: VocabMap, tokens: list[int]) -> list[int]:
    fresh = retelling(vocabularies)
    fresh.append(tokens)
    return fresh.tokens_from(0)


def sequence(tokens: list[int], number: int = 0, temperature: float = 0.8) -> Sequence:
    params = SamplingParams(temperature=temperature)
    return Sequence(number, Request("r", tuple(tokens), params, 3, 99), list(tokens))


def guess(drafter: Drafter, tokens: list[int], nodes: int = 5, temperature: float = 0.8) -> Draft:
    return drafter.propose([sequence(tokens, temperature=temperature)], [Budget(nodes)])[0]


KINDS = [("byte-level", "metaspace"), ("metaspace", "byte-level")]
TEXTS = st.text(alphabet=st.sampled_from("aeiou  nrst.,'\"\n0129éß世👍🏽"), max_size=700)


@settings(max_examples=60, deadline=None)
@example(KINDS[1], "  two spaces", [])
@example(KINDS[0], "nospaces" * 80, [50, 350, 380, 500])
@given(st.sampled_from(KINDS), TEXTS, st.lists(st.integers(0, 400), max_size=6))
def test_a_text_that_grew_is_told_as_a_whole_one(kinds: tuple[str, str], text: str, cuts: list[int]) -> None:
    vocabularies = pair(tiny(kinds[0]), tiny(kinds[1]))
    tokens, kept = vocabularies.target.tokenizer.encode(text), retelling(vocabularies)
    for cut in sorted(cuts):
        kept.append(tokens[: max(cut, kept.num_read)])
    kept.append(tokens)
    fresh = retelling(vocabularies)
    fresh.append(tokens)
    assert (kept.stable_tokens, kept.tail, kept.tokens_from(0)) == (
        fresh.stable_tokens,
        fresh.tail,
        fresh.tokens_from(0),
    )
    assert vocabularies.draft.tokenizer.decode(kept.tokens_from(0)) == text, "no space is lost or added on the way"


@pytest.mark.parametrize(("target", "draft"), KINDS)
def test_the_draft_begins_in_its_own_way_and_once(target: str, draft: str) -> None:
    vocabularies = pair(tiny(target), tiny(draft))
    told = retold(vocabularies, vocabularies.target.tokenizer.encode("It was late, and nobody answered. " * 12))
    assert [place for place, token in enumerate(told) if token == 1] == ([0] if draft == "metaspace" else []), "<s>"


@pytest.mark.parametrize("text", ["words and more words " * 60, "nospaces" * 160])
def test_growing_costs_a_window_and_not_the_text(text: str) -> None:
    seen: list[int] = []

    class Counting(TextEncoder):
        def _encode(self, text: str) -> list[int]:
            seen.append(len(text))
            return super()._encode(text)

    vocabularies = pair(tiny("byte-level"), tiny("metaspace"))
    told, tokens = retelling(vocabularies), vocabularies.target.tokenizer.encode(text)
    told.encoder = Counting(vocabularies.draft)
    for end in range(len(tokens) - 200, len(tokens)):
        told.append(tokens[:end])
        told.tokens_from(len(told.stable_tokens))
        if end > len(tokens) - 200:
            assert sum(seen) <= 3 * MAX_SEGMENT
        seen.clear()


def test_special_tokens_go_by_their_part_and_never_by_their_name() -> None:
    vocabularies, spell = tiny_vocabularies(), TextEncoder(tiny_vocabularies().draft).encode_inside
    assert vocabularies.special == {0: 1}, "</s> is the target's end and <end> the draft's, which has a </s> too"
    assert (vocabularies.to_target[1], vocabularies.to_target.get(2)) == (0, None)
    tokens = [*target_tokens().encode("ab"), 0, *target_tokens().encode("cd")]
    assert retold(vocabularies, tokens) == [0, *spell("ab"), 1, *spell("cd")]


def test_the_end_of_a_turn_is_not_the_end_of_all() -> None:
    draft = spelled(["<eot>", *LETTERS], {"eos_token": "<eot>", "chat_template": "{{ m }}<eot>"}, 1)
    target = spelled(["<eos>", "<turn>", *LETTERS], {"eos_token": "<eos>", "chat_template": "{{ m }}<turn>"}, 2)
    assert pair(target, draft).to_target[0] == 0, "what there is"
    target.end_ids = frozenset({0, 1})
    assert pair(target, draft).to_target[0] == 1
    assert pair(target, draft).special == {0: 0, 1: 0}


def test_a_name_that_stands_in_the_text_is_text() -> None:
    vocabularies = pair(tiny("byte-level"), tiny("metaspace"))
    letters = [token for letter in "never </s> stop" for token in vocabularies.target.tokenizer.encode(letter)]
    told = retold(vocabularies, letters)
    assert not set(told[1:]) & vocabularies.draft.special
    assert vocabularies.draft.tokenizer.decode(told) == "never </s> stop"


def test_a_mark_of_chats_is_the_same_mark_where_both_have_it_and_text_where_not() -> None:
    opens = tiny("byte-level").encode("<|im_start|>")
    assert retold(pair(tiny("byte-level"), tiny("byte-level")), opens) == opens
    told = retold(pair(tiny("byte-level"), tiny("metaspace")), opens)
    assert tiny("metaspace").decode(told) == "<|im_start|>"


def test_tokens_that_a_model_does_not_have_are_never_used() -> None:
    small = VocabMap.of(VocabSide(target_tokens(), 20), VocabSide(draft_tokens(), 10))
    assert small.to_target
    assert all(theirs < 10 and ours < 20 for theirs, ours in small.to_target.items())
    assert max(retold(small, target_tokens().encode("abcdefghijklmno no kl"))) < 10
    assert max(TextEncoder(small.target).encode_inside("abcdefghijklmno no kl")) < 20


def test_of_two_tokens_that_say_the_same_the_text_goes_before_the_byte() -> None:
    vocabularies = pair(tiny("metaspace"), tiny("byte-level"))
    found = [vocabularies.to_target[tiny("byte-level").encode(letter)[0]] for letter in "a\n"]
    assert [tiny("metaspace").piece(token) for token in found] == ["a", "<0x0A>"]


@by_each_way
def test_nothing_is_guessed_within_a_character(make: Callable[..., CrossTokenizerDrafter]) -> None:
    tokens = target_tokens().encode("ab é")
    assert len(guess(make(), tokens)) > 0
    assert len(guess(make(), tokens[:-1])) == 0


@by_each_way
def test_nothing_is_guessed_where_the_draft_has_no_room_for_the_text(
    make: Callable[..., CrossTokenizerDrafter],
) -> None:
    tokens = target_tokens().encode("abcd" * 120)
    assert len(tokens) < CONTEXT < len(draft_tokens().encode("abcd" * 120))
    assert len(guess(make(), tokens)) == 0
    assert len(guess(make(), tokens[:40])) > 0
    assert len(guess(make(pages=4), tokens[:40])) == 0, "nor where pages run out"


@by_each_way
def test_the_whole_batch_is_asked_at_once(make: Callable[..., CrossTokenizerDrafter]) -> None:
    drafter, asked = make(), []
    forward = drafter.runner.forward

    def counted(shares: list[ScheduledSequence], drafts: list[Draft]) -> object:
        asked.append(len(shares))
        return forward(shares, drafts)

    drafter.runner.forward = counted  # type: ignore[method-assign, assignment]
    seqs = [sequence([3, 4, 5], 0), sequence([6, 7], 1), sequence([8], 2)]
    drafts = drafter.propose(seqs, [Budget(4), Budget(1), Budget(0)])
    assert (len(drafts[0]), len(drafts[1]), len(drafts[2])) == (4, 1, 0)
    assert asked[0] == 2
    assert len(asked) <= 6


def test_guesses_are_drawn_from_what_both_have_by_the_chances_they_come_with() -> None:
    vocabularies, drafter = tiny_vocabularies(), token_translator()
    draft = guess(drafter, target_tokens().encode("ab cd"))
    common = sorted(vocabularies.to_draft)
    assert draft.probs is not None
    assert draft.sampled == (True,) * 5
    assert draft.probs[:, common].sum(-1).tolist() == pytest.approx([1.0] * 5)
    known = scores(drafter, draft_tokens().encode("ab cd"))[[vocabularies.to_draft[token] for token in common]]
    assert torch.allclose(draft.probs[0, common], (known / 0.8).softmax(-1), atol=1e-5)
    said = [vocabularies.to_draft[token] for token in draft.tokens]
    assert drafter._draft_seqs[0].seq.tokens == draft_tokens().encode("ab cd") + said, "it goes on from its own tokens"


def scores(drafter: CrossTokenizerDrafter, tokens: list[int]) -> Tensor:
    """What the draft model says after these tokens of its own."""
    runner, seq = ModelRunner(drafter.runner.model, 64, 4, CONTEXT), sequence(tokens)
    runner.reserve(seq, len(tokens))
    return runner.forward([ScheduledSequence.of(seq, len(tokens))], [Draft()]).logits[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_under_other_numbers_guesses_all(temperature: float) -> None:
    """The same weights with the rows of the vocabulary in another order: only a wrong map could miss."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDE"
    shuffled = "".join(random.Random(1).sample(letters, len(letters)))
    plain, moved = (spelled(["</s>", *each], {"eos_token": "</s>"}, 1) for each in (letters, shuffled))
    model = tiny_decoder()
    model.embed.data = model.embed.data[[0, *(1 + letters.index(letter) for letter in shuffled)]].clone()
    drafter = CrossTokenizerDrafter(ModelRunner(model, 256, 4, CONTEXT), pair(plain, moved))
    engine = World(budget=4).engine(drafter)
    wanted = {"max_tokens": 26, "temperature": temperature}
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt, **wanted)]  # type: ignore[arg-type]
    run(engine)
    steps = {track.speculation.steps for track in tracks if track.seq.finish_reason == "length"}
    assert steps == {1 + 25 // 5}, "the prompt gives a token, every step after it five"


class Saying(CrossTokenizerDrafter):
    """Its draft says what it is told to."""

    def __init__(self, *pieces: str, chance: float = 0.9) -> None:
        super().__init__(string_translator().runner, tiny_vocabularies(), min_confidence=0.5)
        numbers = {draft_tokens().piece(token): token for token in range(VOCAB)}
        self.script, self.chance = iter([numbers[piece] for piece in pieces]), chance

    def _forward(self, seqs: list[Sequence]) -> Tensor:
        rest = torch.full((1, VOCAB), (1 - self.chance) / (VOCAB - 1))
        rest[0, next(self.script)] = self.chance
        return rest.log()


SAYINGS: dict[str, tuple[list[str], int, list[str]]] = {
    "cut as the target does": (["ab", "c", "d", "ef"], 3, ["ab", "cd", "ef"]),
    "a space of its own": (["Ġno", "Ġno", "a"], 4, ["Ġ", "no", "Ġ", "no"]),
    "the last may grow": (["bc", "d", "ef"], 2, ["b", "cd"]),
    "the end is certain": (["bc", "<end>"], 5, ["b", "c", "</s>"]),
    "a mark nobody knows ends it": (["bc", "</s>"], 5, ["b", "c"]),
    "a mark within a character": (["ab", "Ã", "<end>"], 5, ["ab"]),
    "a whole character": (["ab", "Ã", "©", "a"], 3, ["ab", "Ã", "©"]),
}


@pytest.mark.parametrize(("said", "nodes", "heard"), SAYINGS.values(), ids=SAYINGS)
def test_what_the_draft_writes_is_encoded_anew(said: list[str], nodes: int, heard: list[str]) -> None:
    draft = guess(Saying(*said), target_tokens().encode("no"), nodes, temperature=0.0)
    assert [target_tokens().piece(token) for token in draft.tokens] == heard
    assert (draft.sampled, draft.probs) == (None, None)


def test_a_guess_is_as_sure_as_what_was_said_for_it() -> None:
    plain = guess(Saying("ab", "no", "ef"), target_tokens().encode("ij"), 3, temperature=0.0)
    assert plain.confidence == pytest.approx((0.9, 0.9, 0.9))
    joined = guess(Saying("ab", "c", "d", "ef"), target_tokens().encode("ij"), 3, temperature=0.0)
    assert joined.confidence is not None
    assert math.prod(joined.confidence) == pytest.approx(0.9**4)


def test_a_draft_that_doubts_stops() -> None:
    doubting = guess(Saying(*"hjgihjgih", chance=0.6), target_tokens().encode("no"), 5, temperature=0.0)
    sure = guess(Saying(*"hjgihjgih", chance=0.97), target_tokens().encode("no"), 5, temperature=0.0)
    assert 0 < len(doubting) < len(sure)


def test_greedy_and_sampled_text_share_a_batch() -> None:
    seqs = [sequence([3, 4, 5], 0, 0.0), sequence([6, 7], 1, 0.9), sequence([8], 2, 0.0)]
    together = token_translator().propose(seqs, [Budget(4)] * 3)
    alone = [token_translator().propose([seq], [Budget(4)])[0] for seq in seqs]
    assert [draft.tokens for draft in together] == [draft.tokens for draft in alone]
    assert [draft.probs is None for draft in together] == [True, False, True]


def test_the_way_is_chosen_by_how_alike_texts_are_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    letters = spelled(["</s>", *LETTERS, *"pqrstuvwxyz.,"], {"eos_token": "</s>"}, 1)
    runner = token_translator().runner
    with caplog.at_level(logging.INFO, "foretell"):
        alike = CrossTokenizerDrafter(runner, pair(tiny("byte-level"), tiny("byte-level")))
        unlike = CrossTokenizerDrafter(runner, pair(tiny("byte-level"), letters))
    assert (alike.traits.samples, unlike.traits.samples) == (True, False)
    assert "100% of sample text is split alike, so drafts are sampled" in caplog.messages[-2]
    assert "so drafts are generated as text and encoded again" in caplog.messages[-1]


PROSE = [
    "The old lighthouse keeper walked slowly down the stairs, and",
    "Most people in Europe lived in small villages",
]


def real_runner(name: str) -> ModelRunner:
    return ModelRunner(load_model(open_checkpoint(resolve(name, no_progress))), 32, 16, 256)


@pytest.mark.weights
@pytest.mark.slow
def test_real_models_with_other_tokenizers_write_the_same_text_in_fewer_steps() -> None:
    target, helper = (look_up(name, no_progress) for name in ("gemma3-270m", "smollm2-135m"))
    vocabularies = VocabMap.of(
        VocabSide(target.tokenizer, target.config.vocab), VocabSide(helper.tokenizer, helper.config.vocab)
    )
    runner, drafts = real_runner("gemma3-270m"), real_runner("smollm2-135m")

    def write(drafter: Drafter, temperature: float) -> tuple[list[list[int]], float]:
        engine = Engine(runner, drafter, FixedController(4), Scheduler(runner, None, 4, 256), target.tokenizer)
        maker = RequestBuilder(RequestLimits(256, frozenset(), target.config.vocab), target.tokenizer, engine.drafter)
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=7)
        wanted = [maker.make(str(i), target.tokenizer.encode(text), params)[0] for i, text in enumerate(PROSE)]
        tracks = [engine.add(request) for request in wanted]
        run(engine)
        return [track.seq.tokens for track in tracks], engine.stats.speculation.accepted_per_step

    for temperature in (0.0, 1.0):
        plain, _ = write(MixDrafter([]), temperature)
        text, yielded = write(CrossTokenizerDrafter(drafts, vocabularies), temperature)
        assert text == plain
        assert yielded > 1.3

"""Trees under a grammar: masks follow each branch, so that the text is what plain decoding writes, and valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.draft.base import Drafter
from foretell.draft.lookahead import LookaheadDrafter
from foretell.draft.mix import MergedDrafter, MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.draft_guard import GRAMMAR
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.sequence_state import SequenceState
from foretell.engine.stats import SpeculationStats
from foretell.models.draft_heads import HeadConfig
from foretell.sampling_params import SamplingParams
from foretell.structured_output import GrammarSpec
from foretell.types import Budget, Draft, Sequence, SpeculationChoice
from tests.laws.test_losslessness import preempt_youngest
from tests.sampling.grammars import EXAMPLES, PADDING, PERSON, compiler, text_of, tokenizer
from tests.tiny import CONFIG, CONTEXT, HEADS, OwnHead, World, run

KIND = "byte-level"
READER = tokenizer(KIND)
TOKENS = READER.vocab_size + PADDING
SPEC = GrammarSpec.json_schema(PERSON)
HERE = World(budget=14, levels=3, config=replace(CONFIG, vocab=TOKENS))
(QUOTE,) = READER.encode('"', add_special=False)
PROMPTS = [READER.encode(text) for text in ("Ada", "a red one", "name it: ", "{")]
SAMPLING = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "presence_penalty": 0.5}}


def over_all(name: str) -> HeadConfig:
    """A head for the grammar's tokens, all of which it can guess."""
    return replace(HEADS[name], vocab=TOKENS, draft_vocab=None)


def write(drafter: Drafter | None, world: World = HERE, rule: str = "match", **params: object) -> list[SequenceState]:
    """All prompts in one batch, each a JSON object of the schema."""
    engine: Engine = world.engine(drafter)
    engine.tokenizer = READER
    maker = RequestBuilder(RequestLimits(CONTEXT, READER.end_ids, TOKENS), READER, engine.drafter)
    tracks = []
    for seed, prompt in enumerate(PROMPTS):
        wanted = SamplingParams(max_tokens=80, seed=seed, structured_outputs=SPEC, **params)  # type: ignore[arg-type]
        (request,) = maker.make(str(seed), prompt, wanted, SpeculationChoice(rule=rule))
        tracks.append(engine.add(request, compiler(KIND).compile(SPEC)))
    run(engine, preempt_youngest)
    assert engine.runner.pool.num_held == 0
    return tracks


_plain: dict[str, list[list[int]]] = {}


def texts(tracks: list[SequenceState]) -> list[list[int]]:
    for track in tracks:
        assert track.error is None and track.seq.finish_reason in ("stop", "length")
        if track.seq.finish_reason == "stop":
            assert EXAMPLES["person"].judge(text_of(READER, track.seq.tokens[len(track.seq.request.prompt) :]))
    assert any(track.seq.finish_reason == "stop" for track in tracks)
    return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


def counts(tracks: list[SequenceState]) -> dict[str, tuple[int, int]]:
    """Guesses made and accepted, by who made them."""
    whole = SpeculationStats.total(track.speculation for track in tracks)
    return {name: (count.drafted, count.accepted) for name, count in whole.by_drafter.items()}


def plain_texts(sampling: str) -> list[list[int]]:
    if sampling not in _plain:
        _plain[sampling] = texts(write(None, **SAMPLING[sampling]))
    return _plain[sampling]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", ["eagle", "medusa", "block", "mtp"])
def test_heads_write_the_same_object(name: str, sampling: str) -> None:
    for packed in (False, True):
        tracks = write(OwnHead(over_all(name), packed=packed), **SAMPLING[sampling])
        assert texts(tracks) == plain_texts(sampling)
        found = counts(tracks)
        assert found[name][0] > 200 and found[name][1] > 0 and found[GRAMMAR][1] == found[GRAMMAR][0] > 0


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_second_choice_is_judged_by_its_own_branch(sampling: str, page_size: int) -> None:
    """The right token always stands behind one that leads the grammar elsewhere, or nowhere."""
    truth = plain_texts(sampling)

    def propose(seq: Sequence, budget: Budget) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        for at, token in enumerate(truth[seq.id][seq.num_output_tokens :][:4]):
            parents += [len(tokens) - 1] * 2
            tokens += [(token + at) % TOKENS if at % 2 else QUOTE, token]
        return Draft(tuple(tokens), tuple(parents), "tree")

    world = replace(HERE, page_size=page_size, pages=1024 // page_size)
    tracks = write(ScriptedDrafter(propose), world, **SAMPLING[sampling])
    assert texts(tracks) == truth
    assert sum(track.speculation.accepted_per_step for track in tracks) / len(tracks) > 2.5


@pytest.mark.parametrize("sampling", SAMPLING)
def test_so_do_others_that_make_trees(sampling: str) -> None:
    def merged() -> MixDrafter:
        arms: list[Drafter] = [NGramDrafter(1, 3), OwnHead(over_all("eagle"), packed=True)]
        return MixDrafter([*arms, MergedDrafter("ngram+eagle", arms)])

    for make in (TokenRecyclingDrafter, LookaheadDrafter, merged):
        tracks = write(make(), **SAMPLING[sampling])
        assert texts(tracks) == plain_texts(sampling) and sum(track.speculation.drafted for track in tracks) > 100


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize("name", ["eagle", "medusa", "block"])
def test_what_is_drawn_and_forbidden_is_never_let_in(name: str, rule: str) -> None:
    tracks = write(OwnHead(over_all(name), packed=True), rule=rule, temperature=0.9)
    assert texts(tracks) and counts(tracks)[name][0] > 200

"""Trees under a grammar: masks follow each branch, so the output is valid and equals plain decoding's."""

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
    """Return a head whose draft vocabulary has all of the grammar's tokens."""
    return replace(HEADS[name], vocab=TOKENS, draft_vocab=None)


def write(drafter: Drafter | None, world: World = HERE, rule: str = "match", **params: object) -> list[SequenceState]:
    """Generate a JSON object of the schema for each prompt, in one batch."""
    engine: Engine = world.engine(drafter)
    engine.tokenizer = READER
    maker = RequestBuilder(RequestLimits(CONTEXT, READER.end_ids, TOKENS), READER, engine.drafter)
    states = []
    for seed, prompt in enumerate(PROMPTS):
        wanted = SamplingParams(max_tokens=80, seed=seed, structured_outputs=SPEC, **params)  # type: ignore[arg-type]
        (request,) = maker.make(str(seed), prompt, wanted, SpeculationChoice(rule=rule))
        states.append(engine.add(request, compiler(KIND).compile(SPEC)))
    run(engine, preempt_youngest)
    assert engine.runner.pool.num_held == 0
    return states


_plain: dict[str, list[list[int]]] = {}


def outputs(states: list[SequenceState]) -> list[list[int]]:
    for state in states:
        assert state.error is None and state.seq.finish_reason in ("stop", "length")
        if state.seq.finish_reason == "stop":
            assert EXAMPLES["person"].is_valid(text_of(READER, state.seq.tokens[len(state.seq.request.prompt) :]))
    assert any(state.seq.finish_reason == "stop" for state in states)
    return [state.seq.tokens[len(state.seq.request.prompt) :] for state in states]


def counts(states: list[SequenceState]) -> dict[str, tuple[int, int]]:
    """Return drafted and accepted tokens by drafter."""
    whole = SpeculationStats.total(state.speculation for state in states)
    return {name: (count.drafted, count.accepted) for name, count in whole.by_drafter.items()}


def plain_outputs(sampling: str) -> list[list[int]]:
    if sampling not in _plain:
        _plain[sampling] = outputs(write(None, **SAMPLING[sampling]))
    return _plain[sampling]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", ["eagle", "medusa", "block", "mtp"])
def test_heads_are_lossless_under_a_grammar(name: str, sampling: str) -> None:
    for packed in (False, True):
        states = write(OwnHead(over_all(name), packed=packed), **SAMPLING[sampling])
        assert outputs(states) == plain_outputs(sampling)
        found = counts(states)
        assert found[name][0] > 200 and found[name][1] > 0 and found[GRAMMAR][1] == found[GRAMMAR][0] > 0


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_second_choice_is_verified_with_the_mask_of_its_own_branch(sampling: str, page_size: int) -> None:
    """The right token always comes after a sibling that leads the grammar elsewhere, or nowhere."""
    truth = plain_outputs(sampling)

    def propose(seq: Sequence, budget: Budget) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        for at, token in enumerate(truth[seq.id][seq.num_output_tokens :][:4]):
            parents += [len(tokens) - 1] * 2
            tokens += [(token + at) % TOKENS if at % 2 else QUOTE, token]
        return Draft(tuple(tokens), tuple(parents), "tree")

    world = replace(HERE, page_size=page_size, pages=1024 // page_size)
    states = write(ScriptedDrafter(propose), world, **SAMPLING[sampling])
    assert outputs(states) == truth
    assert sum(state.speculation.accepted_per_step for state in states) / len(states) > 2.5


@pytest.mark.parametrize("sampling", SAMPLING)
def test_other_tree_drafters_are_lossless_under_a_grammar(sampling: str) -> None:
    def merged() -> MixDrafter:
        drafters: list[Drafter] = [NGramDrafter(1, 3), OwnHead(over_all("eagle"), packed=True)]
        return MixDrafter([*drafters, MergedDrafter("ngram+eagle", drafters)])

    for make in (TokenRecyclingDrafter, LookaheadDrafter, merged):
        states = write(make(), **SAMPLING[sampling])
        assert outputs(states) == plain_outputs(sampling) and sum(state.speculation.drafted for state in states) > 100


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize("name", ["eagle", "medusa", "block"])
def test_a_sampled_forbidden_token_is_never_accepted(name: str, rule: str) -> None:
    states = write(OwnHead(over_all(name), packed=True), rule=rule, temperature=0.9)
    assert outputs(states) and counts(states)[name][0] > 200

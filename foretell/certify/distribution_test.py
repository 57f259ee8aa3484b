"""Part two: many short texts through the real engine, counted against the exact distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.model import ModelDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.engine.verifier import SequenceVerifier, rule_for
from foretell.kv.prefix import PrefixIndex
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.logits_processors import TokenHistory, changes_logits
from foretell.sampling.sampling import SamplingRow, probabilities, process_logits
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, ScheduledSequence, Sequence, SpeculationChoice
from foretell.verify.rules import Rule

from .evidence import Evidence

VOCAB, LENGTH, DRAFTED = 4, 3, 4
PROMPT = (1,)  # one token: the very first step drafts already
MAX_TOKENS = LENGTH + DRAFTED  # no draft is cut short by the end of the texts that are counted
CONFIG = ModelConfig(vocab=VOCAB, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, context=64)
FALSE_ALARM = 1e-3  # of a whole run in which nothing is wrong
POWER = 0.99
FULL_DISTANCE = 0.01  # the total variation a full run finds with that power
QUICK_DRAWS = 4_000


@dataclass(frozen=True)
class Setting:
    """A way to sample, and how many texts are written at once."""

    name: str
    params: SamplingParams
    batch: int
    first_seed: int  # settings share no seed: under `match` equal seeds would sample equal tokens
    drafted: int = 2
    make: Callable[[], Drafter] | None = None  # None: the drafter that draws at random

    def drafter(self) -> Drafter:
        return sampling_drafter() if self.make is None else self.make()


def fixed_chain(seq: Sequence, budget: Budget) -> Draft:
    """Guesses that are not drawn: they depend on the place alone."""
    return Draft.chain([(len(seq.tokens) + 2 * i) % VOCAB for i in range(budget.nodes)], "fixed")


def fixed_tree(seq: Sequence, budget: Budget) -> Draft:
    """Two first guesses, the second with two that follow it."""
    first = len(seq.tokens) % VOCAB
    return Draft((first, (first + 1) % VOCAB, first, (first + 2) % VOCAB), (-1, -1, 1, 1), "fixed tree")


PLAIN = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS)
NARROW = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=MAX_TOKENS)
BENT = SamplingParams(
    temperature=1.3,
    frequency_penalty=0.6,
    presence_penalty=0.3,
    repetition_penalty=1.2,
    allowed_token_ids=(0, 1, 3),
    max_tokens=MAX_TOKENS,
)
SEEDS = 1 << 20  # of each setting; more than it has draws
SETTINGS = (
    Setting("temperature 1, batch 64", PLAIN, 64, 0),
    Setting("temperature 0.7, top-p 0.9, batch 16, four guesses", NARROW, 16, SEEDS, 4),
    Setting("temperature 1.3, penalties, three tokens allowed, batch 256", BENT, 256, 2 * SEEDS),
    Setting("guesses not drawn, batch 64", PLAIN, 64, 3 * SEEDS, 3, lambda: ScriptedDrafter(fixed_chain)),
)
TREE = Setting("a tree of guesses not drawn, batch 64", PLAIN, 64, 4 * SEEDS, 4, lambda: ScriptedDrafter(fixed_tree))
COUNT = len(SETTINGS) + 1


@dataclass(frozen=True)
class DistributionResult:
    """A likelihood-ratio test of counts against probabilities."""

    setting: str
    draws: int
    statistic: float
    freedom: int
    p_value: float
    threshold: float
    distance: float  # empirical total variation, noise included
    finds: float  # the total variation this many draws find with the stated power
    accepted: float  # the share of draft tokens that was accepted
    drafted: int  # draft tokens of all sequences
    accepted_tokens: int

    @property
    def passed(self) -> bool:
        return self.p_value >= self.threshold

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.setting, self.drafted, self.accepted_tokens)


def random_decoder(config: ModelConfig, seed: int, spread: float) -> Decoder:
    """Random matrices; the larger `spread`, the surer its distributions."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=spread)
    return model


def tiny_model(seed: int) -> Decoder:
    """Over four tokens, with distributions that are neither flat nor sure."""
    return random_decoder(CONFIG, seed, 0.35)


def sampling_drafter() -> Drafter:
    """A drafter that draws at random from a model of its own, which agrees with the target about half of the time."""
    return ModelDrafter(ModelRunner(tiny_model(seed=11), 4096, 4, CONFIG.context), VOCAB, "tiny")


def tiny_engine(drafter: Drafter, rules: Callable[[Request], Rule] = rule_for, drafted: int = 2) -> Engine:
    """The engine as it serves, around a model of a few hundred weights."""
    runner = ModelRunner(tiny_model(seed=7), 4096, 4, CONFIG.context)
    scheduler = Scheduler(runner, PrefixIndex(runner.pool), 256, 4096)
    return Engine(runner, drafter, FixedController(drafted), scheduler, sequence_verifier=SequenceVerifier(rules))


def draws_for(distance: float, settings: int) -> int:
    """Texts needed to find a total variation of `distance` with the stated power in one of `settings` tests."""
    return math.ceil(_reach(settings) / distance**2)


def found_by(draws: int, settings: int) -> float:
    """The total variation that many draws find with the stated power."""
    return math.sqrt(_reach(settings) / draws)


@cache
def _reach(settings: int) -> float:
    """Draws times distance squared: a distance d gives G a noncentrality of at least 4 n d^2."""
    freedom = VOCAB**LENGTH - 1
    threshold = _bisect(lambda value: FALSE_ALARM / settings - chi_squared_tail(value, freedom), 0, 1000)
    return _bisect(lambda shift: noncentral_tail(threshold, freedom, shift) - POWER, 0, 2000) / 4


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def noncentral_tail(statistic: float, freedom: int, shift: float) -> float:
    """The probability that noncentral chi-squared is above `statistic`: central ones, mixed by Poisson weights."""
    terms = torch.arange(int(shift / 2 + 12 * math.sqrt(shift / 2 + 1)) + 20, dtype=torch.float64)
    weights = (terms * math.log(max(shift / 2, 1e-300)) - shift / 2 - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc((freedom + 2 * terms) / 2, torch.full_like(terms, statistic / 2))
    return float((weights * tails).sum())


def check_draws(
    engine: Engine, rule: str, setting: Setting, draws: int, say: Callable[[int], None] = lambda done: None
) -> DistributionResult:
    """Write `draws` texts and compare how often each came with how often it should."""
    expected = exact_law(engine, setting.params)
    counts, accepted, drafted = _count_texts(engine, rule, setting, draws, say)
    statistic, freedom = likelihood_ratio(counts, expected, draws)
    distance = 0.5 * sum(abs(counts[text] / draws - p) for text, p in expected.items())
    return DistributionResult(
        setting.name,
        draws,
        statistic,
        freedom,
        chi_squared_tail(statistic, freedom),
        FALSE_ALARM / COUNT,
        distance,
        found_by(draws, COUNT),
        accepted / drafted if drafted else 0.0,
        drafted,
        accepted,
    )


def _count_texts(
    engine: Engine, rule: str, setting: Setting, draws: int, say: Callable[[int], None]
) -> tuple[Counter[tuple[int, ...]], int, int]:
    limits = RequestLimits(CONFIG.context, frozenset(), VOCAB)
    maker = RequestBuilder(limits, None, engine.drafter, SpeculationChoice(rule=rule))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    seeds_left = range(setting.first_seed, setting.first_seed + draws)
    for first in range(0, draws, setting.batch):
        seeds = seeds_left[first : first + setting.batch]
        tracks = [engine.add(_request(maker, setting.params, seed)) for seed in seeds]
        while any(track.seq.num_output_tokens < LENGTH for track in tracks):
            engine.step()
        for track in tracks:  # what comes after the counted tokens is not looked at
            engine.abort(track.seq.request.id)
        counts.update(tuple(track.seq.tokens[len(PROMPT) :][:LENGTH]) for track in tracks)
        accepted += sum(track.speculation.accepted for track in tracks)
        drafted += sum(track.speculation.drafted for track in tracks)
        say(len(seeds))
    return counts, accepted, drafted


def _request(maker: RequestBuilder, params: SamplingParams, seed: int) -> Request:
    (request,) = maker.make(str(seed), list(PROMPT), params)
    return replace(request, seed=seed)


def exact_law(engine: Engine, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every text, token by token, without any drafting."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in law.items():
            if probability > 0:
                row = _next_distribution(engine, params, text)
                longer |= {(*text, token): probability * float(row[token]) for token in range(VOCAB)}
        law = longer
    return {text: probability for text, probability in law.items() if probability > 0}


def _next_distribution(engine: Engine, params: SamplingParams, text: tuple[int, ...]) -> torch.Tensor:
    """What the target draws the next token from, by a run of the whole text alone."""
    request = Request("exact", PROMPT, params, 0, LENGTH)
    seq = Sequence(-1, request, [*PROMPT, *text])
    engine.runner.reserve(seq, len(seq.tokens))
    logits = engine.runner.forward([ScheduledSequence.of(seq, len(seq.tokens))], [Draft()]).logits
    engine.runner.trim(seq, 0)
    history = TokenHistory(request, seq.tokens, VOCAB) if changes_logits(request, len(text)) else None
    row = SamplingRow(params, 0, len(seq.tokens), history)
    return probabilities(process_logits(logits, [row]), [params])[0].double()


def likelihood_ratio(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int
) -> tuple[float, int]:
    """G = 2 sum O ln(O / E) and its degrees of freedom; cells with few expected texts are put together."""
    if any(text not in expected for text in counts):
        return math.inf, 1  # something came that cannot come
    rare = [text for text, p in expected.items() if p * draws < 5]
    cells = [(counts[text], p * draws) for text, p in expected.items() if p * draws >= 5]
    if rare:
        cells.append((sum(counts[text] for text in rare), sum(expected[text] for text in rare) * draws))
    statistic = 2 * sum(seen * math.log(seen / mean) for seen, mean in cells if seen)
    return max(statistic, 0.0), max(len(cells) - 1, 1)


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """The probability that chi-squared with `freedom` degrees is above `statistic`."""
    if math.isinf(statistic):
        return 0.0
    value = torch.special.gammaincc(
        torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    )
    return float(value)

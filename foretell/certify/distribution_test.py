"""Part 2 of the certificate: counts of many short outputs of the real engine against their exact probabilities.

Also the test that a drafter samples from the distribution it states, on which the rules rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from foretell.certify.evidence import Evidence, json_fields
from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.model import ModelDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.rule_verifier import RuleVerifier, rule_for
from foretell.engine.scheduler import Scheduler
from foretell.kv.prefix import PrefixIndex
from foretell.llm import LLM
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.logits_processors import TokenHistory, changes_logits
from foretell.sampling.sampling import SamplingRow, probabilities, process_logits
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, ScheduledSequence, Sequence, SpeculationChoice
from foretell.verify.rules import Rule

VOCAB = 4  # tokens
LENGTH = 3  # output tokens that are counted
MAX_DRAFT_LENGTH = 4  # draft tokens
PROMPT = (1,)  # one token, so that the first step drafts already
MAX_TOKENS = LENGTH + MAX_DRAFT_LENGTH  # no draft is truncated within the counted tokens
CONFIG = ModelConfig(vocab=VOCAB, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, context=64)
FALSE_ALARM = 1e-3  # probability that a run without a bug fails
POWER = 0.99  # probability that a run finds a bug of the stated distance
FULL_RUN_DISTANCE = 0.01  # total variation that a full run detects with this power
QUICK_SAMPLES = 4_000  # outputs per setting of a quick run
BINS = 20  # of the uniformity test
MIN_P_VALUE = 1e-4  # of the uniformity test
DRAFT_TEMPERATURE = 0.7  # not 1, or a drafter that states q without its temperature would pass


@dataclass(frozen=True)
class SamplingSetting:
    """Sampling parameters, batch size and drafter of one distribution test."""

    name: str
    params: SamplingParams
    batch: int
    first_seed: int  # settings share no seed, because under `match` equal seeds sample equal tokens
    draft_length: int = 2
    make_drafter: Callable[[], Drafter] | None = None  # None: `sampling_drafter`

    def drafter(self) -> Drafter:
        return sampling_drafter() if self.make_drafter is None else self.make_drafter()


def fixed_chain(seq: Sequence, budget: Budget) -> Draft:
    """Draft a chain that depends on the position alone and is not sampled."""
    return Draft.chain([(len(seq.tokens) + 2 * i) % VOCAB for i in range(budget.nodes)], "fixed")


def fixed_tree(seq: Sequence, budget: Budget) -> Draft:
    """Draft a tree of two children, the second with two of its own; it is not sampled."""
    first = len(seq.tokens) % VOCAB
    return Draft((first, (first + 1) % VOCAB, first, (first + 2) % VOCAB), (-1, -1, 1, 1), "fixed tree")


TEMPERATURE_1 = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS)
TOP_P = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=MAX_TOKENS)
PENALTIES = SamplingParams(
    temperature=1.3,
    frequency_penalty=0.6,
    presence_penalty=0.3,
    repetition_penalty=1.2,
    allowed_token_ids=(0, 1, 3),
    max_tokens=MAX_TOKENS,
)
SEEDS = 1 << 20  # seeds reserved for each setting, more than it has samples
SETTINGS = (
    SamplingSetting("temperature 1, batch 64", TEMPERATURE_1, batch=64, first_seed=0),
    SamplingSetting(
        "temperature 0.7, top-p 0.9, batch 16, four draft tokens", TOP_P, batch=16, first_seed=SEEDS, draft_length=4
    ),
    SamplingSetting(
        "temperature 1.3, penalties, three tokens allowed, batch 256", PENALTIES, batch=256, first_seed=2 * SEEDS
    ),
    SamplingSetting(
        "chain not sampled, batch 64",
        TEMPERATURE_1,
        batch=64,
        first_seed=3 * SEEDS,
        draft_length=3,
        make_drafter=lambda: ScriptedDrafter(fixed_chain),
    ),
)
TREE = SamplingSetting(
    "tree not sampled, batch 64",
    TEMPERATURE_1,
    batch=64,
    first_seed=4 * SEEDS,
    draft_length=4,
    make_drafter=lambda: ScriptedDrafter(fixed_tree),
)
NUM_SETTINGS = len(SETTINGS) + 1


@dataclass(frozen=True)
class DistributionResult:
    """A likelihood-ratio test of output counts against their probabilities."""

    setting: str
    num_samples: int  # outputs
    statistic: float
    freedom: int  # degrees
    p_value: float
    threshold: float
    distance: float  # empirical total variation, sampling noise included
    detectable: float  # total variation that this many samples detect with the stated power
    accepted: float  # acceptance rate
    drafted: int  # draft tokens of all sequences
    accepted_tokens: int

    @property
    def passed(self) -> bool:
        return self.p_value >= self.threshold

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.setting, self.drafted, self.accepted_tokens)

    def as_json(self) -> dict[str, Any]:
        fields = json_fields(self, num_samples="draws", detectable="finds")
        return fields | {"passed": self.passed, "rejected": self.evidence.rejected}


def random_decoder(config: ModelConfig, seed: int, spread: float) -> Decoder:
    """Build a decoder with random weights; a larger `spread` gives distributions of lower entropy."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=spread)
    return model


def tiny_model(seed: int) -> Decoder:
    """Build a model over four tokens whose distributions are neither flat nor peaked."""
    return random_decoder(CONFIG, seed, 0.35)


def sampling_drafter() -> Drafter:
    """Return a drafter that samples from a model of its own, which agrees with the target about half of the time."""
    return ModelDrafter(ModelRunner(tiny_model(seed=11), 4096, 4, CONFIG.context), VOCAB, "tiny")


def tiny_engine(drafter: Drafter, rules: Callable[[Request], Rule] = rule_for, draft_length: int = 2) -> Engine:
    """Build the engine that serves, around a model of a few hundred weights."""
    runner = ModelRunner(tiny_model(seed=7), 4096, 4, CONFIG.context)
    scheduler = Scheduler(runner, PrefixIndex(runner.pool), 256, 4096)
    return Engine(runner, drafter, FixedController(draft_length), scheduler, rule_verifier=RuleVerifier(rules))


def samples_needed(distance: float, settings: int) -> int:
    """Return the outputs needed to detect a total variation of `distance` in one of `settings` tests with `POWER`."""
    return math.ceil(_samples_times_distance_squared(settings) / distance**2)


def detectable_distance(samples: int, settings: int) -> float:
    """Return the total variation that so many outputs detect with `POWER`."""
    return math.sqrt(_samples_times_distance_squared(settings) / samples)


@cache
def _samples_times_distance_squared(settings: int) -> float:
    """Return n d^2 at `POWER`: a total variation of d gives the statistic G a noncentrality of at least 4 n d^2."""
    freedom = VOCAB**LENGTH - 1
    threshold = _bisect(lambda value: FALSE_ALARM / settings - chi_squared_tail(value, freedom), 0, 1000)
    return _bisect(lambda shift: noncentral_tail(threshold, freedom, shift) - POWER, 0, 2000) / 4


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of an increasing function by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def noncentral_tail(statistic: float, freedom: int, shift: float) -> float:
    """Return P(noncentral chi-squared > statistic), as a Poisson mixture of central ones."""
    terms = torch.arange(int(shift / 2 + 12 * math.sqrt(shift / 2 + 1)) + 20, dtype=torch.float64)
    weights = (terms * math.log(max(shift / 2, 1e-300)) - shift / 2 - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc((freedom + 2 * terms) / 2, torch.full_like(terms, statistic / 2))
    return float((weights * tails).sum())


def check_distribution(engine: Engine, rule: str, setting: SamplingSetting, samples: int) -> DistributionResult:
    """Generate `samples` outputs and compare their counts with the exact probabilities."""
    expected = exact_distribution(engine, setting.params)
    counts, accepted, drafted = _count_outputs(engine, rule, setting, samples)
    statistic, freedom = likelihood_ratio(counts, expected, samples)
    return DistributionResult(
        setting=setting.name,
        num_samples=samples,
        statistic=statistic,
        freedom=freedom,
        p_value=chi_squared_tail(statistic, freedom),
        threshold=FALSE_ALARM / NUM_SETTINGS,
        distance=0.5 * sum(abs(counts[output] / samples - p) for output, p in expected.items()),
        detectable=detectable_distance(samples, NUM_SETTINGS),
        accepted=accepted / drafted if drafted else 0.0,
        drafted=drafted,
        accepted_tokens=accepted,
    )


def _count_outputs(
    engine: Engine, rule: str, setting: SamplingSetting, samples: int
) -> tuple[Counter[tuple[int, ...]], int, int]:
    """Return the counts of outputs, and the accepted and drafted tokens of all of them."""
    limits = RequestLimits(CONFIG.context, frozenset(), VOCAB)
    builder = RequestBuilder(limits, None, engine.drafter, SpeculationChoice(rule=rule))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    all_seeds = range(setting.first_seed, setting.first_seed + samples)
    for first in range(0, samples, setting.batch):
        seeds = all_seeds[first : first + setting.batch]
        states = [engine.add(_request(builder, setting.params, seed)) for seed in seeds]
        while any(state.seq.num_output_tokens < LENGTH for state in states):
            engine.step()
        for state in states:  # only the first `LENGTH` tokens are counted
            engine.abort(state.seq.request.id)
        counts.update(tuple(state.seq.tokens[len(PROMPT) :][:LENGTH]) for state in states)
        accepted += sum(state.speculation.accepted for state in states)
        drafted += sum(state.speculation.drafted for state in states)
    return counts, accepted, drafted


def _request(builder: RequestBuilder, params: SamplingParams, seed: int) -> Request:
    (request,) = builder.make(str(seed), list(PROMPT), params)
    return replace(request, seed=seed)


def exact_distribution(engine: Engine, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return the probability of every possible output, token by token without drafts."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for output, probability in distribution.items():
            if probability > 0:
                row = _next_distribution(engine, params, output)
                longer |= {(*output, token): probability * float(row[token]) for token in range(VOCAB)}
        distribution = longer
    return {output: probability for output, probability in distribution.items() if probability > 0}


def _next_distribution(engine: Engine, params: SamplingParams, output: tuple[int, ...]) -> torch.Tensor:
    """Return the distribution of the target's next token, by a forward of the whole sequence alone."""
    request = Request("exact", PROMPT, params, 0, LENGTH)
    seq = Sequence(-1, request, [*PROMPT, *output])
    engine.runner.reserve(seq, len(seq.tokens))
    logits = engine.runner.forward([ScheduledSequence.of(seq, len(seq.tokens))], [Draft()]).logits
    engine.runner.trim(seq, 0)
    history = TokenHistory(request, seq.tokens, VOCAB) if changes_logits(request, len(output)) else None
    row = SamplingRow(params, 0, len(seq.tokens), history)
    return probabilities(process_logits(logits, [row]), [params])[0].double()


def likelihood_ratio(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], samples: int
) -> tuple[float, int]:
    """Return G = 2 sum O ln(O / E) and its degrees of freedom; cells with few expected outputs are pooled."""
    if any(output not in expected for output in counts):
        return math.inf, 1  # an output of probability 0 occurred
    rare = [output for output, p in expected.items() if p * samples < 5]
    cells = [(counts[output], p * samples) for output, p in expected.items() if p * samples >= 5]
    if rare:
        cells.append((sum(counts[output] for output in rare), sum(expected[output] for output in rare) * samples))
    statistic = 2 * sum(observed * math.log(observed / mean) for observed, mean in cells if observed)
    return max(statistic, 0.0), max(len(cells) - 1, 1)


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """Return P(chi-squared > statistic) for `freedom` degrees of freedom."""
    if math.isinf(statistic):
        return 0.0
    value = torch.special.gammaincc(
        torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    )
    return float(value)


class RankRecorder(MixDrafter):
    """A mix that records the randomized rank of each sampled token in the distribution it was sampled from."""

    def __init__(self, mix: MixDrafter) -> None:
        super().__init__(mix.drafters.values(), mix.default_drafters, mix.supervisor)
        self.ranks: list[float] = []

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        for draft in drafts:
            self.ranks += [_randomized_rank(draft, node) for node in range(len(draft)) if draft.is_sampled(node)]
        return drafts


def _randomized_rank(draft: Draft, node: int) -> float:
    """Return a number that is uniform in (0, 1) if the token was sampled from its row (probability integral transform).

    It is the mass of all more likely tokens plus a random fraction of the token's own. Ordering by probability makes a
    row that is too flat or too peaked show.
    """
    assert draft.probs is not None, "a sampled node has a distribution"
    row, token = draft.probs[node].double(), draft.tokens[node]
    return float(row[row > row[token]].sum() + row[row == row[token]].sum() * torch.rand(()))


@dataclass(frozen=True)
class DraftCheckResult:
    """Pearson's test that the randomized ranks of sampled draft tokens are uniform."""

    num_tokens: int
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= MIN_P_VALUE

    @property
    def missing_evidence(self) -> list[str]:
        """Return why the test proves nothing: Pearson's test needs five expected tokens in each bin."""
        few = f"part 3, sampled draft tokens: {self.num_tokens}, fewer than {5 * BINS}; give more prompts or tokens"
        return [few] if self.num_tokens < 5 * BINS else []

    def as_json(self) -> dict[str, Any]:
        return json_fields(self, num_tokens="guesses") | {"passed": self.passed}


def check_draft_sampling(llm: LLM, prompts: list[list[int]], rule: str, max_tokens: int) -> DraftCheckResult:
    """Generate the prompts, each with its own seed, and test what the drafter sampled against what it states."""
    drafter = llm.engine.drafter
    observed = llm.engine.drafter = RankRecorder(drafter)
    try:
        params = SamplingParams(temperature=DRAFT_TEMPERATURE, max_tokens=max_tokens, ignore_eos=True)
        each = [replace(params, seed=1000 + i) for i in range(len(prompts))]
        llm.generate(prompts, each, speculation=SpeculationChoice(rule=rule))
    finally:
        llm.engine.drafter = drafter
    return check_uniformity(observed.ranks)


def check_uniformity(ranks: list[float]) -> DraftCheckResult:
    """Test by Pearson's chi-squared that ranks are uniform in (0, 1)."""
    if not ranks:
        return DraftCheckResult(0, 1.0)
    counts = torch.histc(torch.tensor(ranks), BINS, 0, 1)
    mean = len(ranks) / BINS
    return DraftCheckResult(len(ranks), chi_squared_tail(float(((counts - mean) ** 2 / mean).sum()), BINS - 1))
